"""EAGLE draft heads: decoder layers, usually one, over a token's embedding and the target's hidden states before it.

EAGLE-1 and EAGLE-2 heads are the same network; EAGLE-3 heads are another. `specray.spec_decode.eagle` grows trees with
them, `eagle_loading` loads them, and `eagle_files` reads their config.json and the names of their tensors.

Found in checkpoints rather than in papers: the norm over all aux hidden states before `fc` is stored as `input_norm`,
and EAGLE-1's code creates a bias of `fc` that config.json does not mention.
"""

from typing import Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear, VocabEmbedding, VocabHead
from specray.layers.norm import RMSNorm
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding
from specray.models.causal_lm import FeedForward
from specray.models.eagle_files import HeadConfig, TensorNames, read_draft_vocabulary
from specray.models.llama import Attention, LlamaShape
from specray.models.loading import Loader
from specray.models.target_matrices import HEAD, TargetMatrices
from specray.ops.attention import Attend


class EagleHead(Protocol):
    """A draft head of hidden size H.

    A state is the head's summary of everything before a token: from the target's hidden states, or the head's own
    output in deeper draft steps.
    """

    aux_hidden_state_layers: tuple[int, ...]  # of the target, see TargetModel
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    vocab_size: int  # columns of `logits`
    draft_token_ids: Tensor | None  # int64 [vocab_size]: target id of each column; None: the same id
    window: int | None  # positions that a query attends to, its own included; None: all

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """States [T, H] from the target's hidden states [T, aux_hidden_state_layers * target hidden] of any type."""

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H] of the last layer, before any norm; token_ids (of the target) and positions are int64 [T]."""

    def recur(self, output: Tensor) -> Tensor:
        """The states of the tokens that are drafted from `output`."""

    def logits(self, output: Tensor) -> Tensor:
        """float32 [n, vocab_size]"""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64: the target's ids of draft ids of any shape."""


class Eagle2Head:
    """EAGLE-1 and -2: `fc` of [embedding, state], then a layer without an input norm, then the target's output matrix.

    The first state is the target's hidden state after its final norm.
    """

    def __init__(
        self,
        config: HeadConfig,
        shape: LlamaShape,
        loader: Loader,
        names: TensorNames,
        shared: TargetMatrices,
        token_map: Tensor | None = None,
    ) -> None:
        size = shape.hidden_size
        if size != shared.shape.hidden_size:
            raise ConfigError(
                f"{loader.folder}: an EAGLE-2 head of hidden_size={size} cannot use the output matrix of a target of "
                f"{shared.shape.hidden_size}; choose a head made for this target"
            )
        if config.num_draft_ids != shape.vocab_size:
            raise ConfigError(
                f"{loader.folder / 'config.json'}: a vocabulary of {config.num_draft_ids} tokens is not supported in "
                "EAGLE-2 heads; choose one with the target's vocabulary and set speculative.token_map"
            )
        self.aux_hidden_state_layers: tuple[int, ...] = (shared.shape.num_layers,)
        self.num_layers, self.num_heads, self.num_kv_heads = shape.num_layers, shape.num_heads, shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.dtype, self.window = shared.dtype, config.window
        self.draft_token_ids = None if token_map is None else token_map.to(shared.device, torch.int64)
        self.vocab_size = shape.vocab_size if token_map is None else len(token_map)
        self._embedding = _embedding(shape, loader, names, shared)
        self._fc = _fusion(config, loader, names, 2 * size, size)
        self._layers = _Layers(shape, loader, names, size)
        self._head = shared.head(self.draft_token_ids, _full_head(shape, loader, names))
        self._rotary = _rotary(config, shape, loader, shared.max_positions)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return aux_hidden_states.to(self.dtype)

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self._fc(torch.cat((self._embedding(token_ids), states), -1))
        return self._layers(x, x, self._rotary.at(positions), attend)

    def recur(self, output: Tensor) -> Tensor:
        return output

    def logits(self, output: Tensor) -> Tensor:
        return self._head(output)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return _target_ids(self.draft_token_ids, draft_ids)


