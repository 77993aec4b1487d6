"""The record of the KV slots that a drafter has written."""

from specray.spec_decode.propose_context import DraftRequest
from specray.spec_decode.written_slots import WrittenSlots
from tests.support.drafters import Tokens, make_context


def test_the_next_request_of_a_slot_has_written_nothing() -> None:
    """It joins without this drafter having read its first tokens, which lie in other KV slots."""
    first, second = make_context([Tokens(0, [1, 2, 3, 4, 5])]), make_context([Tokens(0, [6, 7, 8, 9, 10])])
    second.table.host_kv_slots[0, :5] = range(8, 13)
    written = WrittenSlots(num_slots=16)
    written.update(first.table, first.requests, [0])
    assert written.are_all(first.table, first.requests)
    (request,) = second.requests
    written.update(second.table, [request._replace(start=2)], [2])
    assert not written.are_all(second.table, second.requests)
    assert written.visible(second.table, second.bounds[0], second.requests)[1] == [2]


def test_slots_that_others_got_in_missed_steps_are_not_written() -> None:
    """The next request shares their KV, of which this drafter has only what an earlier owner wrote."""
    first, second = (make_context([Tokens(0, list(tokens))]) for tokens in (range(5), range(6, 11)))
    written = WrittenSlots(num_slots=16)
    written.update(first.table, first.requests, [0])
    written.forget(first.table.host_kv_slots[0, :2].tolist())
    (request,) = second.requests
    written.update(second.table, [request._replace(start=3)], [3])
    assert written.visible(second.table, second.bounds[0], second.requests)[1] == [2]


def test_a_missed_step_leaves_a_gap() -> None:
    context = make_context([Tokens(0, list(range(9)))])
    written = WrittenSlots(num_slots=16)
    (request,) = context.requests
    for start, end in ((0, 2), (4, 6), (6, 8)):
        part = DraftRequest(0, start, end, request.draft_limit)
        written.update(context.table, [part], [start])
        assert written.are_all(context.table, [part]) is (start == 0)
    assert written.visible(context.table, context.bounds[0], [request])[1] == [6]
