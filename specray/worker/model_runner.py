"""The target's forward on one rank: the model, its KV pool and its attention kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.causal_lm import TargetModel
from specray.models.registry import context_length, load_config, load_model
from specray.ops.attention import AttentionBatch, FusedAttend
from specray.ops.backends import make_backend
from specray.spec_decode.drafter import TargetView
from specray.worker.input_batch import InputBatch
from specray.worker.kv_cache import KVCache
from specray.worker.kv_size import count_blocks
from specray.worker.memory_demand import demand_of
from specray.worker.remote_drafter.source import RingLimits


class ForwardOutput(NamedTuple):
    """What a forward pass over T tokens returns."""

    hidden: Tensor | None  # [T, hidden], after the final norm; None if all rows sample
    logits: Tensor | None  # float32 [M, V], of the nodes of the rows that sample; None if a graph verifies them
    aux_hidden_states: list[Tensor]  # each [T, any], to be concatenated
    roots: Tensor  # int64 [R], places of the rows' roots among the T tokens


class ModelRunner:
    """One rank of the target. `model` is one that is already loaded, to share its weights."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        group: RankGroup,
        device: torch.device,
        progress: bool = False,
        model: TargetModel | None = None,
        colocates: bool = False,
    ) -> None:
        """`colocates`: the drafter has a process of its own beside rank 0."""
        self.device = device
        self.model = model or load_model(folder, config, group, device, progress)
        model_config = load_config(folder)
        self._architecture = (model_config.architectures or [""])[0]
        self.context_length = context_length(model_config, config.context_length)
        shape, dtype = self.model.shape, self.model.embedding.weight.dtype
        demand = demand_of(config, model_config, shape, folder, dtype, device, group, colocates)
        self.num_blocks = group.smallest(count_blocks(config, demand, self.context_length, device))
        self.kv = KVCache(
            shape.num_layers, shape.num_local_kv_heads, shape.head_dim, self.num_blocks, config.page_size, dtype, device
        )
        self.attention = make_backend(
            config.attention_backend,
            self.kv.pool,
            shape.num_local_heads,
            config.page_size,
            config.speculative.attention_mode,
        )
        if config.deterministic and not self._has_fixed_sums:
            raise ConfigError(
                f"deterministic=true does not hold for {self._architecture} on {device.type} with attention_backend="
                f"{config.attention_backend}: it needs a dense model, and compiled CPU kernels or Triton; set "
                "deterministic: false"
            )

    def view(self, config: EngineConfig, folder: Path, eos_token_ids: list[int]) -> TargetView:
        """What a drafter on this rank can read and share."""
        return TargetView(
            self.model,
            self.model.shape,
            self.model.embedding.weight.dtype,
            folder,
            config.load_format,
            self._architecture,
            eos_token_ids,
            self.context_length,
            self.num_blocks * config.page_size,
            config.max_running_requests,
            config.attention_backend,
            self.device,
            config.quantization,
            config.moe_runner_backend,
        )

    def ring_limits(self, config: EngineConfig) -> RingLimits:
        """The size limits of the ring of hidden states for a drafter in another process."""
        shape, dtype = self.model.shape, self.model.embedding.weight.dtype
        sizes = (config.max_prefill_tokens, config.max_running_requests)
        return RingLimits(shape.num_layers, shape.hidden_size, *sizes, dtype)

    def is_batch_invariant(self, config: EngineConfig) -> bool:
        """Whether a token's logits have the same bits in any batch, tree or prompt chunk.

        In float32, torch's operations differ too, but by so little that tests have found no text that changed.
        """
        is_float32 = self.model.embedding.weight.dtype is torch.float32 and config.quantization is None
        return is_float32 or self._has_fixed_sums

    @property
    def has_fused_attention(self) -> bool:
        """Whether attention norms and rotates too (see FusedAttend); found out by planning a step of one token."""
        zeros = torch.zeros(1, dtype=torch.int64, device=self.device)
        return isinstance(self.attention.plan(AttentionBatch([1], [1], zeros[None], zeros, [(0, 0)])), FusedAttend)

    @property
    def _has_fixed_sums(self) -> bool:
        """Whether all sums run in an order that depends on positions alone."""
        return self.attention.is_batch_invariant and self.model.is_row_wise

    def forward(self, batch: InputBatch, aux_hidden_state_layers: Sequence[int]) -> ForwardOutput:
        attend = self.attention.plan(batch.attention)
        hidden, logits, aux_hidden_states = self.model.with_logits(
            batch.token_ids, batch.positions, attend, batch.node_places, aux_hidden_state_layers
        )
        return ForwardOutput(hidden, logits, aux_hidden_states, batch.roots)
