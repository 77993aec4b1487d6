"""A reply's scores and its report on several drafters cross the socket, and malformed ones are no reply.

An order names the KV slots that the drafter has not read.
"""

from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch

from specray.config import MAX_DRAFTERS
from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.step import TOLERATED_FAULTS, DrafterUse, DraftFault
from specray.worker.remote_drafter.wire import (
    DeltaEncoder,
    DraftReply,
    _lists,
    _lists_from_device,
    pack,
    unpack_order,
    unpack_reply,
)
from tests.support.drafters import Tokens, make_context

REPLY = DraftReply.of(1, 0.5, DraftTree.chains(torch.tensor([[9, 3]])))
USE = DrafterUse("head", 0.1, 0.2, 3, 4, 5, 0)


def test_the_next_order_after_missed_steps_names_their_kv_slots_once() -> None:
    encoder, context = DeltaEncoder(), make_context([Tokens(0, [5, 6, 7])])
    encoder.skip(replace(context, missed_kv_slots={9}))
    order = unpack_order(pack(encoder.order(1, 0, replace(context, missed_kv_slots={12}))))
    assert sorted(order.missed_kv_slots) == [1, 2, 9, 12]  # a block has one token here, and the last one has no KV yet
    assert unpack_order(pack(encoder.order(2, 0, context))).missed_kv_slots == []


def test_scores_cross_the_socket() -> None:
    tree = DraftTree.chains(torch.tensor([[9, 3], [9, 4]]))._replace(scores=torch.tensor([[1.0, 0.3], [1.0, 0.7]]))
    received = unpack_reply(pack(DraftReply.of(1, 0.5, tree))).checked_trees(2, vocab_size=10, max_draft_tokens=1)
    assert [each.scores for each in received] == tree.scores.tolist()
    assert REPLY.checked_trees(1, vocab_size=10, max_draft_tokens=1)[0].scores == []


@pytest.mark.parametrize("scores", [None, torch.tensor([[1.0, 0.3, 0.1], [1.0, 0.7, 0.0]])])
def test_one_copy_to_the_host_keeps_all_of_a_tree(scores: torch.Tensor | None) -> None:
    tokens, parents = torch.tensor([[9, 3, 4], [9, 4, -1]]), torch.tensor([[-1, 0, 0], [-1, 0, -1]])
    tree = DraftTree(tokens, parents, torch.tensor([3, 2]), 1, scores=scores)
    assert _lists_from_device(tree) == _lists(tree)
    received = DraftReply.of(1, 0.5, tree).checked_trees(2, vocab_size=10, max_draft_tokens=2)
    assert [each.nodes for each in received] == [TreeLists([9, 3, 4], [-1, 0, 0]), TreeLists([9, 4], [-1, 0])]


def test_of_several_drafters_one_that_is_broken_leaves_the_others_trees() -> None:
    tree = DraftTree(torch.tensor([[9, 3], [-1, -1]]), torch.tensor([[-1, 0], [-1, -1]]), torch.tensor([2, 0]), 1)
    tree = tree._replace(scores=torch.tensor([[1.0, 0.3], [0.0, 0.0]]))
    assert DraftReply.of(1, 0.5, tree).fault is DraftFault.NOT_A_NUMBER
    reply = unpack_reply(pack(DraftReply.of(1, 0.5, tree, lambda: torch.tensor([9, 8]))))
    received = reply.checked_trees(2, vocab_size=10, max_draft_tokens=1)
    assert (reply.fault, reply.num_broken) == (None, 1)
    assert [each.nodes.tokens for each in received] == [[9, 3], [8]]


def test_a_fault_crosses_the_socket() -> None:
    reply = DraftReply.failed(3, 0.5, DraftFault.NOT_A_NUMBER)
    assert unpack_reply(pack(reply)) == reply
    for fault in ("unknown", *TOLERATED_FAULTS):  # a drafter that goes on has no fault
        with pytest.raises(ValueError, match="not a reply"):
            unpack_reply(msgpack.packb(reply._replace(fault=fault)))  # type: ignore[arg-type]


def test_a_count_of_broken_trees_that_is_none_is_no_reply() -> None:
    with pytest.raises(ValueError, match="not a reply"):
        unpack_reply(msgpack.packb(REPLY._replace(num_broken=None)))  # type: ignore[arg-type]


@pytest.mark.parametrize("scores", [[[1.0]], [[1.0, 0.5, 0.2]], [[1.0, 0.5], [1.0, 0.5]]])
def test_scores_of_another_number_of_nodes_are_no_trees(scores: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="scores"):
        REPLY._replace(scores=scores).checked_trees(1, vocab_size=10, max_draft_tokens=1)


@pytest.mark.parametrize("score", [-0.5, float("nan")])
def test_scores_that_are_no_probabilities_are_no_reply(score: float) -> None:
    """A budget sorts them into classes, and there is none for log-probabilities."""
    with pytest.raises(ValueError, match="not a reply"):
        unpack_reply(pack(REPLY._replace(scores=[[1.0, score]])))


def test_a_fault_that_cannot_be_printed_is_no_reply() -> None:
    parts = [msgpack.packb(part) for part in REPLY]
    parts[DraftReply._fields.index("fault")] = b"\x91" * 1010 + b"\x90"  # a list in a list in a list …
    with pytest.raises(ValueError, match="not a reply"):
        unpack_reply(bytes([0x90 + len(parts)]) + b"".join(parts))


def test_uses_cross_the_socket() -> None:
    assert unpack_reply(pack(REPLY._replace(uses=[USE, USE]))).uses == [USE, USE]
    assert unpack_reply(pack(REPLY)).uses == []
    worse = USE._replace(shadow_gain=-7, shadow_gain_squares=49)
    assert unpack_reply(pack(REPLY._replace(uses=[worse]))).uses == [worse]


@pytest.mark.parametrize(
    "uses",
    [
        3,
        "uses",
        [3],
        [["head"]],
        [[*USE, 1]],
        [[7, *USE[1:]]],
        [["head", "soon", *USE[2:]]],
        [["head", -1.0, *USE[2:]]],
        [["head", float("nan"), *USE[2:]]],
        [["head", True, *USE[2:]]],
        [list(USE)] * (MAX_DRAFTERS + 1),
    ],
)
def test_malformed_uses_are_no_reply(uses: Any) -> None:
    with pytest.raises(ValueError, match="not a reply"):
        unpack_reply(msgpack.packb(REPLY._replace(uses=uses)))
