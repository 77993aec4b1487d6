"""STANDALONE: drafts of a smaller language model with the target's vocabulary.

The two checkpoints may pad the vocabulary to different sizes. Padding ids are never drafted. If the target generates
one that the draft model has no embedding for, the draft model reads its own last token instead.

The draft model reads token ids only. Its KV of a token lies in the same KV slot as the target's, so blocks are shared,
cached and freed together. For every KV slot the drafter keeps a hash of the tokens that its KV was computed from.
Before a request gets a tree, the drafter computes the KV that is missing: the tokens that the step added, but also a
cached prefix from before the drafter was started, and steps that it missed. Long prefixes are computed in chunks, so
that they do not delay a step. A request that reaches the end of the draft model's context continues without drafts.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.layers.linear import VocabHead
from specray.layers.moe import reason_without_graphs
from specray.layers.parallel import RankGroup
from specray.models.causal_lm import CausalLM
from specray.models.files import resolve_draft
from specray.models.fused import tree_network
from specray.models.fused_forward import FusibleModel
from specray.models.registry import context_length, load_config, load_model, shape_of
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import TargetModel
from specray.models.tokenizer import load_tokenizer
from specray.models.weights import WeightReader
from specray.ops.attention import Attend, make_pool
from specray.ops.backends import make_backend
from specray.ops.cpu.trees import TreeNetwork
from specray.spec_decode.draft_rows import DraftKV, DraftRows
from specray.spec_decode.draft_setup import (
    attention_without_graphs,
    draft_dtype,
    draft_quantization,
    scratch_slots,
)
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import TargetFiles, TargetView
from specray.spec_decode.fr_spec import configured_token_map
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.scheduled_rows import Reads, ScheduledRows
from specray.spec_decode.tree_edits import replace_trees
from specray.spec_decode.tree_growth import TreeGrower
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import configured_shape

logger = logging.getLogger(__name__)

CATCH_UP_TOKENS = 512  # most tokens to compute in a step beyond those it added


def make_standalone(config: SpeculativeConfig, target: TargetView) -> "StandaloneDrafter":
    """ConfigError if the draft model's tokens are not the target's."""
    shape = configured_shape(config, architecture="")  # the automatic shape of STANDALONE does not depend on the target
    return StandaloneDrafter(load_draft_model(config, target), shape, target)


class StandaloneDrafter:
    """Drafter over a language model."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, model: "DraftModel", shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens = shape.num_draft_tokens - 1
        self._model = model
        self._device = target.device
        self._last_end = model.context_length - shape.num_steps  # a tree at a later position would exceed the context
        scratch = scratch_slots(target, 1 + shape.topk * (shape.num_steps - 1))
        # The target may not have reserved a KV slot for the root yet.
        roots, nodes = scratch[:, :1], scratch[:, 1:]
        padding_slot = target.num_slots + scratch.numel()
        pool = model.make_pool(padding_slot + 1)
        attention = make_backend(target.attention_backend, pool, model.num_heads, layers=model.layer_attention)
        last_position = model.context_length - 1
        self._kv = DraftKV(attention, shape, last_position, padding_slot, nodes, extra=roots, reads_next_token=False)
        self.reason_without_graphs = attention_without_graphs(attention) or model.reason_without_graphs
        self._grower = TreeGrower(model, self._kv, target.device)
        self._hashes = PrefixHashes(target.context_length)
        self._made_from = np.zeros(target.num_slots, dtype=np.uint64)  # hash by KV slot

    @torch.inference_mode()
    def propose(self, context: ProposeContext) -> DraftTree:
        if context.requests and context.replay is not None and self._has_read_before(context):
            tree = context.replay()
            self._record(context, context.requests)
            return tree
        ready, unfinished = self._parts(context)
        roots = DraftTree.roots(context.roots()) if context.requests else DraftTree.from_lists([], self._device)
        if not (parts := ready + unfinished):
            return roots
        bounds = context.bounds_of(parts)
        stops = [part.end for part in parts]
        kv_slots = context.table.ops.kv_slots(bounds[0], None, max(stops))
        tree = self.draft(ScheduledRows(context, ready, [Reads(parts, bounds, kv_slots, stops)]))
        self._record(context, parts)
        if not ready:
            return roots
        slots = {part.slot for part in ready}
        places = [place for place, request in enumerate(context.requests) if request.slot in slots]
        return replace_trees(roots, torch.tensor(places, device=self._device), tree)

    @torch.inference_mode()
    def draft(self, rows: DraftRows) -> DraftTree:
        """See DeviceDrafter: the tokens that were not read yet and the roots, then trees below these."""
        read = rows.read(self._kv, num_extra=1)
        assert read is not None
        output = self._model.read(read.token_ids, read.positions, read.attend)
        if not rows.count:
            return DraftTree.from_lists([], output.device)
        return self._grower.grow(rows, output.index_select(0, read.last[:, -1]), rows.ends + 1)

    def release(self, slots: Sequence[int]) -> None:
        self._hashes.forget(slots)

    def _has_read_before(self, context: ProposeContext) -> bool:
        """Whether every request can have a tree, and all its tokens but those of this step were read."""
        return all(
            self._fits(context, request) and self._num_computed(context, request) >= request.start
            for request in context.requests
        )

    def _record(self, context: ProposeContext, parts: Sequence[DraftRequest]) -> None:
        """These positions of requests have KV of the draft model now."""
        for part in parts:
            kv_slots = context.table.host_kv_slots[part.slot, part.start : part.end]
            self._made_from[kv_slots] = self._hashes.of(context, part)[part.start :]

    def _parts(self, context: ProposeContext) -> tuple[list[DraftRequest], list[DraftRequest]]:
        """What to compute in this step: of requests that get a tree, in the context's order, and of others.

        A request gets a tree if it allows one and no KV is missing.
        """
        rows = [request for request in context.requests + context.unfinished if self._fits(context, request)]
        with_tree = {request.slot for request in context.requests}
        starts = [self._num_computed(context, request) for request in rows]
        num_added = sum(request.end - request.start for request in rows)
        sizes = [request.end - start for request, start in zip(rows, starts, strict=True)]
        counts = split_budget(sizes, num_added + CATCH_UP_TOKENS)
        ready, unfinished = [], []
        for request, start, count in zip(rows, starts, counts, strict=True):
            if start + count == request.end and request.slot in with_tree:
                ready.append(request._replace(start=start))
            elif count:
                unfinished.append(request._replace(start=start, end=start + count))
        return ready, unfinished

    def _fits(self, context: ProposeContext, request: DraftRequest) -> bool:
        """Whether a tree fits in the draft model's context, after the prompt if that is not complete."""
        num_prompt_tokens = context.table.states[request.slot].num_prompt_tokens
        return max(request.end, num_prompt_tokens - 1) <= self._last_end

    def _num_computed(self, context: ProposeContext, request: DraftRequest) -> int:
        """How many of the request's tokens, from the first one on, have KV of the draft model."""
        kv_slots = context.table.host_kv_slots[request.slot, : request.end]
        missed = self._made_from[kv_slots] != self._hashes.of(context, request)
        return int(missed.argmax()) if missed.any() else request.end


