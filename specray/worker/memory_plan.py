"""How a device's memory is divided: what an engine will take beside the weights, and the KV pool that is left.

`mem_fraction_static` is the share of weights and KV, of the target and of its drafter. The rest is for activations,
CUDA graphs, the context of a drafter's own process. If that share is too small for them, the pool gets less. The sizes
of activations and graphs are estimates: they have not been compared with a GPU.
"""

import json
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from specray.config import EngineConfig, SpeculativeConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.files import resolve_draft
from specray.models.heads.mtp_layouts import find_layout
from specray.models.llama_shape import check_heads
from specray.models.registry import expands, is_native
from specray.models.target_model import ModelShape
from specray.models.weights import WeightReader
from specray.ops.attention import row_bytes
from specray.ops.peer_buffers import buffer_bytes
from specray.spec_decode import method_of, splits_draft_models
from specray.spec_decode.draft_setup import wanted_quantization
from specray.worker.buckets import MAX_TOKENS, buckets, draft_buckets
from specray.worker.memory import memory_fraction, weight_options
from specray.worker.remote_drafter.device_trees import tree_bytes
from specray.worker.remote_drafter.handshake import DraftPlacement
from specray.worker.remote_drafter.ring import ring_bytes

_LOGITS_COPIES = 6  # float32 tensors of all logits that sampling needs at once
_GRAPH_BYTES = 16 << 20  # that the driver keeps for a captured forward pass, or for drafting a tree
CONTEXT_BYTES = 600 << 20  # of CUDA and its libraries, in each process on the device
# NCCL's buffers in each process of several ranks: 4 MiB in each direction of up to 32 channels, and smaller ones.
NCCL_BYTES = 384 << 20
_SEGMENT = 20 << 20  # torch's allocator takes multiples of it for buffers of this size
logger = logging.getLogger(__name__)
_MANY_NODES = 8  # of a tree, where num_draft_tokens is automatic
_STATE_INPUTS = 4  # a layer with states holds at once so many times what its widest operation reads of a token
KV_TYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_STORED_STATES = 2  # in the prefix cache, of a running request
_MANY_LAYERS = 3  # whose hidden states an EAGLE-3 head reads


class Demand(NamedTuple):
    """Bytes on a rank's device beside the target's weights, which are loaded already."""

    token: int  # KV of a token, of target and drafter
    weights: int = 0  # bytes of the drafter's weights
    dynamic: int = 0  # bytes of activations, CUDA graphs and further processes
    states: int = 0  # bytes of what the target's layers keep of all requests instead of KV, stored ones included


class StepSize(NamedTuple):
    """Sizes that the activations of a step depend on."""

    num_tokens: int  # tokens of the largest step
    num_sampled: int  # nodes with logits
    width: int  # values of a token that are alive at once, inside a layer
    vocab_size: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.width * self.itemsize + self.num_sampled * self.vocab_size * 4 * _LOGITS_COPIES


