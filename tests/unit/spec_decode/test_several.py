"""Several drafters act as one: each sees its own requests, layers and time; their trees are one batch."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import DraftFaultError
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.several import SeveralDrafters, merge_trees
from specray.step import DrafterUse, DraftFault
from tests.support.drafters import Tokens, make_context

WIDTH = 2  # of a hidden state


class RecordingDrafter:
    """Drafts a chain of `depth` tokens `token`, and records what it sees."""

    reads_next_token = False

    def __init__(self, token: int, depth: int, layers: tuple[int, ...] = (), fault: DraftFault | None = None) -> None:
        self.max_draft_tokens = depth
        self.aux_hidden_state_layers = layers
        self.seen: list[list[int]] = []
        self.unfinished: list[list[int]] = []
        self.states: list[list[list[float]]] = []
        self.forgotten: list[list[int]] = []
        self.released: list[int] = []
        self._token, self._fault = token, fault

    def propose(self, context: ProposeContext) -> DraftTree:
        self.seen.append([request.slot for request in context.requests])
        self.unfinished.append([request.slot for request in context.unfinished])
        if context.aux_hidden_states is not None:
            self.states.append(context.aux_hidden_states.tolist())
        if self._fault:
            raise DraftFaultError(self._fault)
        drafts = [self._token] * self.max_draft_tokens
        parents = [NONE, *range(len(drafts))]
        return DraftTree.from_lists([TreeLists([root, *drafts], parents) for root in context.roots().tolist()])

    def release(self, slots: Sequence[int]) -> None:
        self.released += slots

    def forget_kv(self, table: RequestTable, requests: Sequence[DraftRequest]) -> None:
        assert table is not None
        self.forgotten.append([request.slot for request in requests])


def context_with(
    drafters: dict[int, str], unfinished: Sequence[int] = (), shadows: dict[int, str] | None = None
) -> ProposeContext:
    """Requests of two known tokens each in slots that name their drafters."""
    names = list(drafters)
    requests = [Tokens(slot, [slot, 9]) for slot in names if slot not in unfinished]
    context = make_context(requests, [Tokens(slot, [slot, 9]) for slot in names if slot in unfinished])
    for slot, name in drafters.items():
        context.table.states[slot].drafter = name
        context.table.states[slot].shadow = (shadows or {}).get(slot, "")
    return context


def trees_of(tree: DraftTree) -> list[list[int]]:
    return [lists.tokens for lists in tree.to_lists()]


def test_each_drafter_drafts_for_its_own_requests() -> None:
    first, second = RecordingDrafter(50, 1), RecordingDrafter(60, 3)
    several = SeveralDrafters({"a": first, "b": second})
    tree = several.propose(context_with({0: "b", 1: "a", 2: "b", 3: "b"}, unfinished=[3]))
    assert trees_of(tree) == [[9, 60, 60, 60], [9, 50], [9, 60, 60, 60]]
    assert (first.seen, first.unfinished) == ([[1]], [[]])
    assert (second.seen, second.unfinished) == ([[0, 2]], [[3]])
    assert several.max_draft_tokens == 3
    assert tree.max_depth == 3


def test_a_request_without_a_known_drafter_gets_the_first() -> None:
    """Its drafter was dropped, or there was only one when it was admitted."""
    several = SeveralDrafters({"a": RecordingDrafter(50, 1), "b": RecordingDrafter(60, 1)})
    assert trees_of(several.propose(context_with({0: "dropped", 1: "", 2: "b"}))) == [[9, 50], [9, 50], [9, 60]]


def test_a_drafter_reads_the_states_of_its_own_tokens_and_layers() -> None:
    first, second = RecordingDrafter(50, 1, (4, 2)), RecordingDrafter(60, 1, (2, 7))
    several = SeveralDrafters({"a": first, "b": second})
    assert several.aux_hidden_state_layers == (4, 2, 7)
    context = context_with({0: "b", 1: "a", 2: "b"}, unfinished=[2])
    states = torch.arange(3 * 3 * WIDTH, dtype=torch.float32).view(3, 3 * WIDTH)  # one computed token each
    several.propose(replace(context, gather_aux_hidden_states=lambda: states))
    rows = states.view(3, 3, WIDTH)
    assert first.states == [rows[1:2, :2].flatten(1).tolist()]
    assert second.states == [rows[[0, 2]][:, 1:].flatten(1).tolist()]


def test_the_others_kv_slots_are_forgotten() -> None:
    first, second = RecordingDrafter(50, 1), RecordingDrafter(60, 1)
    SeveralDrafters({"a": first, "b": second}).propose(context_with({0: "b", 1: "a", 2: "b"}))
    assert (first.forgotten, second.forgotten) == ([[0, 2]], [[1]])


def test_prompts_of_others_are_read_by_drafters_with_kv_in_the_targets_slots() -> None:
    """Later requests find such a prompt's beginning in the prefix cache, whichever drafter they have."""
    first, second = RecordingDrafter(50, 1, (4,)), RecordingDrafter(60, 1, (4,))
    context = context_with({0: "b", 1: "a", 2: "b", 3: "b"}, unfinished=[3])
    for slot in (0, 3):
        context.table.states[slot].num_prompt_tokens = 1  # the only computed token is the prompt's
    states = torch.arange(4 * WIDTH, dtype=torch.float32).view(4, WIDTH)
    several = SeveralDrafters({"a": first, "b": second}, clock=iter(range(9)).__next__)
    tree = several.propose(replace(context, gather_aux_hidden_states=lambda: states))
    assert trees_of(tree) == [[9, 60], [9, 50], [9, 60]]
    uses = several.take_uses()
    assert [(use.seconds, use.shadow_seconds) for use in uses] == [(pytest.approx(1 / 3), 0.0), (1.0, 0.0)]
    assert (first.seen, first.unfinished, first.forgotten) == ([[1]], [[0, 3]], [[2]])
    assert first.states == [states[[1, 0, 3]].tolist()]
    assert (second.seen, second.unfinished) == ([[0, 2]], [[3]])