class Eagle3Head:
    """EAGLE-3: the first state is `fc` of several aux hidden states; the layer reads [norm(embedding), norm(state)]."""

    def __init__(
        self, config: HeadConfig, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
    ) -> None:
        size, width, layer, eps = shape.hidden_size, shared.shape.hidden_size, names.layer, shape.eps
        self.aux_hidden_state_layers = config.aux_hidden_state_layers(loader.folder, shared.shape.num_layers)
        self.num_layers, self.num_heads, self.num_kv_heads = shape.num_layers, shape.num_heads, shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.dtype, self.window = shared.dtype, config.window
        self.vocab_size = config.num_draft_ids
        ids = read_draft_vocabulary(loader, names, self.vocab_size, shape.vocab_size)
        self.draft_token_ids = None if ids is None else ids.to(shared.device)
        self._embedding = _embedding(shape, loader, names, shared)
        self._fuse = _Fusion(config, shape, loader, names, len(self.aux_hidden_state_layers), width)
        self._token_norm = RMSNorm(loader.tensor(layer + "input_layernorm.weight", (size,)), eps)
        self._state_norm = RMSNorm(loader.tensor(layer + "hidden_norm.weight", (size,)), eps)
        self._normed_residual = config.norm_before_residual
        self._layers = _Layers(shape, loader, names, 2 * size)
        self._norm = RMSNorm(loader.tensor(names.of_plain("norm.weight"), (size,)), eps)
        self._normed_output = config.norm_output
        self._head = _eagle3_head(self.vocab_size, ids, shape, loader, names, shared)
        self._rotary = _rotary(config, shape, loader, shared.max_positions)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return self._fuse(aux_hidden_states.to(self.dtype))

    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        normed = self._state_norm(states)
        x = torch.cat((self._token_norm(self._embedding(token_ids)), normed), -1)
        return self._layers(x, normed if self._normed_residual else states, self._rotary.at(positions), attend)

    def recur(self, output: Tensor) -> Tensor:
        return self._norm(output) if self._normed_output else output

    def logits(self, output: Tensor) -> Tensor:
        return self._head(self._norm(output))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return _target_ids(self.draft_token_ids, draft_ids)


