"""One rank of the target, loaded: the model, its KV pool and its attention kernels, and what a drafter can share."""

import logging
from pathlib import Path

import torch

from specray.config import EngineConfig, with_values
from specray.errors import ConfigError, first_of
from specray.layers.parallel import RankGroup
from specray.models.registry import context_length, load_config, load_model
from specray.models.target_model import TargetModel
from specray.models.weights import WeightReader
from specray.ops.attention import AttentionBatch, FusedAttend, is_float8
from specray.ops.backends import check_kv_dtype, make_backend
from specray.ops.device_ops import ops_on
from specray.spec_decode.drafter import TargetView
from specray.worker.kv_cache import KVCache
from specray.worker.memory_plan import count_blocks, count_stored_states, demand_of, device_memory, kv_dtype
from specray.worker.model_runner import ModelRunner
from specray.worker.remote_drafter.handshake import DraftPlacement
from specray.worker.remote_drafter.source import RingLimits
from specray.worker.state_pool import StatePool

_GIB = 2**30
logger = logging.getLogger(__name__)


class LoadedTarget:
    """The target of `config` on one rank. `model` is one that is already loaded, to share its weights."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        group: RankGroup,
        device: torch.device,
        progress: bool = False,
        model: TargetModel | None = None,
        placement: DraftPlacement = "inline",
        uses_cuda_ipc: bool = False,
    ) -> None:
        """`placement` is the drafter's; `uses_cuda_ipc`: see DraftEndpoint."""
        self._config, self._folder, self._device, self._group = config, folder, device, group
        check_kv_dtype(config.kv_cache_dtype, config.attention_backend, device)
        if is_float8(kv_dtype(config, torch.float32)):
            _check_kv_scales(config, folder)
        _, used_before = device_memory(device)
        self.model = model or load_model(folder, config, group, device, progress, screens_output=True)
        model_config = load_config(folder, config.model_impl)
        if config.kv_cache_dtype == "int8" and not self.model.can_round_kv:
            raise ConfigError(
                "kv_cache_dtype=int8 is not supported for multi-head latent attention, whose rows mix a latent and "
                "rotary positions; set kv_cache_dtype: auto"
            )
        self._architecture = (model_config.architectures or [""])[0]
        self.context_length = context_length(model_config, config.context_length)
        shape, dtype = self.model.shape, self.model.embedding.weight.dtype
        total, used = device_memory(device)
        logger.info(  # this line and the next are SGLang's
            "Load weight end. type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
            self._architecture,
            dtype,
            (total - used) / _GIB,
            (used - used_before) / _GIB,
        )
        demand = demand_of(config, model_config, shape, folder, dtype, device, group, placement, uses_cuda_ipc)
        num_stored = group.smallest(count_stored_states(config, shape, demand, device))
        self.num_stored_states = num_stored if shape.states else None  # see Capacity
        demand = demand._replace(states=demand.states + num_stored * shape.state_bytes)
        self.num_blocks = group.smallest(count_blocks(config, demand, self.context_length, device))
        sizes = (shape.num_kv_layers, shape.num_local_kv_heads, shape.head_dim, self.num_blocks, config.page_size)
        kv = KVCache(*sizes, kv_dtype(config, dtype), device)
        total, used = device_memory(device)
        tokens = (self.num_blocks - 1) * config.page_size
        logger.info("Memory pool end. #tokens: %d, avail mem=%.2f GB", tokens, (total - used) / _GIB)
        attention = make_backend(
            config.attention_backend,
            kv.pool,
            shape.num_local_heads,
            config.page_size,
            config.speculative.attention_mode,
            self.model.layer_attention,
        )
        num_rows = config.max_running_requests + num_stored
        states = StatePool(shape.states, num_rows, device) if shape.states else None
        self.runner = ModelRunner(self.model, kv, attention, states)
        if dtype is not torch.float32 and ops_on(device).sums_in_fixed_order and not self.model.is_row_wise:
            given = str(dtype).removeprefix("torch.") + " (auto)" * (config.dtype == "auto")
            raise ConfigError(
                f"dtype={given}: {self._architecture} has operations whose last bits depend on the batch, so one seed "
                "would not give one text; set dtype: float32 (--dtype float32), which takes twice the memory"
            )
        if config.deterministic and not self._has_fixed_sums:
            raise ConfigError(
                f"deterministic=true does not hold for {self._architecture} on {device.type} with attention_backend="
                f"{config.attention_backend}: it needs compiled CPU kernels, or Triton and a dense model; set "
                "deterministic: false"
            )

    def view(self, eos_token_ids: list[int], group: RankGroup) -> TargetView:
        """What a drafter on this rank can read and share; those of the ranks of `group` draft together."""
        config = self._config
        return TargetView(
            model=self.model,
            kv_pool=self.runner.kv.pool,
            shape=self.model.shape,
            dtype=self.model.embedding.weight.dtype,
            folder=self._folder,
            load_format=config.load_format,
            architecture=self._architecture,
            eos_token_ids=eos_token_ids,
            context_length=self.context_length,
            num_slots=self.num_blocks * config.page_size,
            max_rows=config.max_running_requests,
            attention_backend=config.attention_backend,
            device=self._device,
            quantization=config.quantization,
            moe_runner_backend=config.moe_runner_backend,
            group=group,
        )

    @property
    def has_one_text(self) -> bool:
        """See Capacity."""
        is_float32 = self.model.embedding.weight.dtype is torch.float32 and self._config.quantization is None
        return self._group.has_fixed_sums and (is_float32 or self._has_fixed_sums)

    @property
    def has_fused_attention(self) -> bool:
        """Whether attention norms and rotates too (see FusedAttend); found out by planning a step of one token."""
        zeros = torch.zeros(1, dtype=torch.int64, device=self._device)
        step = AttentionBatch([1], [1], zeros[None], zeros, [(0, 0)])
        return isinstance(self.runner.attention.plan(step), FusedAttend)

    @property
    def _has_fixed_sums(self) -> bool:
        """Whether all sums run in an order that depends on positions alone."""
        return self.runner.attention.is_batch_invariant and self.model.is_row_wise


