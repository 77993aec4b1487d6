"""Selection of the attention kernels."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specray.errors import ConfigError
from specray.ops.attention import AttentionBackend, AttentionBatch
from specray.ops.attention_torch import TorchAttention
from specray.ops.device_ops import ops_on
from specray.ops.gpu import check_triton
from specray.ops.layer_attention import LayerAttention

if TYPE_CHECKING:  # triton is installed on machines with GPUs only
    from specray.ops.gpu.attention import TritonAttention
    from specray.ops.gpu.routed_attention import LayerRoute

_HALF_TYPES = (torch.bfloat16, torch.float16)


def make_backend(
    name: str,
    pool: Tensor,
    num_heads: int,
    page_size: int | None = None,
    tree_mode: str = "decode",
    layers: Sequence[LayerAttention] | None = None,
) -> AttentionBackend:
    """Kernels for `num_heads` query heads over `pool`; `name` is EngineConfig.attention_backend.

    `page_size`: a request's KV slots lie in whole blocks of this size; None: anywhere. `tree_mode` is
    SpeculativeConfig.attention_mode; a drafter's trees, which grow by one level at a time, are decoded.
    `layers` says how each layer attends; None: all in the default way. ValueError if they do not fit the pool.
    """
    ops = ops_on(pool.device)
    assert pool.dtype is not torch.int8 or (name == "auto" and ops.reads_int8_kv), name  # see check_kv_dtype
    if name == "flashinfer":
        return _flashinfer(pool, num_heads, tree_mode, layers)
    if name == "fa":
        return _flash_attention(pool, num_heads, page_size, tree_mode, layers)
    if name == "triton":
        check_triton(pool.device)
        from specray.ops.gpu.attention import TritonAttention

        return TritonAttention(pool, num_heads, layers)
    return (ops.attention if name == "auto" else TorchAttention)(pool, num_heads, layers)


def check_kv_dtype(kv_cache_dtype: str, name: str, device: torch.device) -> None:
    """ConfigError unless the attention backend `name` reads a KV pool of EngineConfig.kv_cache_dtype on `device`."""
    if kv_cache_dtype == "int8" and (name != "auto" or not ops_on(device).reads_int8_kv):
        raise ConfigError(
            f"kv_cache_dtype=int8 needs the compiled CPU kernels, which attention_backend={name} on {device.type} does "
            "not use; set kv_cache_dtype: auto, or on a CPU attention_backend: auto"
        )
    if kv_cache_dtype.startswith("fp8") and name in ("flashinfer", "fa"):
        raise ConfigError(
            f"attention_backend={name} does not read kv_cache_dtype={kv_cache_dtype}; set kv_cache_dtype: auto, or "
            "attention_backend: auto or triton"
        )


def _flashinfer(
    pool: Tensor, num_heads: int, tree_mode: str, layers: Sequence[LayerAttention] | None
) -> AttentionBackend:
    library = _library("flashinfer", "flashinfer", "flashinfer-python", pool)
    from specray.ops.gpu.attention import TritonAttention
    from specray.ops.gpu.flashinfer_attention import FEW_QUERIES, HEAD_DIMS, FlashInferReader
    from specray.ops.gpu.routed_attention import LayerRoute, Read, RoutedAttention

    triton = TritonAttention(pool, num_heads, layers)
    with_triton, routes = _only_triton(triton), dict[tuple[float | None, ...], LayerRoute]()

    def route(layer: LayerAttention) -> LayerRoute:
        if layer.head_dim not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise _unfit("flashinfer", f"has kernels for heads of {sizes}, and the model's are {layer.head_dim}")
        few, masked = (FlashInferReader(library, layer, triton.pools, masks_trees) for masks_trees in (False, True))
        many = FlashInferReader(library, layer, triton.pools, masks_trees=False, kernels="auto")

        def plan_causal(batch: AttentionBatch) -> Read:
            return (few if max(batch.query_lens) <= FEW_QUERIES else many).plan(batch)

        masks_trees = tree_mode != "decode" and layer.window is None
        trees = masked.plan if masks_trees else with_triton.trees
        return LayerRoute(plan_causal, trees, takes_chains=tree_mode == "prefill")

    for layer in triton.layers:
        if layer.kind not in routes and layer.sinks is None:
            routes[layer.kind] = route(layer)
    return RoutedAttention(
        triton, [with_triton if layer.sinks is not None else routes[layer.kind] for layer in triton.layers]
    )


def _flash_attention(
    pool: Tensor, num_heads: int, page_size: int | None, tree_mode: str, layers: Sequence[LayerAttention] | None
) -> AttentionBackend:
    library = _library("fa", "vllm.vllm_flash_attn", "vllm", pool)
    from specray.ops.gpu.attention import TritonAttention
    from specray.ops.gpu.flash_attention import LARGEST_HEAD_DIM, PAGE_MULTIPLE, FlashAttentionReader
    from specray.ops.gpu.routed_attention import LayerRoute, RoutedAttention

    triton = TritonAttention(pool, num_heads, layers)
    if page_size is None:
        return triton
    if page_size % PAGE_MULTIPLE:
        raise _unfit("fa", f"needs a page_size that is a multiple of {PAGE_MULTIPLE}, and it is {page_size}")
    for dim in (layer.head_dim for layer in triton.layers):
        if dim > LARGEST_HEAD_DIM or dim % 8:
            raise _unfit("fa", f"has kernels for heads of up to {LARGEST_HEAD_DIM}, and the model's are {dim}")
    with_triton = _only_triton(triton)
    causal = FlashAttentionReader(library, page_size, triton.layers, triton.pools).plan
    route = LayerRoute(causal, with_triton.trees, takes_chains=tree_mode == "prefill")
    return RoutedAttention(triton, [route if layer.sinks is None else with_triton for layer in triton.layers])


def _only_triton(triton: "TritonAttention") -> "LayerRoute":
    from specray.ops.gpu.routed_attention import LayerRoute, Read

    def plan(batch: AttentionBatch) -> Read:
        return triton.plan(batch).read

    return LayerRoute(plan, plan)


def _library(name: str, module: str, package: str, pool: Tensor) -> Any:
    """The module of another project's kernels. ConfigError if it is not installed or cannot compute on `pool`."""
    if pool.device.type != "cuda":
        raise _unfit(name, f"needs an NVIDIA GPU, and the device is {pool.device.type}")
    check_triton(pool.device, f"attention_backend={name}")  # for trees, and for writing the KV
    if pool.dtype not in _HALF_TYPES:
        raise _unfit(name, f"computes in bfloat16 and float16, and the dtype is {pool.dtype}")
    if find_spec(module.partition(".")[0]) is None:
        raise _unfit(name, f"needs the package {package} (pip install 'specray[{name}]'), which is not installed")
    try:
        return import_module(module)
    except ImportError as error:
        raise _unfit(name, f"needs the package {package}, which cannot be imported ({error})") from error


def _unfit(name: str, reason: str) -> ConfigError:
    return ConfigError(f"attention_backend={name} {reason}; set it to auto or triton, on a CPU to auto or torch")
