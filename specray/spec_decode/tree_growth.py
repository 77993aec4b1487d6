"""A tree grown level by level on a drafter's own outputs: what EAGLE heads and draft models have in common.

At T > 0 the noise the target will sample with is added to every node's logits. KV of nodes lies in scratch slots behind
the target's pool and is forgotten. Not here: what a tree grows on (`eagle`, `draft_model`), which nodes are kept
(`eagle_tree`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.eagle import TargetMatrices
from specray.ops.attention import Attend, AttentionBackend, AttentionBatch, torch_dtype
from specray.ops.noise import gumbel
from specray.ops.quantization import check_quantization, quantization_of_choice
from specray.ops.sampling import GREEDY_BELOW
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import DraftFaultError, DraftRow, TargetView
from specray.spec_decode.eagle_tree import CandidatePool
from specray.spec_decode.tree_shape import TreeShape
from specray.step import DraftFault


class TreeModel(Protocol):
    """What a node's token is predicted with. A state is what a node takes over from its parent, beside their KV."""

    vocab_size: int  # columns of `logits`
    draft_token_ids: Tensor | None  # int64 [vocab_size]: target id of each column; None: the same id

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H]; token_ids (of the target) and positions are int64 [T], states [T, H]."""

    def recur(self, output: Tensor) -> Tensor:
        """The states to go with the tokens that are drafted from `output`."""

    def logits(self, output: Tensor) -> Tensor:
        """float32 [n, vocab_size]"""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64: the target's ids of draft ids of any shape."""


class TreePrefix(NamedTuple):
    """What a row's tree grows on."""

    row: DraftRow  # its last known token, at `end`, is the root
    kv_slots: np.ndarray  # int64: what every node sees beside its ancestors
    position: int  # of the root's children, as the model counts


