"""What serves a draft head: packed parts of its checkpoint, and the interface that drafters know."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear, SplitInputLinear, VocabEmbedding, VocabHead
from specray.layers.norm import NormOfParts, RMSNorm
from specray.layers.rotary import RotaryEmbedding, rotate_
from specray.models.decoder_layer import FeedForward
from specray.models.heads.eagle_files import HeadConfig, TensorNames
from specray.models.heads.parts import Embedding, Parts
from specray.models.llama import Attention
from specray.models.llama_shape import LlamaShape
from specray.models.loading import HEAD, Loader, vocab_share
from specray.models.target_matrices import TargetMatrices
from specray.models.target_model import ModelShape
from specray.ops.attention import Attend, AttentionBackend
from specray.ops.cpu.attention import PagedAttention
from specray.ops.cpu.trees import TreeNetwork
from specray.ops.layer_attention import LayerAttention
from specray.ops.quantised_weight import Weight


class DraftHead:
    """A draft head of hidden size H, split over ranks like a target.

    `draft_token_ids` int64 [n]: the target's ids of its vocabulary.

    A state is the head's summary of the target's hidden states at a position.
    """

    layer_attention: Sequence[LayerAttention] | None = None  # see TargetModel
    reason_without_graphs: str | None = None  # see `specray.layers.moe`

    def __init__(
        self,
        shape: ModelShape,
        shared: TargetMatrices,
        aux_hidden_state_layers: tuple[int, ...],
        draft_token_ids: Tensor | None,
        embedding: VocabEmbedding,
        head: VocabHead,
    ) -> None:
        self.aux_hidden_state_layers = aux_hidden_state_layers  # of the target, see TargetModel
        self.num_layers = shape.num_layers
        self.num_heads, self.num_kv_heads = shape.num_local_heads, shape.num_local_kv_heads
        self.head_dim, self.hidden_size = shape.head_dim, shape.hidden_size
        self.dtype = shared.dtype
        self.draft_token_ids = None if draft_token_ids is None else draft_token_ids.to(shared.device, torch.int64)
        self.vocab_head = head
        self.vocab_size = head.vocab_size
        self._embedding = embedding

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """States [T, H] from the target's hidden states [T, aux_hidden_state_layers * target hidden] of any type."""
        return aux_hidden_states.to(self.dtype)

    def logits(self, output: Tensor) -> Tensor:
        """[n, vocab_size] as `VocabHead.shard` computes them, of which a rank has the columns of `vocab_head`."""
        return self.vocab_head.shard(output)