def split_budget(sizes: Sequence[int], budget: int) -> list[int]:
    """Split `budget` among requests of these sizes, smallest first, so that a long one does not delay the others."""
    counts = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        counts[index] = min(sizes[index], budget)
        budget -= counts[index]
    return counts


class PrefixHashes:
    """A hash of every prefix of a request's tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._weights = np.random.default_rng(0).integers(2**64, size=max_tokens, dtype=np.uint64)
        self._known: dict[int, np.ndarray] = {}  # by slot

    def of(self, context: ProposeContext, request: DraftRequest) -> np.ndarray:
        """uint64 [end]: entry i is the hash of the tokens up to i."""
        known = self._known.get(request.slot, np.zeros(0, dtype=np.uint64))
        new = np.array(context.token_ids(request)[len(known) : request.end], dtype=np.uint64)
        if len(new):
            sums = np.cumsum((new + 1) * self._weights[len(known) : request.end])
            known = self._known[request.slot] = np.concatenate((known, sums + known[-1:] if len(known) else sums))
        return known[: request.end]

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._known.pop(slot, None)


class DraftModel:
    """A language model as a TreeModel: its only state is the KV.

    It drafts the first `num_tokens` token ids, or with `ids` int64 [n] only these (FR-Spec); `head` has their rows.
    """

    def __init__(
        self, model: TargetModel, head: VocabHead, num_tokens: int, ids: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.context_length = model.max_positions
        self.num_heads = model.shape.num_local_heads
        self.vocab_size = num_tokens if ids is None else len(ids)
        self.draft_token_ids = ids
        self.vocab_head = head
        self._model = model
        self._dtype = dtype
        self.reason_without_graphs = reason_without_graphs(model)
        self.network: TreeNetwork | None = None
        self.layer_attention = model.layer_attention
        if isinstance(model, FusibleModel) and model.fused is not None:
            self.network = tree_network(
                model.fused, model.embedding, None, model.norm, head, ids, self.vocab_size, output_is_normed=True
            )

    def make_pool(self, num_slots: int) -> Tensor:
        shape, device = self._model.shape, self._model.embedding.weight.device
        return make_pool(shape.num_kv_layers, num_slots, shape.num_local_kv_heads, shape.head_dim, self._dtype, device)

    def read(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden]; token_ids and positions are int64 [T]."""
        last = self._model.shape.vocab_size - 1
        return self._model(token_ids.clamp(max=last), positions, attend)[0]

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        del states
        return self.read(token_ids, positions, attend)

    def recur(self, output: Tensor) -> Tensor:
        return output

    def logits(self, output: Tensor) -> Tensor:
        return self.vocab_head.shard(output)[:, : max(0, self.vocab_size - self.vocab_head.first_id)]


