"""Compiles a target's decoder layers with torch.compile, where that changes anything (`enable_torch_compile`)."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from specray.layers.compiled import CompiledLayers
from specray.models.causal_lm import CausalLM
from specray.models.decoder_layer import DecoderLayer, FeedForward
from specray.models.llama import Attention
from specray.models.target_model import TargetModel
from specray.ops.device_ops import ops_on
from specray.ops.inductor import check_inductor, inductor_options

logger = logging.getLogger(__name__)


@torch.inference_mode()  # as in a step, whose tensors have this mode
def compile_layers(model: TargetModel, sizes: Sequence[int], is_fused: bool, progress: bool) -> None:
    """Compile the layers for steps of up to `sizes` tokens, or say in the log why that would change nothing.

    `is_fused`: attention is a FusedAttend. ConfigError if the machine lacks a compiler.
    """
    device = model.embedding.weight.device
    if (reason := obstacle(model, device)) or not isinstance(model, CausalLM):
        logger.warning("enable_torch_compile=true changes nothing: %s", reason)
        return
    check_inductor(device.type)
    before = [] if model.compiled is None else model.compiled.sizes  # of another engine that shares the model
    sizes = sorted({*sizes, *before})
    model.compiled = CompiledLayers(list(model.layers), model.shape.num_local_heads, sizes, inductor_options())
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    seconds = model.compiled.compile(model.embedding(zeros), *model.rotary.at(zeros), is_fused, progress)
    logger.info("torch.compile: layers for %s tokens in %.1f s", ", ".join(map(str, sizes)), seconds)


def obstacle(model: TargetModel, device: torch.device) -> str | None:
    """Why torch.compile changes nothing for a model, or None."""
    if (reason := ops_on(device).obstacle_to_compilation) is not None:
        return reason
    if not isinstance(model, CausalLM):
        return "transformers' modules are not compiled"
    if model.embedding.group.size > 1:
        return "engines of several ranks are not compiled"
    if not all(_is_dense(layer) for layer in model.layers):
        return "mixtures of experts and latent attention are not compiled"
    return None


def _is_dense(layer: nn.Module) -> bool:
    if not isinstance(layer, DecoderLayer):
        return False
    return isinstance(layer.attention, Attention) and isinstance(layer.ffn, FeedForward)