def _check_kv_scales(config: EngineConfig, folder: Path) -> None:
    """ConfigError if the checkpoint wants its keys and values scaled before they are rounded to float8."""
    with WeightReader(folder, config.load_format) as reader:
        if scales := reader.kv_scales():
            raise ConfigError(
                f"kv_cache_dtype={config.kv_cache_dtype} rounds keys and values as they are, but {folder} has scales "
                f"for them ({first_of(scales)}); set kv_cache_dtype: auto"
            )


def ring_limits(config: EngineConfig, model: TargetModel) -> RingLimits:
    """The size limits of the ring of hidden states for a drafter in another process."""
    shape, dtype = model.shape, model.embedding.weight.dtype
    sizes = (config.max_prefill_tokens, config.max_running_requests)
    return RingLimits(shape.num_layers, shape.hidden_size, *sizes, dtype)


def with_device(config: EngineConfig) -> EngineConfig:
    """The configuration with `device: cuda` instead of `auto` if this process sees a GPU, and so with its defaults."""
    sees_gpu = config.device == "auto" and torch.cuda.is_available() and torch.cuda.device_count() > 0
    return with_values(config, device="cuda") if sees_gpu else config


def choose_device(config: EngineConfig, rank: int) -> torch.device:
    """`device: auto` is a GPU if this process sees one. Rank r takes the r-th GPU that it sees; Ray shows it one.

    That GPU becomes the process's current one, because kernels that are not torch's are launched there.
    ConfigError for `device: cuda` without a GPU.
    """
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if config.device == "cpu" or (config.device == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        raise ConfigError(
            "device=cuda, but torch finds no GPU here; check nvidia-smi and that torch was built for CUDA, or set "
            "device to auto or cpu"
        )
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
