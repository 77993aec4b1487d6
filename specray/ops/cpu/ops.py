"""The operations of a CPU by our C++ kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specray.ops import row_wise
from specray.ops.attention import AttentionBackend
from specray.ops.cpu import sampling, states
from specray.ops.cpu.attention import PagedAttention, commit_paths
from specray.ops.cpu.library import Kernels
from specray.ops.cpu.matrix import GatedMatrix, PackedMatrices, PackedMatrix
from specray.ops.cpu.processor import use_kernel_threads
from specray.ops.cpu.structs import FLOAT_TYPES, pointer
from specray.ops.layer_attention import LayerAttention
from specray.ops.quantised_weight import Weight
from specray.ops.sampling_state import GREEDY_BELOW, SamplingBatch
from specray.ops.states import AnyStateRows, StateRows
from specray.ops.states_torch import Convolution, DeltaNet
from specray.ops.torch_matrix import Linear
from specray.ops.torch_ops import TorchOps


class CpuOps(TorchOps):
    """See TorchOps. Tensors whose type or layout no kernel takes are left to torch."""

    name = "cpu"
    reads_int8_kv = has_norm_kernel = sums_in_fixed_order = True
    obstacle_to_compilation = "the compiled CPU kernels run a step in one call"

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def linear(self, weight: Weight, bias: Tensor | None = None, in_fixed_order: bool = False) -> Linear:  # noqa: ARG002
        return PackedMatrix(self.kernels, weight, bias)

    def gated(self, weight: Weight, in_fixed_order: bool = False) -> Linear:  # noqa: ARG002
        outs = weight.shape[0] // 2
        halves = slice(0, outs), slice(outs, None)
        gate, up = (weight[half] if isinstance(weight, Tensor) else weight.rows(half) for half in halves)
        return GatedMatrix(self.kernels, gate, up)

    def batched(self, weights: Tensor) -> Linear:
        return PackedMatrices(self.kernels, weights)

    def sigmoid(self, x: Tensor) -> Tensor:
        return row_wise.sigmoid(x)

    def pack_norm(self, weight: Tensor) -> Tensor:
        return weight.float().contiguous()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in FLOAT_TYPES:
            return super().rms_norm(x, weight.to(x.dtype), eps)
        return self.norm_parts(x, weight, eps)

    def norm_parts(self, x: Tensor, weights: Tensor, eps: float) -> Tensor:
        size = weights.shape[-1]
        count = weights.numel() // size
        assert x.shape[-1] == weights.numel(), (x.shape, weights.shape)
        x = x.contiguous()
        y, rows = torch.empty_like(x), x.numel() // size
        self.kernels.norm(pointer(x), pointer(weights), count, rows, size, eps, pointer(y), FLOAT_TYPES[x.dtype])
        return y

    def has_bfloat16(self, device: torch.device) -> bool:  # noqa: ARG002
        return True

    def attention(
        self, pool: Tensor, num_heads: int, layers: Sequence[LayerAttention] | None = None
    ) -> AttentionBackend:
        return PagedAttention(self.kernels, pool, num_heads, layers)

    def commit_paths(self, pool: Tensor, kv_slots: Tensor, outcome: Tensor) -> None:
        commit_paths(self.kernels, pool, kv_slots, outcome)

    def convolve(self, conv: Convolution, x: Tensor, pool: Tensor, rows: AnyStateRows) -> Tensor:
        assert isinstance(rows, StateRows), "the CPU kernels have no graphs"
        return states.convolve(self.kernels, conv, x, pool, rows)

    def gated_delta(
        self, net: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, pool: Tensor, rows: AnyStateRows
    ) -> Tensor:
        assert isinstance(rows, StateRows), "the CPU kernels have no graphs"
        return states.gated_delta(self.kernels, net, qkv, a, b, z, pool, rows)

    def argmax(self, logits: Tensor) -> Tensor:
        return sampling.sample(self.kernels, logits)

    def sample(self, logits: Tensor, batch: SamplingBatch, keys: Tensor, sampled: list[int]) -> Tensor:
        return sampling.sample(self.kernels, logits, batch, keys) if sampled else self.argmax(logits)

    def top_probs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        logits, shape = logits.contiguous(), (*logits.shape[:-1], count)
        probs, indexes = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        size = logits.shape[-1]
        self.kernels.top_probs(pointer(logits), logits.numel() // size, size, count, pointer(probs), pointer(indexes))
        return probs, indexes

    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        if not logits.is_contiguous():
            return super().forbid(logits, rows, bits)
        return sampling.forbid(self.kernels, logits, rows, bits)

    def with_noise(self, logits: Tensor, temperature: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
        noisy, keys = logits.clone(memory_format=torch.contiguous_format), keys.contiguous()
        ids = torch.arange(logits.shape[-1]) if ids is None else ids.contiguous()
        for row in (temperature >= GREEDY_BELOW).nonzero().flatten().tolist():
            heat, key = float(temperature[row]), pointer(keys[row])
            for node in noisy[row]:
                self.kernels.add_noise(pointer(node), len(ids), pointer(ids), heat, key)
        return noisy

    def soft_labels(self, final: Tensor, target_rows: Tensor) -> tuple[Tensor, Tensor]:
        probs, best = final @ target_rows.T, torch.empty(len(final), dtype=torch.int64)
        sizes = FLOAT_TYPES[probs.dtype], *probs.shape
        self.kernels.soft_labels(pointer(probs), *sizes, pointer(best), torch.get_num_threads())
        return probs, best

    def compare_(
        self,
        logits: Tensor,
        labels: tuple[Tensor, Tensor],
        label_of: Tensor,
        total_variation: float,
        losses: Tensor,
        agrees: Tensor,
    ) -> None:
        probs, best = labels
        self.kernels.soft_loss(
            pointer(logits),
            pointer(probs),
            FLOAT_TYPES[logits.dtype],
            *logits.shape,
            pointer(label_of),
            pointer(best),
            total_variation,
            pointer(losses),
            pointer(agrees),
            torch.get_num_threads(),
        )

    def use_threads(self, count: int) -> None:
        use_kernel_threads(count)