def test_a_drafter_that_faults_leaves_the_others_drafts() -> None:
    broken = RecordingDrafter(50, 1, fault=DraftFault.LATE)
    several = SeveralDrafters({"a": broken, "b": RecordingDrafter(60, 1)}, clock=iter(range(9)).__next__)
    assert trees_of(several.propose(context_with({0: "a", 1: "b"}))) == [[9], [9, 60]]
    assert [(use.drafter, use.num_faults) for use in several.take_uses()] == [("a", 1), ("b", 0)]


def test_a_shadow_that_raises_leaves_the_others_drafts(caplog: pytest.LogCaptureFixture) -> None:
    """A new head is measured without a user noticing, whatever is wrong with it. Its process used to end."""
    broken = RecordingDrafter(50, 1)
    broken.propose = lambda _: [][0]  # type: ignore[method-assign]
    several = SeveralDrafters({"b": RecordingDrafter(60, 1), "a": broken}, clock=iter(range(99)).__next__)
    for _ in range(3):
        assert trees_of(several.propose(context_with({0: "b", 1: "b"}, shadows={0: "a"}))) == [[9, 60], [9, 60]]
    uses = [use for use in several.take_uses() if use.drafter == "a"]
    assert [(use.num_faults, use.seconds, use.shadow_seconds) for use in uses] == [(1, 0.0, 1.0)] * 3
    assert [record.exc_info is not None for record in caplog.records] == [True], "logged once"
    single = SeveralDrafters({"a": broken})
    with pytest.raises(IndexError):
        single.propose(context_with({0: "a"}))


def test_one_rank_of_several_does_not_go_on_alone() -> None:
    """Where a drafter raises on one rank, the others wait for its part of a sum. What all ranks find is a fault."""
    raising, faulty = RecordingDrafter(50, 1), RecordingDrafter(50, 1, fault=DraftFault.NOT_A_NUMBER)
    raising.propose = lambda _: [][0]  # type: ignore[method-assign]
    for broken in (raising, faulty):
        several = SeveralDrafters({"a": broken, "b": RecordingDrafter(60, 1)}, num_ranks=2)
        with pytest.raises(IndexError) if broken is raising else nullcontext():
            assert trees_of(several.propose(context_with({0: "a", 1: "b"}))) == [[9], [9, 60]]


