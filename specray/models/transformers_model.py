"""Any decoder of transformers as a TargetModel: its modules, with our attention, linears, experts and output matrix.

A step is one flat batch [1, T] with explicit positions, so that prefill, trees and the prefix cache are the same code
as for other models. What the modules compute beside attention and matrices is theirs, and so are all the keys of
`config.json`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from specray.errors import ConfigError
from specray.layers.linear import VocabEmbedding, VocabHead
from specray.layers.parallel import RankGroup
from specray.models.fused_forward import FusibleModel
from specray.models.llama_shape import heads_of_rank
from specray.models.loading import Loader
from specray.models.target_model import BEFORE_FINAL_NORM, ModelShape
from specray.models.transformers_fused import fused_body
from specray.models.transformers_head import FinishedHead
from specray.models.transformers_layers import has_row_wise_products
from specray.models.transformers_parallel import split_skeleton
from specray.models.transformers_rows import Recorder, compute_row_wise, reason_without_graphs
from specray.models.transformers_skeleton import (
    UNUSED_MASK_SHAPE,
    AttentionCall,
    AttentionFunction,
    attention_calls,
    build_skeleton,
    computing,
    decoder_of,
)
from specray.models.transformers_states import state_layers
from specray.models.transformers_weights import StoredNames, load_weights
from specray.ops.attention import Attend, make_zeros
from specray.ops.cpu.attention import PagedAttend
from specray.ops.layer_attention import LayerAttention, pack_kv
from specray.ops.linear import is_row_wise
from specray.ops.quantised_weight import Weight
from specray.ops.states import StatefulAttend, StatePass, StateRows, States


def transformers_shape(config: PretrainedConfig, group: RankGroup) -> ModelShape:
    """Sizes of the model that a TransformersModel of `config` is on a rank. ConfigError if it cannot be one."""
    skeleton = build_skeleton(config, torch.float32)
    split_skeleton(skeleton, group)
    return _shape(config, skeleton, attention_calls(skeleton))


class TransformersModel(FusibleModel):
    """transformers' modules of one causal language model."""

    can_round_kv = True

    def __init__(self, config: PretrainedConfig, loader: Loader, max_positions: int) -> None:
        super().__init__()
        model = build_skeleton(config, loader.dtype)
        split = split_skeleton(model, loader.group)
        calls = attention_calls(model)
        body = decoder_of(model)
        layers = _decoder_layers(body, len(calls) + len(state_layers(body)))
        stored = load_weights(model, loader, split, calls)
        embedding = model.get_input_embeddings().weight.data
        self.shape = replace(_shape(config, model, calls), tied=stored.output is None)
        self.max_positions = max_positions
        self.embedding = VocabEmbedding(embedding, RankGroup())
        is_screened = loader.screens_output and loader.group.size == 1
        matrix, bias = _output_matrix(stored, loader, embedding)
        head = FinishedHead(
            matrix, bias, self.shape.vocab_size, loader.group, loader.quantization, is_screened, model, body
        )
        self.head: VocabHead = head
        if (fused := fused_body(body, layers, calls, max_positions)) is not None:
            kernels, self.norm = fused
            self.fuse(kernels, has_plain_head=not head.is_finished)
        self._body = body
        self._streams = _Streams(layers)
        for layer in state_layers(body):
            layer.pack()
        sinks, self.is_row_wise, self.reason_without_graphs = self._trial()
        attending = [
            pooled(call, _local_sinks(of_layer, call, loader.group), max_positions)
            for call, of_layer in zip(calls.values(), sinks, strict=True)
            if call.source is None
        ]
        self._reads = [(layer, attending[layer]) for layer in _pool_layers(calls.values())]
        self.layer_attention: Sequence[LayerAttention] | None = None if _are_default(attending) else attending

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, aux_hidden_state_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """See TargetModel."""
        if self.fused is not None and isinstance(attend, PagedAttend):
            return self.forward_fused(self.fused, token_ids, positions, attend, aux_hidden_state_layers)
        self._streams.start(aux_hidden_state_layers)
        kept = attend.states if isinstance(attend, StatefulAttend) else None
        attention = PooledAttention(attend, self._reads)
        final = decode(self._body, positions, attention, kept, input_ids=token_ids[None])
        states = self._streams.taken | {self.shape.num_layers: final}
        return final, [states[index] for index in aux_hidden_state_layers]

    def _trial(self) -> tuple[list[Tensor | None], bool, str | None]:
        """Each layer's sinks, whether a row has the same bits in any batch, and why no graph can record a pass.

        Modules are changed so that rows have the same bits.

        ConfigError if a token depends on others in another way than by attention.
        """
        states = [self._states_apart(count) for count in (2, 2, 3)]  # made before operations are recorded
        with Recorder(self._body) as recorder:
            sinks, _ = self._without_attention([0, 0], [0, 1], states[0])
        compute_row_wise({module for modules in recorder.found.values() for module in modules})
        with Recorder(self._body) as left:
            _, few = self._without_attention([0, 0], [0, 1], states[1])
            self.head.shard(few)
        _, more = self._without_attention([1, 1, 0], [0, 2, 1], states[2])
        one, same = few[1].float(), more[2].float()
        if not torch.allclose(one, same, rtol=0.05, atol=0.05, equal_nan=True):
            raise ConfigError(
                f"layers of {type(self._body).__name__} mix tokens in another way than by attention, which is not "
                "served yet; choose another model"
            )
        has_same_bits = torch.equal(one.nan_to_num(), same.nan_to_num())
        has_same_sums = has_row_wise_products(self._body) and is_row_wise(self.head.run)
        return sinks, not left.found and has_same_bits and has_same_sums, reason_without_graphs(self._body, left)

    @torch.no_grad()
    def _without_attention(
        self, token_ids: list[int], positions: list[int], states: States
    ) -> tuple[list[Tensor | None], Tensor]:
        """(each layer's sinks, final hidden states [T, hidden]) if every token saw nothing but itself."""
        self._streams.start(())
        attention = OwnValues()
        ids, places = (torch.tensor(values, device=self.embedding.weight.device) for values in (token_ids, positions))
        return attention.sinks, decode(self._body, places, attention, states, input_ids=ids[None])

    def _states_apart(self, count: int) -> States:
        """Those of a pass over `count` tokens that see nothing but themselves."""
        device = self.embedding.weight.device
        pools = [make_zeros((1, *state.shape), state.dtype, device) for state in self.shape.states]
        return StatePass(pools, StateRows.apart(count))


