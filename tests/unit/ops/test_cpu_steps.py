"""The kernels for the tensors of a step give exactly what their twins in torch give.

`tests/unit/worker/test_input_batch.py` runs with both for the input of a step.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specray.ops.cpu.library import kernels
from specray.spec_decode.draft_tree import TreeLists
from tests.support.examples import at_most
from tests.support.step_cases import MAX_TOKENS, SLOTS, both, compare_pending_trees, random_table
from tests.support.verify_cases import trees

pytestmark = pytest.mark.skipif(kernels() is None, reason="no CPU kernels")
SEEDS = st.integers(0, 99)


@given(SEEDS, st.permutations(range(SLOTS)), st.integers(1, 4), st.integers(1, 9), st.data())
@at_most(30)
def test_cells_of_the_table(seed: int, order: list[int], count: int, width: int, data: st.DataObject) -> None:
    """Written from and read for some requests, in any order."""
    slots = torch.tensor(order[:count])
    outcome = torch.randint(0, 500, (count, 2 + 2 * width), generator=torch.Generator().manual_seed(seed))
    outcome[:, 1] = torch.tensor([data.draw(st.integers(0, width)) for _ in range(count)])
    starts = torch.tensor([data.draw(st.integers(0, MAX_TOKENS)) for _ in range(count)])
    ends = starts + torch.tensor([data.draw(st.integers(0, 5)) for _ in range(count)])

    def run() -> list[Tensor]:
        table = random_table(seed)  # it chooses the kernels
        table.ops.append(slots, outcome)
        read = table.ops.extend_input(slots, starts, ends, int((ends - starts).sum()))
        kept = (table.token_ids[:-1], table.num_tokens)  # the last row takes what is not wanted
        return [
            *kept,
            *read,
            *(table.ops.kv_slots(slots, first, width) for first in (None, starts)),
            table.kv_slots_at(slots, starts),
        ]

    torch.testing.assert_close(*both(run, "auto"), atol=0, rtol=0)


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
@at_most(150)
def test_pending_trees(lists: list[TreeLists], data: st.DataObject) -> None:
    compare_pending_trees("auto", lists, data)