def count_blocks(config: EngineConfig, demand: Demand, context_length: int, device: torch.device) -> int:
    """Blocks of this rank's pool, the null block included: `max_total_tokens`, or what memory leaves for it.

    Never more than all running requests could use. ConfigError if not even one block fits.
    """
    useful = config.max_running_requests * (context_length + config.page_size)
    if config.max_total_tokens is not None:
        return config.max_total_tokens // config.page_size + 1
    total, used = device_memory(device)
    fraction = memory_fraction(config, device.type == "cuda")
    available = pool_bytes(total, used, fraction, demand)
    tokens = min(available // demand.token, useful)
    if tokens < config.page_size:
        smaller = "; ".join(["raise it", *weight_options(config), "or set max_total_tokens"])
        raise ConfigError(
            f"mem_fraction_static={fraction} of {total / 2**30:.1f} GiB leaves {available / 2**30:.2f} GiB for the KV "
            f"pool after {used / 2**30:.1f} GiB already in use, {demand.weights / 2**30:.1f} GiB of draft weights, "
            f"{demand.states / 2**30:.1f} GiB of states and {demand.dynamic / 2**30:.1f} GiB for steps, less than one "
            f"block of {config.page_size} tokens; {smaller}"
        )
    return tokens // config.page_size + 1


def count_stored_states(config: EngineConfig, shape: ModelShape, demand: Demand, device: torch.device) -> int:
    """How many requests' states the prefix cache of this rank stores beside those of running requests."""
    if config.disable_radix_cache or not shape.states:
        return 0
    if config.max_mamba_cache_size is not None:
        return config.max_mamba_cache_size - config.max_running_requests
    if config.max_total_tokens is not None:
        pool = config.max_total_tokens * demand.token
    else:
        pool = pool_bytes(*device_memory(device), memory_fraction(config, device.type == "cuda"), demand)
    return min(_STORED_STATES * config.max_running_requests, max(0, pool) // 4 // shape.state_bytes)


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of the target's KV pool, where the model computes in `dtype`."""
    return KV_TYPES.get(config.kv_cache_dtype, dtype)


def pool_bytes(total: int, used: int, fraction: float, demand: Demand) -> int:
    """Bytes for the KV pool of a device of `total` bytes, of which `used` are taken; may be negative."""
    used += demand.weights + demand.states
    return min(int(total * fraction) - used, total - used - demand.dynamic)


def demand_of(
    config: EngineConfig,
    model_config: PretrainedConfig,
    shape: ModelShape,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup,
    placement: DraftPlacement,
    uses_cuda_ipc: bool = False,
) -> Demand:
    """The demand of one rank of the target in `folder`, with its part of the drafter where ranks draft together.

    Elsewhere rank 0 has the drafter on its device, unless it is separate.

    With `uses_cuda_ipc`, the ring of hidden states and the trees are in the device's memory.

    On a CPU, all processes share the memory, and activations are left to `mem_fraction_static`.
    """
    weights, token, dynamic = 0, 0, 0
    is_beside = placement != "separate" or device.type == "cpu"
    is_split = placement != "separate" and splits_draft_models(config.speculative)
    ranks = group.size if is_split else 1
    drafters = config.speculative.members.values() if is_beside and (is_split or group.leads) else ()
    for drafter in filter(_has_draft_model, drafters):
        if drafter.draft_model_path is None:  # layers of the target's own checkpoint, like its others
            ranks_of_layer = ranks if is_native(model_config) else 1  # transformers' modules are whole on every rank
            expanded = expands(model_config, config.quantization)
            count, own_weights = _mtp_layers(folder, config.load_format, shape, dtype, expanded)
            weights += own_weights // ranks_of_layer
            token += count * _layer_bytes(shape, dtype) * (group.size // ranks_of_layer)
            if count > 1:  # see StackDrafter, which keeps their outputs
                token += count * shape.hidden_size * dtype.itemsize
        else:
            own_weights, own_token = _draft(drafter, config.quantization, device, dtype, ranks)
            weights, token = weights + own_weights, token + own_token
    if device.type == "cuda":
        width = _layer_width(model_config, shape)
        nccl_bytes = NCCL_BYTES if group.size > 1 else 0
        dynamic = _steps(config, shape, width, dtype) + _draft_inputs(config, shape, dtype) + nccl_bytes
        if group.size > 1 and not config.disable_custom_all_reduce:
            dynamic += -(-one_shot_bytes(config, shape, dtype, group.size) // _SEGMENT) * _SEGMENT
        if is_split or (group.leads and placement != "separate"):
            dynamic += _drafts(config, shape, width, dtype, placement == "inline")
        if placement == "colocated" and (is_split or group.leads):
            dynamic += CONTEXT_BYTES + (nccl_bytes if is_split else 0)
            if uses_cuda_ipc and group.leads:
                tokens = config.max_prefill_tokens + config.max_running_requests * _most_nodes(config)
                dynamic += ring_bytes(tokens, _MANY_LAYERS * shape.hidden_size, dtype)
                dynamic += tree_bytes(config.max_running_requests, _most_nodes(config))
    kv = shape.num_kv_layers * _layer_bytes(shape, kv_dtype(config, dtype))
    return Demand(kv + token, weights, dynamic, config.max_running_requests * shape.state_bytes)


def one_shot_bytes(config: EngineConfig, shape: ModelShape, dtype: torch.dtype, ranks: int) -> int:
    """Bytes of the buffers for sums over ranks in decode steps; see `RankGroup.start_one_shot`."""
    num_tokens = min(config.max_running_requests * _most_nodes(config), MAX_TOKENS)
    return buffer_bytes(ranks, num_tokens, shape.hidden_size * dtype.itemsize)


def graph_bytes(num_buckets: int, largest: StepSize) -> int:
    """Bytes of CUDA graphs, which share the activations of the largest one."""
    return num_buckets * _GRAPH_BYTES + largest.num_bytes if num_buckets else 0


def device_memory(device: torch.device) -> tuple[int, int]:
    """(total, used) bytes of the device; on CPU the machine's or the container's limit, and this process's peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _layer_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """KV of a token in a layer of the target, or in a drafter's layer like it."""
    return 2 * shape.num_local_kv_heads * row_bytes(shape.head_dim, dtype)


def _has_draft_model(drafter: SpeculativeConfig) -> bool:
    return "draft_model_path" in method_of(drafter.algorithm or "").options


def _draft(
    speculative: SpeculativeConfig, of_target: str | None, device: torch.device, dtype: torch.dtype, ranks: int
) -> tuple[int, int]:
    """(bytes of the draft model's weights, bytes of its KV of a token), on one of `ranks`.

    `of_target` is the target's quantization.
    """
    try:
        folder = resolve_draft(speculative, progress=False)
        sizes = _sizes(folder)
        ranks = ranks if _can_share(sizes, ranks) else 1  # it is whole on each
        is_rounded = wanted_quantization(speculative, of_target, device) is not None
        with WeightReader(folder, speculative.draft_load_format) as reader:
            weights = reader.num_bytes(dtype.itemsize, lambda name: is_rounded)  # noqa: ARG005
        return weights // ranks, _token_bytes(sizes, dtype, ranks)
    # Its own process reports the error; the target serves without drafts.
    except (ConfigError, OSError, TypeError, ValueError) as error:
        logger.warning("no memory is planned for the draft model: %s", error)
        return 0, 0


def _mtp_layers(
    folder: Path, load_format: str, shape: ModelShape, dtype: torch.dtype, expanded: Callable[[str], bool]
) -> tuple[int, int]:
    """(number of MTP layers in a target's checkpoint, bytes of their weights).

    All layers count as if they had the same, apart from the MTP layers' own output matrices.
    """
    with WeightReader(folder, load_format) as reader:
        layout, numbers = find_layout(reader.names()) or (None, [])
        has_outputs = layout is not None and layout.output is not None
        output = shape.vocab_size * shape.hidden_size * dtype.itemsize * has_outputs
        others = max(0, reader.num_bytes(dtype.itemsize, expanded) - len(numbers) * output)
    return len(numbers), len(numbers) * (others // (shape.num_layers + len(numbers)) + output)


def _sizes(folder: Path) -> dict[str, int]:
    """The sizes that a draft model's config.json says."""
    draft_config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    flat = draft_config | draft_config.get("transformer_layer_config", {})  # speculators nest it
    # What the file says is not checked yet: anything may stand there.
    return {name: size for name, size in flat.items() if isinstance(size, int) and size > 0}


def _can_share(sizes: dict[str, int], ranks: int) -> bool:
    """Whether `ranks` can share a draft model's heads."""
    heads = sizes.get("num_attention_heads", ranks)
    try:
        check_heads(heads, sizes.get("num_key_value_heads", heads), ranks)
    except ConfigError:
        return False
    return True


def _token_bytes(sizes: dict[str, int], dtype: torch.dtype, ranks: int) -> int:
    """KV of a token on one of `ranks`, in a draft model of the usual shape; 0 if its config.json does not say."""
    heads, layers = sizes.get("num_attention_heads", 0), sizes.get("num_hidden_layers", 1)
    kv_heads = sizes.get("num_key_value_heads", heads)
    head_dim = sizes.get("head_dim") or (sizes.get("hidden_size", 0) // heads if heads else 0)
    return layers * 2 * -(-kv_heads // ranks) * head_dim * dtype.itemsize


def _steps(config: EngineConfig, shape: ModelShape, width: int, dtype: torch.dtype) -> int:
    """Bytes of the activations of the largest step, and of the CUDA graphs."""
    rows, nodes = config.max_running_requests, _most_nodes(config)
    step = StepSize(config.max_prefill_tokens + rows * nodes, rows * nodes, width, shape.vocab_size, dtype.itemsize)
    if config.disable_cuda_graph:
        return step.num_bytes
    captured = buckets(_graph_rows(config), nodes)
    most = max(bucket.tokens for bucket in captured)
    return step.num_bytes + graph_bytes(len(captured), step._replace(num_tokens=most, num_sampled=most))


def _draft_inputs(config: EngineConfig, shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of what all operations with states read of a step's trees, which is kept until these are verified."""
    num_nodes = config.max_running_requests * _most_nodes(config)
    return num_nodes * sum(state.num_inputs for state in shape.states) * dtype.itemsize


def _drafts(config: EngineConfig, shape: ModelShape, width: int, dtype: torch.dtype, is_inline: bool) -> int:
    """Bytes of the graphs and activations of drafters.

    Their layers are at most as wide as the target's. They share activations, and inline those of the target.
    """
    members = [drafter for drafter in config.speculative.members.values() if _has_draft_model(drafter)]
    if not members:
        return 0
    nodes, rows = _most_nodes(config), config.max_running_requests
    captured = [] if config.disable_cuda_graph else draft_buckets(_graph_rows(config), nodes)
    total = 2 * len(captured) * len(members) * _GRAPH_BYTES
    if is_inline:
        return total
    siblings = max(max(each.eagle_topk or _MANY_NODES, each.num_steps or _MANY_NODES) for each in members)
    tokens = config.max_prefill_tokens + rows * nodes
    step = StepSize(tokens, rows * siblings, width, shape.vocab_size, dtype.itemsize)
    most_tokens = max((bucket.tokens for bucket in captured), default=0)
    most_rows = max((bucket.rows for bucket in captured), default=0)
    return total + step.num_bytes + step._replace(num_tokens=most_tokens, num_sampled=most_rows * siblings).num_bytes


def _most_nodes(config: EngineConfig) -> int:
    members = config.speculative.members.values()
    return max((drafter.num_nodes or _MANY_NODES for drafter in members), default=1)


def _graph_rows(config: EngineConfig) -> int:
    return min(config.cuda_graph_max_bs or config.max_running_requests, config.max_running_requests)


def _layer_width(model_config: PretrainedConfig, shape: ModelShape) -> int:
    """Values of a token that are alive at once inside a layer, with its inputs for the layers after it."""
    heads = (shape.num_local_heads + 2 * shape.num_local_kv_heads) * shape.head_dim
    ffn_size = _ffn_size(model_config)
    if getattr(model_config, "use_double_wide_mlp", False):
        ffn_size *= 2
    per_layer = shape.num_layers * (getattr(model_config, "hidden_size_per_layer_input", 0) or 0)
    with_states = _STATE_INPUTS * max((state.num_inputs for state in shape.states), default=0)
    return 4 * shape.hidden_size + max(heads + 3 * ffn_size, with_states) + per_layer


def _ffn_size(model_config: PretrainedConfig) -> int:
    """The widest feed-forward of a layer, or expert, of which one runs after the other."""
    sizes: list[int] = []
    for name, value in vars(model_config).items():  # an architecture need not have `intermediate_size`
        if "intermediate_size" in name or name in {"ffn_dim", "n_inner"}:
            of_layers = value if isinstance(value, list) else [value]  # Gemma 3n: a list
            sizes += [size for size in of_layers if isinstance(size, int)]
    return max(sizes, default=4 * model_config.hidden_size)