@pytest.mark.parametrize(
    "lost", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=lambda e: type(e).__name__
)
def test_a_lost_device_or_process_is_no_fault_of_one_drafter(lost: Exception) -> None:
    broken = RecordingDrafter(50, 1)
    broken.propose = Mock(side_effect=lost)  # type: ignore[method-assign]
    several = SeveralDrafters({"b": RecordingDrafter(60, 1), "a": broken})
    with pytest.raises(type(lost)):
        several.propose(context_with({0: "a", 1: "b"}))


def test_a_fault_of_a_single_member_is_that_of_all() -> None:
    """So that its process is replaced, as for a drafter without others."""
    several = SeveralDrafters({"a": RecordingDrafter(50, 1, fault=DraftFault.NOT_A_NUMBER)})
    with pytest.raises(DraftFaultError):
        several.propose(context_with({0: "a"}))
    assert [(use.drafter, use.num_faults) for use in several.take_uses()] == [("a", 1)]


@pytest.mark.parametrize("place", ["own", "shadow"])
def test_a_drafter_whose_logits_are_not_finite_is_named(place: str) -> None:
    broken = RecordingDrafter(50, 1)
    broken.propose = lambda context: DraftTree.from_lists([TreeLists([], [])] * len(context.requests))  # type: ignore[method-assign]
    several = SeveralDrafters({"a": broken, "b": RecordingDrafter(60, 1)}, clock=iter(range(9)).__next__)
    own = {0: "a", 1: "b"} if place == "own" else {0: "b", 1: "b"}
    several.propose(context_with(own, shadows={} if place == "own" else {0: "a"}))
    assert [(use.drafter, use.num_faults) for use in several.take_uses()] == [("a", 1), ("b", 0)]


def test_a_shadow_drafts_without_being_verified_and_is_compared_with_the_text() -> None:
    shadow = RecordingDrafter(60, 2)
    several = SeveralDrafters({"a": RecordingDrafter(50, 1), "b": shadow}, clock=iter(range(99)).__next__)
    context = context_with({0: "a", 1: "a", 2: "b"}, shadows={1: "b"})
    assert trees_of(several.propose(context)) == [[9, 50], [9, 50], [9, 60, 60]]
    assert shadow.seen == [[1, 2]]
    assert several.take_uses() == [DrafterUse("a", 1.0), DrafterUse("b", 0.5, 0.5)]
    context.table.states[1].token_ids += [60, 7]
    several.propose(context)
    [_, use] = several.take_uses()
    assert (use.num_shadow_trees, use.num_shadow_drafts, use.num_shadow_accepted) == (1, 2, 1)
    several.release([1])
    assert shadow.released == [1]


def test_merged_trees_keep_their_distributions() -> None:
    """Rejection sampling needs those that children were drawn from; zeros mean that they were not drawn."""
    drawn = DraftTree.chains(torch.tensor([[9, 3]]))
    drawn = drawn._replace(draft_probs=torch.full((1, 2, 4), 0.25))
    other = DraftTree.chains(torch.tensor([[9, 3, 4]]))._replace(draft_probs=torch.full((1, 3, 2), 0.5))
    plain = DraftTree.chains(torch.tensor([[9, 5, 6, 7]]))
    roots = torch.tensor([9, 9, 9, 9])
    parts = [(torch.tensor([2]), drawn), (torch.tensor([0]), plain), (torch.tensor([3]), other)]
    tree = merge_trees(roots, parts)
    assert trees_of(tree) == [[9, 5, 6, 7], [9], [9, 3], [9, 3, 4]]
    assert tree.draft_probs is not None
    assert tree.draft_probs.shape == (4, 4, 4)
    assert torch.equal(tree.draft_probs.sum((1, 2)), torch.tensor([0.0, 0.0, 2.0, 3.0]))
    assert torch.equal(tree.draft_probs[2, :2], torch.full((2, 4), 0.25))


@pytest.mark.parametrize("count", [1, 3])
def test_the_trees_of_one_drafter_stay_as_they_are(count: int) -> None:
    drafter = RecordingDrafter(50, 1)
    trees: list[DraftTree] = []

    def propose(context: ProposeContext) -> DraftTree:
        trees.append(RecordingDrafter.propose(drafter, context))
        return trees[0]

    drafter.propose = propose  # type: ignore[method-assign]
    several = SeveralDrafters({"a": drafter, "b": RecordingDrafter(60, 3)})
    assert several.propose(context_with(dict.fromkeys(range(count), "a"))) is trees[0]
