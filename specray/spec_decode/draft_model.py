"""STANDALONE: a smaller language model with the target's vocabulary drafts a chain or a tree.

It needs nothing of the target but token ids. Its KV of a token lies in the slot of the target's, so blocks are shared,
cached and freed together; of every slot the drafter remembers which tokens its KV was made from. What a row's slots do
not hold yet is read before the row gets a tree: what the step added, but also a cached prefix from before this drafter
was born, and steps it was not told of. Those are read in parts, so that a long prefix does not hold a step up. A row
that reaches the end of the draft model's context goes on without drafts. Not here: how a tree grows (`tree_growth`),
what the model computes (`specray.models`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.layers.linear import VocabHead
from specray.layers.parallel import RankGroup
from specray.models.eagle import TargetMatrices
from specray.models.files import resolve_draft
from specray.models.llama import Llama
from specray.models.registry import context_length, load_config, load_model
from specray.models.tokenizer import load_tokenizer
from specray.ops.attention import Attend, AttentionBatch, make_pool
from specray.ops.backends import make_backend
from specray.spec_decode.draft_tree import NONE, DraftTree, RowTree
from specray.spec_decode.drafter import DraftRow, ProposeContext, TargetView
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.tree_growth import TreeGrower, TreePrefix, draft_dtype, draft_quantization, scratch_slots
from specray.spec_decode.tree_shape import TreeShape

CATCH_UP_TOKENS = 512  # read in a step beyond what it added, all rows together


def make_standalone(config: SpeculativeConfig, target: TargetView) -> "StandaloneDrafter":
    """ConfigError if the draft model has another vocabulary than the target."""
    shape = TreeShape.of(config, architecture="")  # the automatic shape is that of a draft model, whatever the target
    return StandaloneDrafter(load_draft_model(config, target), shape, target)


class StandaloneDrafter:
    """Drafter over a language model, whole on this rank."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, model: "DraftModel", shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self._model = model
        self._device = target.device
        self._last_end = model.context_length - shape.num_steps  # behind it a tree does not fit the context as a whole
        scratch = scratch_slots(target, 1 + shape.topk * (shape.num_steps - 1))
        self._root_slots = scratch[:, :1]  # the pool may have no slot for a root yet
        pool = model.make_pool(target.num_slots + scratch.size)
        self._attention = make_backend(target.attention_backend, pool, model.num_heads)
        self._grower = TreeGrower(
            model, shape, self._attention, scratch[:, 1:], model.context_length - 1, target.device
        )
        self._hashes = PrefixHashes(target.context_length)
        self._made_from = np.zeros(target.num_slots, dtype=np.uint64)  # hash by KV slot

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        parts = self._parts(context)
        ready = [part.row for part in parts if part.has_root]
        output = self._read(parts)
        trees: dict[int, RowTree] = {}
        if ready:
            prefixes = [self._prefix(row, root) for row, root in zip(ready, self._root_slots, strict=False)]
            grown = self._grower.grow(prefixes, output).rows()
            trees = {row.slot: tree for row, tree in zip(ready, grown, strict=True)}
        bare = (RowTree([row.token_ids[row.end]], [NONE]) for row in context.rows)
        return DraftTree.of([trees.get(row.slot, root) for row, root in zip(context.rows, bare, strict=True)])

    def release(self, slots: Sequence[int]) -> None:
        self._hashes.forget(slots)

    def _parts(self, context: ProposeContext) -> list["Part"]:
        """What is read now. Rows that wait for nothing else get a tree, if they want one."""
        rows = [row for row in context.rows + context.unfinished if self._fits(row)]
        wants_tree = {row.slot for row in context.rows}
        starts = [self._num_read(row) for row in rows]
        num_added = sum(row.end - row.start for row in rows)
        sizes = [row.end - start for row, start in zip(rows, starts, strict=True)]
        counts = share_out(sizes, num_added + CATCH_UP_TOKENS)
        parts = [
            Part(row, start, start + count, has_root=start + count == row.end and row.slot in wants_tree)
            for row, start, count in zip(rows, starts, counts, strict=True)
        ]
        return [part for part in parts if part.has_root or part.stop > part.start]

    def _fits(self, row: DraftRow) -> bool:
        """Whether there is, or will be once its prompt is read, room for a tree."""
        return max(row.end, row.num_prompt_tokens - 1) <= self._last_end

    def _num_read(self, row: DraftRow) -> int:
        """How many of the row's tokens, from the first one on, lie in its KV slots."""
        unread = self._made_from[row.kv_slots[: row.end]] != self._hashes.of(row)
        return int(unread.argmax()) if unread.any() else row.end

    def _read(self, parts: list["Part"]) -> Tensor:
        """The model's output [roots, hidden] at the parts' roots, in their order."""
        if not parts:
            return torch.empty(0)
        roots = iter(self._root_slots)
        ends = [next(roots) if part.has_root else self._root_slots[0, :0] for part in parts]
        tokens = [token for part in parts for token in part.row.token_ids[part.start : part.stop + part.has_root]]
        positions = np.concatenate([np.arange(part.start, part.stop + part.has_root) for part in parts])
        slots = [np.concatenate((part.row.kv_slots[: part.stop], end)) for part, end in zip(parts, ends, strict=True)]
        written = np.concatenate([row_slots[part.start :] for part, row_slots in zip(parts, slots, strict=True)])
        lengths = [part.stop + part.has_root - part.start for part in parts]
        ragged = AttentionBatch(lengths, slots, self._tensor(written), [None] * len(parts))
        attend = self._attention.plan(ragged)
        output = self._model.read(torch.tensor(tokens, device=self._device), self._tensor(positions), attend)
        for part in parts:
            read = slice(part.start, part.stop)
            self._made_from[part.row.kv_slots[read]] = self._hashes.of(part.row)[read]
        last = np.cumsum(lengths)[[part.has_root for part in parts]] - 1
        return output.index_select(0, self._tensor(last))

    def _prefix(self, row: DraftRow, root_slot: np.ndarray) -> TreePrefix:
        return TreePrefix(row, np.concatenate((row.kv_slots[: row.end], root_slot)), row.end + 1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class Part(NamedTuple):
    """Positions `start` … `stop - 1` of a row, to be read now; with its root, the token at `end`, if it `has_root`."""

    row: DraftRow
    start: int
    stop: int
    has_root: bool


def share_out(sizes: Sequence[int], budget: int) -> list[int]:
    """How much of each is done within `budget`: the smallest first, so that a long one holds up no other."""
    counts = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        counts[index] = min(sizes[index], budget)
        budget -= counts[index]
    return counts


class PrefixHashes:
    """A number for every prefix of a row's tokens: the same for the same tokens, and hardly ever for others."""

    def __init__(self, max_tokens: int) -> None:
        self._weights = np.random.default_rng(0).integers(2**64, size=max_tokens, dtype=np.uint64)
        self._known: dict[int, np.ndarray] = {}  # by slot

    def of(self, row: DraftRow) -> np.ndarray:
        """uint64 [end]: entry i is of the tokens up to i."""
        known = self._known.get(row.slot, np.zeros(0, dtype=np.uint64))
        new = np.array(row.token_ids[len(known) : row.end], dtype=np.uint64)
        if len(new):
            sums = np.cumsum((new + 1) * self._weights[len(known) : row.end])
            known = self._known[row.slot] = np.concatenate((known, sums + known[-1:] if len(known) else sums))
        return known[: row.end]

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._known.pop(slot, None)


class DraftModel:
    """A language model as a TreeModel: what a token takes over from those before it is in the KV alone.

    With `ids` int64 [n] it drafts these tokens only (FR-Spec), by these rows of its output matrix.
    """

    def __init__(self, model: Llama, head: VocabHead, ids: Tensor | None, dtype: torch.dtype) -> None:
        self.context_length = model.max_positions
        self.num_heads = model.shape.num_local_heads
        self.vocab_size = model.shape.vocab_size if ids is None else len(ids)
        self.draft_token_ids = ids
        self._model = model
        self._head = head
        self._dtype = dtype

    def make_pool(self, num_slots: int) -> Tensor:
        shape, device = self._model.shape, self._model.embedding.weight.device
        return make_pool(shape.num_layers, num_slots, shape.num_local_kv_heads, shape.head_dim, self._dtype, device)

    def read(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden]; token_ids and positions are int64 [T]."""
        return self._model(token_ids, positions, attend)[0]

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        del states
        return self.read(token_ids, positions, attend)

    def recur(self, output: Tensor) -> Tensor:
        return output

    def logits(self, output: Tensor) -> Tensor:
        return self._head(output)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.draft_token_ids is None else self.draft_token_ids[draft_ids]


def load_draft_model(config: SpeculativeConfig, target: TargetView) -> DraftModel:
    """The model at `speculative.draft_model_path`. ConfigError if its vocabulary is not the target's."""
    folder = resolve_draft(config, progress=False)
    model_config = load_config(folder)
    check_vocabulary(folder, model_config.vocab_size, target)
    dtype, quantization = draft_dtype(config, target), draft_quantization(config, target)
    options = EngineConfig(
        load_format=config.draft_load_format,
        dtype=str(dtype).removeprefix("torch."),
        context_length=min(context_length(model_config, None), target.context_length),
        quantization=quantization,
    )
    model = load_model(folder, options, RankGroup(), target.device, progress=False)
    if target.model is not None:
        _share_matrices(model, target.model)
    ids = configured_token_map(config, target)
    ids = None if ids is None else ids.to(target.device)
    matrices = TargetMatrices(
        model.shape, model.max_positions, folder, config.draft_load_format, dtype, target.device, model, quantization
    )
    return DraftModel(model, matrices.head(ids), ids, dtype)


def check_vocabulary(folder: Path, vocab_size: int, target: TargetView) -> None:
    """ConfigError unless the draft model in `folder` has as many tokens as the target, and the same ones."""
    advice = "choose a smaller model of the target's own family, or make one with `specray train draft`"
    if vocab_size != target.shape.vocab_size:
        raise ConfigError(
            f"{folder}: the draft model has a vocabulary of {vocab_size} tokens, the target one of "
            f"{target.shape.vocab_size}; {advice}"
        )
    ours, theirs = (load_tokenizer(path).backend_tokenizer.id_to_token for path in (folder, target.folder))
    other = next((token for token in range(vocab_size) if ours(token) != theirs(token)), None)
    if other is not None:
        raise ConfigError(
            f"{folder}: token {other} is {ours(other)!r} in the draft model's vocabulary, but {theirs(other)!r} in the "
            f"target's, both of {vocab_size}; {advice}"
        )


def _share_matrices(model: Llama, target: Llama) -> None:
    """Let a model that was cut out of the target use the target's embedding, and output matrix if both are tied."""
    ours, theirs = model.embedding.weight, target.embedding.weight
    if ours.dtype == theirs.dtype and ours.device == theirs.device and torch.equal(ours, theirs):
        model.embedding = target.embedding
        if model.shape.tied and target.shape.tied:
            model.head = target.head