def load_draft_model(config: SpeculativeConfig, target: TargetView) -> DraftModel:
    """The model at `speculative.draft_model_path`. ConfigError if it keeps states, or has other tokens."""
    folder = resolve_draft(config, progress=False)
    model_config = _draft_config(folder)
    num_tokens = num_common_tokens(folder, model_config.vocab_size, target)
    dtype, quantization = draft_dtype(config, target), draft_quantization(config, target)
    options = EngineConfig(
        load_format=config.draft_load_format,
        dtype=str(dtype).removeprefix("torch."),
        context_length=min(context_length(model_config, None), target.context_length),
        quantization=quantization,
        moe_runner_backend=target.moe_runner_backend,
    )
    model, group = _load(folder, options, target)
    if target.model is not None and isinstance(model, CausalLM):
        _share_matrices(model, target.model)
    ids = configured_token_map(config, target)
    ids = None if ids is None else ids[ids < num_tokens].to(target.device)
    matrices = TargetMatrices(
        model.shape,
        model.max_positions,
        folder,
        config.draft_load_format,
        dtype,
        target.device,
        model,
        quantization,
        group=group,
    )
    return DraftModel(model, matrices.head(ids), num_tokens, ids, dtype)


def _load(folder: Path, options: EngineConfig, target: TargetView) -> tuple[TargetModel, RankGroup]:
    """The model, and the ranks that share it: those that draft together, or a rank alone where they cannot."""
    if target.group.size > 1:
        try:
            return load_model(folder, options, target.group, target.device, progress=False), target.group
        except ConfigError as error:  # what else is wrong is an error for one rank, too
            logger.warning("the draft model in %s is whole on every rank: %s", folder, error)
    alone = RankGroup()
    return load_model(folder, options, alone, target.device, progress=False), alone


def check_draft_model_files(config: SpeculativeConfig, target: TargetFiles) -> None:
    """ConfigError if `speculative.draft_model_path` is not a supported model, keeps states, or has other tokens."""
    folder = resolve_draft(config, progress=False)
    num_common_tokens(folder, _draft_config(folder).vocab_size, target)
    WeightReader(folder, config.draft_load_format).close()


def _draft_config(folder: Path) -> PretrainedConfig:
    """The draft model's config. ConfigError if its layers keep states."""
    model_config = load_config(folder)
    if shape_of(model_config, RankGroup()).states:
        raise ConfigError(
            f"{folder}: layers of this draft model keep states, which a draft tree would change; choose a draft model "
            "whose layers all have attention, or another algorithm"
        )
    return model_config


def num_common_tokens(folder: Path, vocab_size: int, target: TargetView | TargetFiles) -> int:
    """Number of ids, from 0 on, that the draft model in `folder` can propose, without padding.

    ConfigError unless the two tokenizers have the same tokens.
    """
    ours, theirs = (load_tokenizer(path).backend_tokenizer.id_to_token for path in (folder, target.folder))
    num_tokens = 0
    for token in range(max(vocab_size, target.shape.vocab_size)):
        if ours(token) != theirs(token):
            raise ConfigError(
                f"{folder}: token {token} is {ours(token)!r} in the draft model's vocabulary, but {theirs(token)!r} in "
                "the target's; choose a smaller model of the target's own family, or make one with "
                "`specray train draft`"
            )
        if theirs(token) is not None:
            num_tokens = token + 1
    return min(num_tokens, vocab_size, target.shape.vocab_size)


def _share_matrices(model: CausalLM, target: TargetModel) -> None:
    """Share the target's embedding with a model that has an equal one, and its output matrix if both are tied."""
    ours, theirs = model.embedding.weight, target.embedding.weight
    if ours.dtype == theirs.dtype and ours.device == theirs.device and torch.equal(ours, theirs):
        model.fused_forward = None  # it would keep the model's own matrices
        model.embedding = target.embedding
        if model.shape.tied and target.shape.tied:
            model.head = target.head
