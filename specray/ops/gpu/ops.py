"""The operations of an NVIDIA GPU by Triton's kernels. On a CPU, Triton's interpreter runs them (tests)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops.attention import AttentionBackend
from specray.ops.gpu import kv, layers, sampling, states
from specray.ops.gpu.attention import TritonAttention
from specray.ops.gpu.few_rows import GpuMatrix
from specray.ops.gpu.matrix import GatedUnits, TiledMatrix
from specray.ops.grouped_weight import GroupedWeight
from specray.ops.layer_attention import LayerAttention
from specray.ops.quantised_weight import QuantisedWeight, Weight
from specray.ops.sampling_state import SamplingBatch
from specray.ops.states import AnyStateRows
from specray.ops.states_torch import Convolution, DeltaNet
from specray.ops.step_tensors import Choices
from specray.ops.torch_matrix import Linear
from specray.ops.torch_ops import TorchOps


class TritonOps(TorchOps):
    """See TorchOps. While torch.compile runs, torch's: the compiler fuses them with what is around."""

    name = "triton"
    records_graphs = True

    def linear(self, weight: Weight, bias: Tensor | None = None, in_fixed_order: bool = False) -> Linear:
        if isinstance(weight, GroupedWeight):  # which runs on CPUs
            return super().linear(weight, bias)
        if in_fixed_order or isinstance(weight, QuantisedWeight):
            return TiledMatrix(weight, bias, in_fixed_order)
        return GpuMatrix(weight, bias)

    def gate(self, linear: Linear) -> Linear:
        return linear.gated if isinstance(linear, GpuMatrix) else GatedUnits(linear)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if torch.compiler.is_compiling():
            return super().rms_norm(x, weight, eps)
        return layers.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return super().add_rms_norm(x, residual, weight, eps)
        return layers.add_rms_norm(x, residual, weight, eps), x

    def join_normed(
        self,
        token_ids: Tensor,
        embedding: Tensor,
        states: Tensor,
        norms: tuple[Tensor, Tensor],
        eps: float,
        keeps: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return layers.join_normed(token_ids, embedding, states, norms, eps, keeps)

    def angles_at(self, tables: tuple[Tensor, Tensor], positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return layers.angles_at(tables, positions, dtype)

    def quantise_rows(self, x: Tensor, width: int, smallest: float) -> tuple[Tensor, Tensor]:
        return layers.quantise_rows(x, width, smallest)

    def groups_experts(self, is_quantised: bool) -> bool:
        return not is_quantised

    def attention(
        self, pool: Tensor, num_heads: int, layers: Sequence[LayerAttention] | None = None
    ) -> AttentionBackend:
        return TritonAttention(pool, num_heads, layers)

    def commit_paths(self, pool: Tensor, kv_slots: Tensor, outcome: Tensor) -> None:
        kv.commit_paths(pool, kv_slots, outcome)

    def convolve(self, conv: Convolution, x: Tensor, pool: Tensor, rows: AnyStateRows) -> Tensor:
        return states.convolve(conv, x, pool, rows)

    def gated_delta(
        self, net: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, pool: Tensor, rows: AnyStateRows
    ) -> Tensor:
        return states.gated_delta(net, qkv, a, b, z, pool, rows)

    def sample(self, logits: Tensor, batch: SamplingBatch, keys: Tensor, sampled: list[int]) -> Tensor:
        return sampling.sample(logits, batch if sampled else None, keys)

    def with_noise(self, logits: Tensor, temperature: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
        return sampling.with_noise(logits, temperature, keys, ids)

    def level_keys(self, seeds: Tensor, ends: Tensor, num_levels: int) -> Tensor:
        count = len(seeds)
        chain = torch.arange(-1, num_levels - 1, device=ends.device).expand(count, num_levels)
        sizes = torch.full_like(ends, num_levels)
        keys, _ = sampling.keys_of_nodes(seeds, ends + 1, sizes, chain, num_levels, count * num_levels)
        return keys.view(count, num_levels, 2).transpose(0, 1).contiguous()

    def choose_drafts(
        self, logits: Tensor, temperature: Tensor | None, keys: Tensor | None, ids: Tensor | None
    ) -> Choices:
        return sampling.choose_drafts(sampling.Rows(logits.contiguous()), temperature, keys, ids)
