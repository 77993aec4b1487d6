"""One step's input: every row's known tokens and, behind them, its draft tree, in one flat batch.

There is no prefill and no decode: a row brings the known tokens that are not computed yet, the last of
which is the root of a tree, and a row whose known tokens do not all fit the step brings no tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specray.ops.attention import AttentionBatch
from specray.spec_decode.draft_tree import DraftTree, depths_of
from specray.step import ScheduledRow
from specray.worker.request_state import Row


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """A step's rows, flattened to T tokens."""

    rows: list[Row]
    num_known: list[int]  # known tokens computed in this step, root included
    sampling: list[int]  # indexes into `rows` of those that sample; `tree` has these rows
    tree: DraftTree
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attention: AttentionBatch
    node_index: Tensor  # int64 [sum of tree.num_nodes]: each node's place in the batch
    last_places: list[int]  # the place of each row's last known token in the batch
    last_index: Tensor  # the same, int64 [rows]

    def sampling_rows(self) -> list[Row]:
        return [self.rows[i] for i in self.sampling]

    def kept(self, index: int, path: Sequence[int]) -> list[int]:
        """Places of what row `index` computed for good: its known tokens and the accepted `path`, root first."""
        last = self.last_places[index]
        return [*range(last - self.num_known[index] + 1, last), *(last + node for node in path)]


def count_known(steps: Sequence[ScheduledRow], rows: Sequence[Row]) -> list[int]:
    """Known tokens each row computes: those pending, up to the plan's bound."""
    return [
        min(step.num_tokens, len(row.token_ids) - row.num_computed_tokens)
        for step, row in zip(steps, rows, strict=True)
    ]


def sampling_rows(rows: Sequence[Row], num_known: Sequence[int]) -> list[int]:
    """Indexes of the rows whose known tokens are all computed after this step."""
    return [i for i, row in enumerate(rows) if row.num_computed_tokens + num_known[i] == len(row.token_ids)]


def build_batch(
    rows: list[Row], num_known: list[int], sampling: list[int], tree: DraftTree, device: torch.device
) -> InputBatch:
    """Flatten rows and trees; `tree` holds the trees of `rows[i] for i in sampling`."""
    trees = dict(zip(sampling, tree.rows(), strict=True))
    ancestors = tree.ancestors()
    depths = dict(zip(sampling, depths_of(ancestors).tolist(), strict=True))
    masks = dict(zip(sampling, ancestors.numpy(), strict=True))
    tokens: list[int] = []
    positions: list[int] = []
    kv_slots, new_slots, corners, query_lens = [], [], [], []
    for i, (row, known) in enumerate(zip(rows, num_known, strict=True)):
        start, end = row.num_computed_tokens, row.num_computed_tokens + known
        drafts = trees[i].tokens[1:] if i in trees else []
        tokens += row.token_ids[start:end] + drafts
        positions += list(range(start, end)) + [end - 1 + depth for depth in depths.get(i, [])[1 : len(drafts) + 1]]
        kv_slots.append(row.kv_slots[: end + len(drafts)])
        new_slots.append(row.kv_slots[start : end + len(drafts)])
        corners.append(masks[i][: len(drafts) + 1, : len(drafts) + 1] if drafts else None)
        query_lens.append(known + len(drafts))
    ends = list(accumulate(query_lens))
    starts = [end - length for end, length in zip(ends, query_lens, strict=True)]
    last = [start + known - 1 for start, known in zip(starts, num_known, strict=True)]
    nodes = [last[i] + node for i, count in zip(sampling, tree.num_nodes, strict=True) for node in range(count)]
    slot_mapping = torch.from_numpy(np.concatenate(new_slots)).to(device)
    return InputBatch(
        rows=rows,
        num_known=num_known,
        sampling=sampling,
        tree=tree,
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        attention=AttentionBatch(query_lens, kv_slots, slot_mapping, corners),
        node_index=torch.tensor(nodes, dtype=torch.int64, device=device),
        last_places=last,
        last_index=torch.tensor(last, device=device),
    )
