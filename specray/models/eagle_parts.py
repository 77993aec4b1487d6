"""Parts of a draft head that its checkpoint may omit or share with the target."""

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from specray.errors import ConfigError
from specray.layers.linear import ColumnParallelLinear, VocabEmbedding
from specray.layers.parallel import RankGroup
from specray.layers.rotary import RotaryEmbedding
from specray.models.eagle_files import HeadConfig, TensorNames
from specray.models.llama_shape import LlamaShape
from specray.models.loading import HEAD, Loader
from specray.models.target_matrices import TargetMatrices


def fusion_linear(
    config: HeadConfig, loader: Loader, names: TensorNames, width: int, size: int
) -> ColumnParallelLinear:
    """The linear `fc` [size, width].

    If config.json does not mention a bias, there is one if the checkpoint has it. For EAGLE-3 that holds for
    `bias: true` too, because SafeAILab's code ignores that setting there.
    """
    weight, bias = (names.of_plain(f"fc.{part}", f"fusion_fc.{part}") for part in ("weight", "bias"))
    stated = config.bias if config.fusion_bias is None else config.fusion_bias
    is_open = stated is None or (stated and names.kind == 3)
    has_bias = bias in names.stored if is_open else stated
    matrix, added = loader.weight(weight, (size, width)), loader.tensor(bias, (size,)) if has_bias else None
    return ColumnParallelLinear(matrix, added, loader.quantization)


def load_embedding(shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices) -> VocabEmbedding:
    """The target's embedding, unless the checkpoint has another one or its width is not the target's."""
    name = names.of_plain("embed_tokens.weight")
    if shape.hidden_size == shared.shape.hidden_size and name not in names.stored:
        return shared.embedding()
    own = loader.tensor(name, (shape.vocab_size, shape.hidden_size))
    if shape.hidden_size != shared.shape.hidden_size:
        return VocabEmbedding(own, RankGroup())
    return shared.embedding(own)


def full_head(shape: LlamaShape, loader: Loader, names: TensorNames) -> Tensor | None:
    """The checkpoint's output matrix over the target's vocabulary, if it has one."""
    name = names.of_plain(HEAD)
    return loader.tensor(name, (shape.vocab_size, shape.hidden_size)) if name in names.stored else None


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


def target_ids(draft_token_ids: Tensor | None, draft_ids: Tensor) -> Tensor:
    ids = draft_ids.to(torch.int64)
    return ids if draft_token_ids is None else draft_token_ids[ids]
