"""EAGLE-1, -2 and -3: a small head on the target's features drafts a dynamic tree.

After every step the head first reads what the target computed for good (draft extend: feature of token i with token
i + 1), overwriting whatever it guessed there, and then expands a tree level by level on its own outputs. Its KV of
position i lies in the slot of the target's, so blocks are shared, cached and freed together; all the drafter remembers
is which slots it has written, and it reads no others: so it may start beside a target that has been running for long,
and may miss a step. KV of tree nodes lies in scratch slots behind the pool and is forgotten. At T > 0 the head adds the
noise the target will sample with. Not here: the head (`specray.models.eagle`), the choice of nodes (`eagle_tree`).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.eagle import EagleHead, TargetMatrices, load_eagle_head
from specray.models.files import resolve_token_map
from specray.ops.attention import RaggedRows, make_pool, torch_dtype
from specray.ops.backends import make_backend
from specray.ops.noise import gumbel
from specray.ops.sampling import GREEDY_BELOW
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import DraftFaultError, DraftRow, ProposeContext, TargetView
from specray.spec_decode.eagle_tree import CandidatePool, TreeShape
from specray.spec_decode.fr_spec import load_token_map
from specray.step import DraftFault


def make_eagle3(config: SpeculativeConfig, target: TargetView) -> "EagleDrafter":
    return _make(config, target, version=3)


def make_eagle2(config: SpeculativeConfig, target: TargetView) -> "EagleDrafter":
    """EAGLE-1 and -2 heads alike: they differ in how they were trained."""
    return _make(config, target, version=2)


def check_eagle(config: SpeculativeConfig) -> None:
    """ConfigError for what is wrong whatever the target."""
    TreeShape.of(config, architecture="")
    if config.draft_model_path is None:
        raise ConfigError(
            f"speculative.algorithm={config.algorithm} drafts with a trained head, but speculative.draft_model_path "
            "is null; set it to the head's folder or hub name"
        )


class EagleDrafter:
    """Drafter over an EAGLE-2 or EAGLE-3 head, whole on this rank."""

    reads_next_token = True

    def __init__(self, head: EagleHead, shape: TreeShape, target: TargetView) -> None:
        assert shape.topk <= head.vocab_size
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self.feature_layers = head.feature_layers
        self._head = head
        self._shape = shape
        self._last_position = target.context_length - 1
        self._device = target.device
        num_scratch = shape.topk * (shape.num_steps - 1)
        # Behind the target's slots, a stretch for each row of a step: level after level of its tree.
        scratch = np.arange(target.max_rows * num_scratch, dtype=np.int64)
        self._scratch = target.num_slots + scratch.reshape(target.max_rows, num_scratch)
        pool = make_pool(
            1, target.num_slots + scratch.size, head.num_kv_heads, head.head_dim, head.dtype, target.device
        )
        self._attention = make_backend(target.attention_backend, pool, head.num_heads)
        self._is_written = np.zeros(target.num_slots, dtype=bool)

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        rows = context.rows + context.unfinished
        if not rows:
            return DraftTree.of([])
        assert context.features is not None
        for row in rows:  # what lies behind `end` is of another request or of rejected nodes
            self._is_written[row.kv_slots[row.start :]] = False
            self._is_written[row.kv_slots[row.start : row.end]] = True
        last = self._extend(rows, context.features)[: len(context.rows)]
        if not context.rows:
            return DraftTree.of([])
        return self._expand(context.rows, last)

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget: whatever there is lies in KV blocks, which have owners."""

    def _extend(self, rows: list[DraftRow], features: Tensor) -> Tensor:
        """Read what the step computed; the head's output [rows, hidden] at each row's last position."""
        lengths = [row.end - row.start for row in rows]
        tokens = [token for row in rows for token in row.token_ids[row.start + 1 : row.end + 1]]
        positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        written = np.concatenate([row.kv_slots[row.start : row.end] for row in rows])
        ragged = RaggedRows(lengths, [self._visible(row) for row in rows], self._tensor(written), [None] * len(rows))
        states = self._head.fuse(features)
        attend = self._attention.plan(ragged)
        output = self._head(torch.tensor(tokens, device=self._device), states, self._tensor(positions), attend)
        return output.index_select(0, self._tensor(np.cumsum(lengths) - 1))

    def _expand(self, rows: list[DraftRow], output: Tensor) -> DraftTree:
        """Trees below the rows' last known tokens, from the head's output [rows, hidden] before them."""
        topk, num_rows = self._shape.topk, len(rows)
        scores, tokens = self._candidates(output, rows, depth=1)
        pool = CandidatePool.of_roots(scores[:, 0], tokens[:, 0])
        states = self._head.recur(output).repeat_interleave(topk, 0)  # what precedes each of the frontier's tokens
        sees = np.empty((num_rows, topk, 0), dtype=bool)  # earlier nodes that are ancestors
        frontier = torch.arange(topk, device=self._device).expand(num_rows, topk)
        for level in range(1, self._shape.num_steps):
            tokens = pool.tokens.gather(1, frontier).flatten()
            sees = np.concatenate((sees, np.broadcast_to(np.eye(topk, dtype=bool), (num_rows, topk, topk))), 2)
            output = self._forward_level(rows, tokens, states, sees, level)
            law, children = self._candidates(output, rows, level + 1)
            pool.expand(frontier, pool.scores.gather(1, frontier)[:, :, None] * law, children)
            if level + 1 < self._shape.num_steps:
                frontier = pool.best_of_last()
                parents = (frontier - (pool.scores.shape[1] - topk**2)) // topk  # places in the level just computed
                flat = (parents + topk * torch.arange(num_rows, device=self._device)[:, None]).flatten()
                states = self._head.recur(output).index_select(0, flat)
                sees = np.take_along_axis(sees, parents.cpu().numpy()[:, :, None], 1)
        if not bool(pool.scores.isfinite().all()):
            raise DraftFaultError(DraftFault.NOT_A_NUMBER)
        return pool.tree([row.token_ids[row.end] for row in rows], self.max_draft_tokens)

    def _forward_level(
        self, rows: list[DraftRow], tokens: Tensor, states: Tensor, sees: np.ndarray, level: int
    ) -> Tensor:
        """The head's output [rows * topk, hidden] for one level's nodes, a row's side by side."""
        topk = self._shape.topk
        scratch = self._scratch[: len(rows), : level * topk]
        positions = [min(row.end + level - 1, self._last_position) for row in rows for _ in range(topk)]
        ragged = RaggedRows(
            [topk] * len(rows),
            [np.concatenate((self._visible(row), slots)) for row, slots in zip(rows, scratch, strict=True)],
            self._tensor(scratch[:, -topk:].ravel()),
            list(sees),
        )
        return self._head(tokens, states, torch.tensor(positions, device=self._device), self._attention.plan(ragged))

    def _visible(self, row: DraftRow) -> np.ndarray:
        """KV slots of the row's positions up to `end`, without those this drafter never wrote."""
        slots = row.kv_slots[: row.end]
        visible: np.ndarray = slots[self._is_written[slots]]
        return visible

    def _candidates(self, output: Tensor, rows: Sequence[DraftRow], depth: int) -> tuple[Tensor, Tensor]:
        """(probabilities, target ids) of the likeliest tokens at `depth`, best first.

        `output` [rows * nodes, hidden] holds as many nodes of each row; the results are [rows, nodes, topk].
        """
        logits = self._head.logits(output).view(len(rows), -1, self._head.vocab_size)
        noisy = [i for i, row in enumerate(rows) if row.temperature >= GREEDY_BELOW]
        if noisy:
            logits[noisy] = self._with_noise(logits[noisy], [rows[i] for i in noisy], depth)
        best = logits.softmax(-1).topk(self._shape.topk)
        return best.values, self._head.target_ids(best.indices)

    def _with_noise(self, logits: Tensor, rows: Sequence[DraftRow], depth: int) -> Tensor:
        """Logits [rows, nodes, V] under temperature and the noise with which the target will sample at `depth`."""
        noise = gumbel(
            [row.seed for row in rows], [row.end + depth for row in rows], logits.shape[-1], self._device,
            self._head.draft_token_ids,
        )  # fmt: skip
        temperatures = torch.tensor([row.temperature for row in rows], device=self._device)
        return logits / temperatures[:, None, None] + noise[:, None]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _make(config: SpeculativeConfig, target: TargetView, version: Literal[2, 3]) -> EagleDrafter:
    shape = TreeShape.of(config, target.architecture)
    token_map = None
    if config.token_map is not None:
        vocab_size = target.shape.vocab_size
        token_map = load_token_map(resolve_token_map(config.token_map), vocab_size, target.eos_token_ids)
    dtype = target.dtype if config.draft_dtype == "auto" else torch_dtype(config.draft_dtype)
    shared = TargetMatrices(
        target.shape, target.context_length, target.folder, target.load_format, dtype, target.device, target.model
    )
    return EagleDrafter(load_eagle_head(config, shared, version, token_map), shape, target)