class _Layers:
    """The head's layers: a first one that reads `width` columns, and in some heads ordinary decoder layers after it."""

    def __init__(self, shape: LlamaShape, loader: Loader, names: TensorNames, width: int) -> None:
        first, *others = names.layers(shape.num_layers)
        size = shape.hidden_size
        self._first = _Layer(0, shape, loader, first, width)
        self._norms = [RMSNorm(loader.tensor(other + "input_layernorm.weight", (size,)), shape.eps) for other in others]
        self._others = [_Layer(index, shape, loader, other, size) for index, other in enumerate(others, 1)]

    def __call__(self, x: Tensor, residual: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden = self._first(x, residual, cos_sin, attend)
        for norm, layer in zip(self._norms, self._others, strict=True):
            hidden = layer(norm(hidden), hidden, cos_sin, attend)
        return hidden


class _Layer:
    """Attention over inputs of `width` columns, then the feed-forward. The caller passes the attention's residual."""

    def __init__(self, index: int, shape: LlamaShape, loader: Loader, prefix: str, width: int) -> None:
        self._attention = Attention(index, shape, loader, prefix + "self_attn.", width)
        weight = loader.tensor(prefix + "post_attention_layernorm.weight", (shape.hidden_size,))
        self._ffn_norm = RMSNorm(weight, shape.eps)
        self._ffn = FeedForward(shape.hidden_size, shape.ffn_size, loader, prefix + "mlp.")

    def __call__(self, x: Tensor, residual: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden = self._attention(x, *cos_sin, attend).add_(residual)
        return self._ffn(self._ffn_norm(hidden)).add_(hidden)


class _Fusion:
    """EAGLE-3's first state: the head's norms of the aux hidden states, if any, then `fc`, if any."""

    def __init__(
        self, config: HeadConfig, shape: LlamaShape, loader: Loader, names: TensorNames, count: int, width: int
    ) -> None:
        eps = shape.eps
        self._whole_norm: RMSNorm | None = None
        self._norms: list[RMSNorm] = []
        self._fc: ColumnParallelLinear | None = None
        if config.norm_before_fc:
            name = names.of_plain("input_norm.weight", "norm_before_fc.weight")
            self._whole_norm = RMSNorm(loader.tensor(name, (count * width,)), eps)
        if config.fc_norm:
            each = [names.of_plain(f"fc_norm.{index}.weight") for index in range(count)]
            self._norms = [RMSNorm(loader.tensor(name, (width,)), eps) for name in each]
        if config.use_aux_hidden_state or names.has("fc.weight") or width != shape.hidden_size:
            self._fc = _fusion(config, loader, names, count * width, shape.hidden_size)

    def __call__(self, aux_hidden_states: Tensor) -> Tensor:
        if self._whole_norm is not None:
            aux_hidden_states = self._whole_norm(aux_hidden_states)
        if self._norms:
            chunks = aux_hidden_states.chunk(len(self._norms), -1)
            aux_hidden_states = torch.cat([norm(chunk) for norm, chunk in zip(self._norms, chunks, strict=True)], -1)
        return aux_hidden_states if self._fc is None else self._fc(aux_hidden_states)


def _fusion(config: HeadConfig, loader: Loader, names: TensorNames, width: int, size: int) -> ColumnParallelLinear:
    """The linear `fc` [size, width].

    If config.json does not mention a bias, there is one if the checkpoint has it. For EAGLE-3 that holds for
    `bias: true` too, because SafeAILab's code ignores that setting there.
    """
    weight, bias = (names.of_plain(f"fc.{part}", f"fusion_fc.{part}") for part in ("weight", "bias"))
    stated = config.bias if config.fusion_bias is None else config.fusion_bias
    is_open = stated is None or (stated and names.kind == 3)
    has_bias = bias in names.stored if is_open else stated
    matrix, added = loader.tensor(weight, (size, width)), loader.tensor(bias, (size,)) if has_bias else None
    return ColumnParallelLinear(matrix, added, loader.quantization)


def _embedding(shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices) -> VocabEmbedding:
    """The target's embedding, unless the checkpoint has another one or its width is not the target's."""
    name = names.of_plain("embed_tokens.weight")
    if shape.hidden_size == shared.shape.hidden_size and name not in names.stored:
        return shared.embedding()
    own = loader.tensor(name, (shape.vocab_size, shape.hidden_size))
    if shape.hidden_size != shared.shape.hidden_size:
        return VocabEmbedding(own, RankGroup())
    return shared.embedding(own)


def _full_head(shape: LlamaShape, loader: Loader, names: TensorNames) -> Tensor | None:
    """The checkpoint's output matrix over the target's vocabulary, if it has one."""
    name = names.of_plain(HEAD)
    return loader.tensor(name, (shape.vocab_size, shape.hidden_size)) if name in names.stored else None


def _eagle3_head(
    num_ids: int, ids: Tensor | None, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
) -> VocabHead:
    """The output matrix over the draft vocabulary of `num_ids`, whose target ids are `ids` (None: the same).

    A full one that the checkpoint leaves out is the target's.
    """
    if num_ids == shape.vocab_size and ids is None and shape.hidden_size == shared.shape.hidden_size:
        return shared.head(None, _full_head(shape, loader, names))
    own = loader.tensor(names.of_plain(HEAD), (num_ids, shape.hidden_size))
    return VocabHead(own, num_ids, RankGroup(), loader.quantization)


def _rotary(config: HeadConfig, shape: LlamaShape, loader: Loader, max_positions: int) -> RotaryEmbedding:
    """Tables for the target's context length. A head's own max_position_embeddings is that of its training data."""
    try:
        config_of_rope = config.rope(shape.head_dim)
        return RotaryEmbedding(config_of_rope, shape.head_dim, max_positions, loader.dtype, loader.device)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigError(
            f"{loader.folder / 'config.json'}: its RoPE settings cannot be used ({error}); correct rope_scaling or "
            "choose another head"
        ) from error


def _target_ids(draft_token_ids: Tensor | None, draft_ids: Tensor) -> Tensor:
    ids = draft_ids.to(torch.int64)
    return ids if draft_token_ids is None else draft_token_ids[ids]