def decode(
    body: nn.Module, positions: Tensor, attention: AttentionFunction, states: States | None = None, **inputs: Any
) -> Tensor:
    """The output [T, hidden] of a decoder for `inputs` [1, T, ...], token ids or embeddings, at int64 positions [T]."""
    mask = torch.empty(UNUSED_MASK_SHAPE, device=positions.device)
    with computing(attention, _mix, states):
        out = body(position_ids=positions[None], attention_mask=mask, use_cache=False, **inputs)
    final: Tensor = out[0][0]
    return final


class OwnValues:
    """Attention in which every token sees nothing but itself. `sinks` are those that the layers pass, in order."""

    def __init__(self) -> None:
        self.sinks: list[Tensor | None] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:  # noqa: ARG002
        self.sinks.append(call.sinks)
        return v.repeat_interleave(call.num_heads // call.num_kv_heads, 1).transpose(1, 2).contiguous()


class PooledAttention:
    """The attention of one pass, with keys and values in the KV pool.

    `reads` are the pool's layer that each layer of the pass reads, and how. The first to read it writes it.
    """

    def __init__(self, attend: Attend, reads: Sequence[tuple[int, LayerAttention]]) -> None:
        self._attend = attend
        self._reads = iter(reads)
        self._written: set[int] = set()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        layer, how = next(self._reads)
        head_dim = how.head_dim
        rows, keys, values = (part[0].transpose(0, 1) for part in (q, k, v))
        kv: Tensor | None = None
        if layer not in self._written:
            self._written.add(layer)
            is_even = call.qk_dim == call.v_dim
            kv = torch.stack((keys, values), 1) if is_even else pack_kv(keys, values, head_dim)
        if call.qk_dim < head_dim:
            rows = F.pad(rows, (0, head_dim - call.qk_dim))
        out = self._attend(layer, rows.contiguous(), kv)
        return out.view(1, len(rows), call.num_heads, head_dim)[..., : call.v_dim].contiguous()


def _local_sinks(sinks: Tensor | None, call: AttentionCall, group: RankGroup) -> Tensor | None:
    """The sinks of this rank's heads."""
    if sinks is None or len(sinks) == call.num_heads:
        return sinks
    heads, _ = heads_of_rank(len(sinks), len(sinks) * call.num_kv_heads // call.num_heads, group)
    return sinks[heads]


def pooled(call: AttentionCall, sinks: Tensor | None, max_positions: int) -> LayerAttention:
    """How the kernels compute a layer: its keys and values have one size, the larger one's."""
    window = call.window if call.window is not None and call.window < max_positions else None
    head_dim = max(call.qk_dim, call.v_dim)
    scale = None if call.has_default_scale and head_dim == call.qk_dim else call.scale or call.qk_dim**-0.5
    return LayerAttention(window, scale, call.softcap, sinks, call.num_heads, call.num_kv_heads, head_dim)


def _pool_layers(calls: Iterable[AttentionCall]) -> list[int]:
    """The layer of the KV pool that each layer reads: its own, or that of its source."""
    layers: list[int] = []
    for call in calls:
        layers.append(max(layers, default=-1) + 1 if call.source is None else layers[call.source])
    return layers


def _are_default(layers: Sequence[LayerAttention]) -> bool:
    """Whether every layer attends to all keys, and all have the same sizes."""
    sizes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    parts = [part for layer in layers for part in (layer.window, layer.scale, layer.softcap, layer.sinks)]
    return len(sizes) == 1 and all(part is None for part in parts)


def _mix(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    mixed: Tensor = module.packed_experts(module, hidden, chosen, weights)
    return mixed


class _Streams:
    """The residual streams that enter the layers of a pass, and the one that leaves the last, as far as wanted."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.taken: dict[int, Tensor] = {}
        self._layers = layers
        self._wanted: frozenset[int] = frozenset()
        self._hooked: set[int] = set()

    def start(self, wanted: Sequence[int]) -> None:
        """A new pass, whose streams of layers `wanted` are kept."""
        self._wanted, self.taken = frozenset(wanted), {}
        for index in self._wanted - self._hooked:  # only these: a hook takes each step a few microseconds
            self._hooked.add(index)
            if index == BEFORE_FINAL_NORM:
                self._layers[-1].register_forward_hook(self._take_last)
            elif index < len(self._layers):
                self._layers[index].register_forward_pre_hook(self._taking(index), with_kwargs=True)

    def _taking(self, index: int) -> Any:
        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index in self._wanted:
                self.taken[index] = _rows(args[0] if args else kwargs["hidden_states"])

        return take

    def _take_last(self, _: nn.Module, __: Any, output: Any) -> None:
        if BEFORE_FINAL_NORM in self._wanted:
            self.taken[BEFORE_FINAL_NORM] = _rows(output[0] if isinstance(output, tuple) else output)


def _rows(stream: Tensor) -> Tensor:
    """[T, hidden] of a stream [1, T, hidden], or of the first of several, [n, 1, T, hidden]."""
    return stream[0] if stream.dim() == 3 else stream[0, 0]


def _decoder_layers(body: nn.Module, count: int) -> list[nn.Module]:
    found = [part for part in body.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if not found:
        raise ConfigError(f"{type(body).__name__} has no list of {count} layers; choose another model")
    return list(found[0])


def _shape(config: Any, model: Any, calls: Mapping[int, AttentionCall]) -> ModelShape:
    with_states = state_layers(model)
    widest = max(calls.values(), key=lambda call: call.num_kv_heads * max(call.qk_dim, call.v_dim))
    return ModelShape(
        num_layers=len(calls) + len(with_states),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        tied=bool(config.tie_word_embeddings),
        num_local_heads=widest.num_heads,
        num_local_kv_heads=widest.num_kv_heads,
        head_dim=max(widest.qk_dim, widest.v_dim),
        num_shared_kv_layers=sum(call.source is not None for call in calls.values()),
        num_state_layers=len(with_states),
        states=tuple(operation.shape for layer in with_states for operation in layer.operations),
    )


def _output_matrix(stored: StoredNames, loader: Loader, embedding: Tensor) -> tuple[Weight, Tensor | None]:
    """The output matrix [vocab, hidden] and its bias: the embedding, if the checkpoint has no other."""
    shape = (embedding.shape[0], embedding.shape[1])
    name = stored.output or stored.embedding
    matrix = loader.vocab_weight(name, shape) if name is not None else embedding
    bias = None if stored.output_bias is None else loader.tensor(stored.output_bias, shape[:1])
    return matrix, bias