class TreeGrower:
    """Trees of one shape. `scratch` int64 [rows, at least topk * (num_steps - 1)] has KV slots for the nodes."""

    def __init__(
        self,
        model: TreeModel,
        shape: TreeShape,
        attention: AttentionBackend,
        scratch: np.ndarray,
        last_position: int,
        device: torch.device,
    ) -> None:
        assert shape.topk <= model.vocab_size
        self._model = model
        self._shape = shape
        self._attention = attention
        self._scratch = scratch
        self._last_position = last_position
        self._device = device

    def grow(self, prefixes: Sequence[TreePrefix], output: Tensor) -> DraftTree:
        """Trees below the rows' last known tokens, from the model's output [rows, H] before their children."""
        topk, num_rows = self._shape.topk, len(prefixes)
        num_steps = min(self._shape.num_steps, max(prefix.row.max_steps for prefix in prefixes))
        probs_list: list[Tensor] = []  # of each level's children
        scores, tokens = self._candidates(output, prefixes, 1, probs_list)
        pool = CandidatePool.of_roots(scores[:, 0], tokens[:, 0])
        states = self._model.recur(output).repeat_interleave(topk, 0)  # what precedes each of the frontier's tokens
        sees = np.empty((num_rows, topk, 0), dtype=bool)  # earlier nodes that are ancestors
        frontier = torch.arange(topk, device=self._device).expand(num_rows, topk)
        for level in range(1, num_steps):
            tokens = pool.tokens.gather(1, frontier).flatten()
            sees = np.concatenate((sees, np.broadcast_to(np.eye(topk, dtype=bool), (num_rows, topk, topk))), 2)
            output = self._forward_level(prefixes, tokens, states, sees, level)
            probs, children = self._candidates(output, prefixes, level + 1, probs_list)
            pool.expand(frontier, pool.scores.gather(1, frontier)[:, :, None] * probs, children)
            if level + 1 < num_steps:
                frontier = pool.best_of_last()
                parents = (frontier - (pool.scores.shape[1] - topk**2)) // topk  # places in the level just computed
                flat = (parents + topk * torch.arange(num_rows, device=self._device)[:, None]).flatten()
                states = self._model.recur(output).index_select(0, flat)
                sees = np.take_along_axis(sees, parents.cpu().numpy()[:, :, None], 1)
        if not bool(pool.scores.isfinite().all()):
            raise DraftFaultError(DraftFault.NOT_A_NUMBER)
        num_drafts = min(self._shape.num_draft_tokens - 1, pool.scores.shape[1])
        tree = pool.tree([prefix.row.token_ids[prefix.row.end] for prefix in prefixes], num_drafts)
        return replace(tree, draft_probs=F.pad(torch.stack(probs_list, 1), (0, 0, 0, 1))) if probs_list else tree

    def _forward_level(
        self, prefixes: Sequence[TreePrefix], tokens: Tensor, states: Tensor, sees: np.ndarray, level: int
    ) -> Tensor:
        """The model's output [rows * topk, H] for one level's nodes, a row's side by side."""
        topk = self._shape.topk
        scratch = self._scratch[: len(prefixes), : level * topk]
        # Nodes past the last position have nowhere to go, and never come to be verified.
        positions = [min(prefix.position + level - 1, self._last_position) for prefix in prefixes for _ in range(topk)]
        ragged = AttentionBatch(
            [topk] * len(prefixes),
            [np.concatenate((prefix.kv_slots, slots)) for prefix, slots in zip(prefixes, scratch, strict=True)],
            torch.from_numpy(scratch[:, -topk:].ravel()).to(self._device),
            list(sees),
        )
        return self._model(tokens, states, torch.tensor(positions, device=self._device), self._attention.plan(ragged))

    def _candidates(
        self, output: Tensor, prefixes: Sequence[TreePrefix], depth: int, probs_list: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(scores, target ids) of the likeliest tokens at `depth`, best first; their probs join `probs_list` if kept.

        `output` [rows * nodes, H] holds as many nodes of each row; the results are [rows, nodes, topk].
        """
        logits = self._model.logits(output).view(len(prefixes), -1, self._model.vocab_size)
        if self._shape.returns_draft_probs:
            probs_list.append(self._probs(logits[:, 0], prefixes))
        noisy = [i for i, prefix in enumerate(prefixes) if prefix.row.temperature >= GREEDY_BELOW]
        if noisy:
            logits[noisy] = self._with_noise(logits[noisy], [prefixes[i].row for i in noisy], depth)
        best = logits.softmax(-1).topk(self._shape.topk)
        return best.values, self._model.target_ids(best.indices)

    def _probs(self, logits: Tensor, prefixes: Sequence[TreePrefix]) -> Tensor:
        """float32 [rows, up to V]: what the likeliest token is a draw from, once there is noise; zeros if greedy."""
        temperatures = torch.tensor([prefix.row.temperature for prefix in prefixes], device=self._device)[:, None]
        probs = (logits / temperatures.clamp(min=GREEDY_BELOW)).softmax(-1) * (temperatures >= GREEDY_BELOW)
        if (ids := self._model.draft_token_ids) is None:
            return probs
        return probs.new_zeros(len(prefixes), int(ids.max()) + 1).index_copy_(1, ids, probs)

    def _with_noise(self, logits: Tensor, rows: Sequence[DraftRow], depth: int) -> Tensor:
        """Logits [rows, nodes, V] under temperature and the noise with which the target will sample at `depth`."""
        noise = gumbel(
            [row.seed for row in rows],
            [row.end + depth for row in rows],
            logits.shape[-1],
            self._device,
            self._model.draft_token_ids,
        )
        temperatures = torch.tensor([row.temperature for row in rows], device=self._device)
        return logits / temperatures[:, None, None] + noise[:, None]


def scratch_slots(target: TargetView, per_row: int) -> np.ndarray:
    """int64 [max_rows, per_row]: KV slots behind the target's, a stretch for each row of a step."""
    slots = np.arange(target.max_rows * per_row, dtype=np.int64)
    return target.num_slots + slots.reshape(target.max_rows, per_row)


def draft_dtype(config: SpeculativeConfig, target: TargetView) -> torch.dtype:
    """Type of the drafter's weights and KV."""
    return target.dtype if config.draft_dtype == "auto" else torch_dtype(config.draft_dtype)


def draft_quantization(config: SpeculativeConfig, target: TargetView) -> str | None:
    """Of the drafter's linears: the target's unless it has one of its own. ConfigError if it cannot be had here."""
    name = config.draft_model_quantization or target.quantization
    if name == "auto":
        name = quantization_of_choice(target.device, draft_dtype(config, target))
    name = None if name == "unquant" else name
    check_quantization(name, target.device, draft_dtype(config, target))
    return name


def target_matrices(config: SpeculativeConfig, target: TargetView) -> TargetMatrices:
    """What a head takes of its target."""
    return TargetMatrices(
        target.shape,
        target.context_length,
        target.folder,
        target.load_format,
        draft_dtype(config, target),
        target.device,
        target.model,
        draft_quantization(config, target),
    )