class EagleHead(DraftHead, ABC):
    """A head that drafts a token after the other: in deeper draft steps, a state is the head's own output."""

    network: TreeNetwork | None = None  # the head as a function that grows trees, where the kernels have one
    extends_in_network = True  # `network.extend` equals the call

    @abstractmethod
    def __call__(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Output [T, H] of the last layer, before any norm; token_ids (of the target) and positions are int64 [T]."""

    def extending_network(self, attention: AttentionBackend) -> TreeNetwork | None:
        """`network`, if its `extend` can be called in place of the head in the steps that `attention` plans."""
        return self.network if self.extends_in_network and isinstance(attention, PagedAttention) else None

    def recur(self, output: Tensor) -> Tensor:
        """The states of the tokens that are drafted from `output`."""
        return output


class ServedParts(Parts):
    """Parts with packed weights, in the types and with the kernels of `loader`."""

    def __init__(self, shape: ModelShape, rotary: RotaryEmbedding, loader: Loader) -> None:
        super().__init__(shape, rotary)
        self._loader = loader

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._loader.tensor(name, (size,)), self.shape.eps, self._loader.group)

    def norm_of_parts(self, names: Sequence[str], size: int) -> NormOfParts:
        return NormOfParts([self._loader.tensor(name, (size,)) for name in names], self.shape.eps)

    def linear(
        self, name: str, shape: tuple[int, int], bias: str | None = None
    ) -> ColumnParallelLinear | SplitInputLinear:
        """Its input and output are whole on every rank."""
        loader = self._loader
        added = None if bias is None else loader.tensor(bias, shape[:1])
        if loader.group.size == 1:
            return ColumnParallelLinear(loader.weight(name, shape), added, loader.quantization)
        part = loader.group.share(shape[1])
        return SplitInputLinear(loader.weight(name, shape, part, 1), loader.group, part, added, loader.quantization)

    def embedding(self, name: str, shape: tuple[int, int]) -> Embedding:
        return partial(F.embedding, weight=self._loader.tensor(name, shape))

    def context_kv(self, prefixes: Sequence[str]) -> "ServedContextKV":
        assert isinstance(self.shape, LlamaShape)
        return ServedContextKV(self.shape, self._loader, prefixes, self.rotary)

    def attention(self, index: int, prefix: str, width: int) -> Attention:
        assert isinstance(self.shape, LlamaShape)
        return Attention(index, self.shape, self._loader, prefix, width)

    def feed_forward(self, prefix: str) -> FeedForward:
        assert isinstance(self.shape, LlamaShape)
        return FeedForward(self.shape.hidden_size, self.shape.ffn_size, self._loader, prefix)


class ServedContextKV:
    """The k and v projections of all layers as one matrix, which reads the states once. See `Parts.context_kv`."""

    def __init__(self, shape: LlamaShape, loader: Loader, prefixes: Sequence[str], rotary: RotaryEmbedding) -> None:
        self._layers, self._heads, self._dim, self._eps = len(prefixes), shape.num_kv_heads, shape.head_dim, shape.eps
        self._rotary = rotary
        rows = shape.num_kv_heads * shape.head_dim
        names = [f"{prefix}{part}_proj" for prefix in prefixes for part in "kv"]
        weight = torch.cat([loader.tensor(f"{name}.weight", (rows, shape.hidden_size)) for name in names])
        bias = torch.cat([loader.tensor(f"{name}.bias", (rows,)) for name in names]) if shape.qkv_bias else None
        self._project = ColumnParallelLinear(weight, bias, loader.quantization)
        self._norms: Tensor | None = None  # [layers, 1, dim]
        if shape.qk_norm:
            norms = [loader.tensor(f"{prefix}k_norm.weight", (shape.head_dim,)) for prefix in prefixes]
            self._norms = torch.stack(norms)[:, None]

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        kv = self._project(states).view(-1, self._layers, 2, self._heads, self._dim)
        k = kv[:, :, 0]
        if self._norms is not None:
            k = F.rms_norm(k, (self._dim,), eps=self._eps) * self._norms
        k = k.reshape(-1, self._layers * self._heads, self._dim)
        rotate_(k, *self._rotary.at(positions))
        kv[:, :, 0] = k.view(-1, self._layers, self._heads, self._dim)
        return kv.transpose(0, 1)


def load_embedding(shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices) -> VocabEmbedding:
    """The target's embedding, unless the checkpoint has another one or its width is not the target's."""
    name = names.of_plain("embed_tokens.weight")
    if shape.hidden_size == shared.shape.hidden_size and name not in names.stored:
        return shared.embedding()
    own = loader.tensor(name, (shape.vocab_size, shape.hidden_size))
    if shape.hidden_size != shared.shape.hidden_size:
        return VocabEmbedding(vocab_share(own, shared.group), shared.group)
    return shared.embedding(own)


def full_output(shape: LlamaShape, loader: Loader, names: TensorNames) -> Tensor | None:
    """The checkpoint's output matrix over the target's vocabulary, if it has one."""
    name = names.of_plain(HEAD)
    return loader.tensor(name, (shape.vocab_size, shape.hidden_size)) if name in names.stored else None


def output_matrix(
    num_ids: int, ids: Tensor | None, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
) -> tuple[VocabHead, Weight | None]:
    """The output matrix over the draft vocabulary of `num_ids`, whose target ids are `ids` (None: the same).

    A full one that the checkpoint leaves out is the target's. Also the weights of one that is quantised and not the
    target's.
    """
    if num_ids == shape.vocab_size and ids is None and shape.hidden_size == shared.shape.hidden_size:
        return shared.head(None, full_output(shape, loader, names)), None
    weight = loader.vocab_weight(names.of_plain(HEAD), (num_ids, shape.hidden_size))
    head = VocabHead(weight, num_ids, loader.group, loader.quantization)
    return head, weight if loader.quantization in ("int8", "int4") else None


def load_rotary(config: HeadConfig, shape: LlamaShape, loader: Loader, max_positions: int) -> RotaryEmbedding:
    """Tables for the target's context length. A head's own max_position_embeddings is that of its training data."""
    try:
        config_of_rope = config.rope(shape.head_dim)
        return RotaryEmbedding(config_of_rope, shape.head_dim, max_positions, loader.dtype, loader.device)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigError(
            f"{loader.folder / 'config.json'}: its RoPE settings cannot be used ({error}); correct rope_scaling or "
            "choose another head"
        ) from error
