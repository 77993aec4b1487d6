"""Random request tables and trees, for tests that compare kernels with their twins in torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.pending_trees import PendingTrees
from specray.spec_decode.request_table import RequestTable
from specray.step import DraftLimit
from tests.support.sampling import CPU
from tests.support.verify_cases import VOCAB_SIZE, trees

MAX_TOKENS, SLOTS = 60, 5


def both(run: Callable[[], Any], others: str = "triton") -> tuple[Any, Any]:
    """What `run` gives with torch's operations and with other kernels, a value of SPECRAY_KERNELS."""
    found = []
    for wanted in ("torch", others):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECRAY_KERNELS", wanted)
            found.append(run())
    return found[0], found[1]


def random_table(seed: int, shortest: int = 0) -> RequestTable:
    """Random tokens, KV slots and lengths; its last row, for padding, is empty."""
    table = RequestTable(SLOTS, MAX_TOKENS + 20, 4, VOCAB_SIZE, CPU)
    generator = torch.Generator().manual_seed(seed)
    for part in (table.token_ids, table.kv_slots):
        part[:-1] = torch.randint(0, 500, part[:-1].shape, generator=generator, dtype=torch.int32)
    lengths = torch.randint(shortest, MAX_TOKENS, (SLOTS,), generator=generator, dtype=torch.int32)
    table.num_tokens[:-1] = lengths
    return table


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, Tensor, DraftTree]:
    """(seed of the table, slots, trees in a padded width); requests without a node are padding."""
    lists = draw(st.lists(trees(), min_size=1, max_size=4))
    made, missing = DraftTree.from_lists(lists), draw(st.integers(0, 3))
    width = made.tokens.shape[1] + missing
    wide = torch.full((2, len(lists) + 1, width + 2), NONE, dtype=torch.int64)  # the step's may be larger
    wide[0, :-1, : width - missing], wide[1, :-1, : width - missing] = made.tokens, made.parents
    tokens, parents = wide[:, :, :width]
    slots = draw(st.permutations(range(SLOTS)))[: len(lists)]
    num_nodes = torch.cat((made.num_nodes, torch.tensor([0])))
    tree = DraftTree(tokens, parents, num_nodes, width - 1)
    return draw(st.integers(0, 99)), torch.tensor([*slots, SLOTS]), tree


def compare_pending_trees(name: str, lists: list[TreeLists], data: st.DataObject) -> None:
    """Valid and invalid ones, of the right root and of another, cut by limits and not, with scores and without."""
    count = len(lists)
    slots = torch.tensor(data.draw(st.permutations(range(SLOTS)))[:count])
    for row in lists:
        if len(row.tokens) > 1 and data.draw(st.integers(0, 3)) == 0:
            row.tokens[-1] = data.draw(st.sampled_from([-3, VOCAB_SIZE, 0]))
            row.parents[-1] = data.draw(st.sampled_from([NONE, 0, len(row.tokens) - 1, len(row.tokens)]))
    tree = DraftTree.from_lists(lists)
    missing = data.draw(st.sampled_from([None, 0]))  # 0: a drafter whose logits are not finite
    if missing is not None:
        tree.num_nodes[0] = missing
    roots = tree.tokens[:, 0] + torch.tensor([data.draw(st.sampled_from([0, 0, 0, 1])) for _ in lists])
    least = st.sampled_from([0.0, 0.6]) if data.draw(st.booleans()) else st.just(0.0)
    limits = [DraftLimit(data.draw(st.integers(0, 12)), 99, data.draw(least)) for _ in lists]
    if data.draw(st.booleans()):
        scores = 0.8 ** torch.arange(tree.tokens.shape[1], dtype=torch.float32)
        tree = tree._replace(scores=scores.repeat(count, 1))

    older = DraftTree.roots(torch.zeros(SLOTS, dtype=torch.int64))._replace(scores=torch.full((SLOTS, 1), 0.1))
    replaces = data.draw(st.booleans())

    def run() -> Any:
        pending = PendingTrees(SLOTS, VOCAB_SIZE, CPU)
        if replaces:
            pending.put(torch.arange(SLOTS), older)
        pending.put(slots, tree)
        taken, num_nodes = pending.take(slots, roots, limits).wait_for_sizes()
        known = pending.scores
        again, _ = pending.take(slots, roots, limits).wait_for_sizes()
        depths = taken.are_chains, taken.max_depth
        return taken.to_lists(), taken.tokens, *depths, num_nodes, pending.has_broken, known, again.to_lists()

    expected, found = both(run, name)
    assert torch.equal(expected[1], found[1])
    assert expected[:1] + expected[2:] == found[:1] + found[2:]
