"""torch's operations, on any device: the executable specification of the other devices' (`device_ops`)."""

import math
from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from specray.ops import states_torch
from specray.ops.attention import AttentionBackend, move_kv
from specray.ops.attention_torch import TorchAttention
from specray.ops.filters import padded_scores, scores
from specray.ops.layer_attention import LayerAttention
from specray.ops.noise import gumbel, noise_keys
from specray.ops.quantised_weight import Weight
from specray.ops.sampling_state import GREEDY_BELOW, SamplingBatch
from specray.ops.states import AnyStateRows
from specray.ops.states_torch import Convolution, DeltaNet
from specray.ops.step_tensors import Choices, nodes_of, num_kept
from specray.ops.torch_matrix import Linear, TorchMatrix

_BLOCK = 512  # logits per block of `argmax`; a vocabulary without a usable divisor takes torch's
_MIN_BLOCK = 32
_MASK_BITS = 32  # of a word
# Rows that `soft_labels` and `compare_` take at once. With 8K draft tokens a chunk's logits fit in a CPU's cache; on a
# GPU launches cost more than memory.
_CHUNKS = {"cpu": 256, "cuda": 4096}


class TorchOps:
    """The operations of a device. Subclasses replace those for which they have kernels."""

    name = "torch"
    #: Why torch.compile would change nothing; None: it helps.
    obstacle_to_compilation: str | None = None
    #: Whether a sequence of these operations may be recorded as a CUDA graph: torch's attention would read as many keys
    #: as the context has.
    records_graphs = False
    reads_int8_kv = False  # whether `attention` takes a pool in int8
    sums_in_fixed_order = False  # whether `linear` computes a row alike in any batch without being asked to
    has_norm_kernel = False  # whether `rms_norm` is faster than the norms of other libraries' modules on a CPU

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A copied layer has the same operations: those of the CPU kernels hold a library."""
        return self

    # Layers

    def linear(self, weight: Weight, bias: Tensor | None = None, in_fixed_order: bool = False) -> Linear:  # noqa: ARG002
        """Function of x [T, in] -> x W^T + b [T, out], of x's type, which keeps `weight` [out, in] in its own layout.

        `in_fixed_order`: a row's sums are in one order, whatever the other rows are, where a kernel can do that.
        """
        return TorchMatrix(weight, bias)

    def batched(self, weights: Tensor) -> Linear:
        """Function of x [n, T, in] -> [n, T, out], each matrix of it times one of `weights` [n, out, in]."""
        columns = weights.transpose(1, 2).contiguous()
        return lambda x: x.bmm(columns)

    def gated(self, weight: Weight, in_fixed_order: bool = False) -> Linear:
        """Function of x [T, in] -> silu(x G^T) * (x U^T) [T, out], where `weight` [2 * out, in] is G above U."""
        return self.gate(self.linear(weight, None, in_fixed_order))

    def gate(self, linear: Linear) -> Linear:
        """silu(first half) * second half of the outputs of `linear`."""

        def gated(x: Tensor) -> Tensor:
            first, second = linear(x).chunk(2, -1)
            return F.silu(first) * second

        return gated

    def sigmoid(self, x: Tensor) -> Tensor:
        """torch.sigmoid; on a CPU with our kernels a number's bits do not depend on its place in x."""
        return torch.sigmoid(x)

    def pack_norm(self, weight: Tensor) -> Tensor:
        """A norm's weights as `rms_norm` reads them."""
        return weight

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size] * weight / sqrt(mean(x^2) + eps), of x's type; `weight` [size] is packed."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, the sum); the sum is written to x."""
        summed = x.add_(residual)
        return self.rms_norm(summed, weight, eps), summed

    def norm_parts(self, x: Tensor, weights: Tensor, eps: float) -> Tensor:
        """The norms of n parts of x [..., n * size], each with its row of packed `weights` [n, size]."""
        parts = zip(x.chunk(len(weights), -1), weights, strict=True)
        return torch.cat([self.rms_norm(part, weight, eps) for part, weight in parts], -1)

    def join_normed(
        self,
        token_ids: Tensor,
        embedding: Tensor,
        states: Tensor,
        norms: tuple[Tensor, Tensor],
        eps: float,
        keeps: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """([norms[0] of the tokens' embeddings, norms[1] of states] [T, 2 * size], its second half again if `keeps`).

        token_ids are int64 [T], states [T, size], of the embedding's type; `norms` are packed.
        """
        normed = self.rms_norm(states, norms[1], eps)
        joined = torch.cat((self.rms_norm(F.embedding(token_ids, embedding), norms[0], eps), normed), -1)
        return joined, normed if keeps else None

    def angles_at(self, tables: tuple[Tensor, Tensor], positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each [T, 1, dim] of `dtype`, from float32 tables [any, dim] at positions int64 [T]."""
        cos, sin = (table.index_select(0, positions).to(dtype)[:, None] for table in tables)
        return cos, sin

    def quantise_rows(self, x: Tensor, width: int, smallest: float) -> tuple[Tensor, Tensor]:
        """(x [T, size] / scale as float8_e4m3fn [T, width], with zeros behind it, the scales float32 [T, 1])."""
        largest = torch.finfo(torch.float8_e4m3fn).max
        scales = x.float().abs().amax(-1, keepdim=True).clamp_(min=smallest) / largest
        quantised = (x.float() / scales).clamp_(-largest, largest).to(torch.float8_e4m3fn)
        padded = F.pad(quantised.view(torch.uint8), (0, width - x.shape[1]))
        return padded.view(torch.float8_e4m3fn), scales

    def groups_experts(self, is_quantised: bool) -> bool:  # noqa: ARG002
        """Whether the experts of a mixture run in one grouped product by default, and not one after the other."""
        return False

    def has_bfloat16(self, device: torch.device) -> bool:
        """Whether `device` computes in bfloat16 as fast as in float32."""
        if device.type == "cuda":
            return bool(torch.cuda.is_bf16_supported())
        is_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
        return bool(is_avx512 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    # Attention and KV

    def attention(
        self, pool: Tensor, num_heads: int, layers: Sequence[LayerAttention] | None = None
    ) -> AttentionBackend:
        """Attention of `num_heads` query heads over `pool`; see `make_backend`."""
        return TorchAttention(pool, num_heads, layers)

    def commit_paths(self, pool: Tensor, kv_slots: Tensor, outcome: Tensor) -> None:
        """Move the KV of accepted paths behind their prefixes in every layer; see `KVCache.commit`."""
        num_tokens, nodes = num_kept(outcome), nodes_of(outcome)
        depths = torch.arange(1, nodes.shape[1], device=nodes.device)
        is_moved = (depths < num_tokens[:, None]) & (nodes[:, 1:] != depths)
        # Where nothing moves, KV slot 0 (zeros) is copied to itself, so that no shape depends on the outcome.
        source = torch.where(is_moved, kv_slots.gather(1, nodes[:, 1:]), 0)
        target = torch.where(is_moved, kv_slots[:, 1 : nodes.shape[1]], 0)
        move_kv(pool, source.flatten(), target.flatten())

    # States; see `specray.ops.states`. Pools get the states behind the known rows.

    def convolve(self, conv: Convolution, x: Tensor, pool: Tensor, rows: AnyStateRows) -> Tensor:
        """The convolution of x [T, channels] along each row's path; `pool` [slots, width - 1, channels] of x's type."""
        return states_torch.convolve(conv, x, pool, rows)

    def gated_delta(
        self, net: DeltaNet, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, pool: Tensor, rows: AnyStateRows
    ) -> Tensor:
        """The delta rule along each row's path, of z's shape and type [T, num_v_heads * v_dim].

        `qkv` are queries, keys and values [T, channels], `a` and `b` are [T, num_v_heads], all of z's type; `pool` is
        float32 [slots, num_v_heads, k_dim, v_dim].
        """
        return states_torch.gated_delta(net, qkv, a, b, z, pool, rows)

    # Tokens. Logits are float32 [n, V].

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [n]: the first index of each row's maximum, or of its first NaN."""
        num_rows, vocab_size = logits.shape
        block = math.gcd(vocab_size, _BLOCK)
        if logits.device.type != "cpu" or block < _MIN_BLOCK:
            return logits.argmax(-1)
        # In two levels, because torch's argmax does not vectorise on a CPU.
        blocks = logits.reshape(num_rows, vocab_size // block, block)
        best = blocks.amax(-1).argmax(-1)
        inside = blocks[torch.arange(num_rows), best].argmax(-1)
        return best * block + inside

    def sample(self, logits: Tensor, batch: SamplingBatch, keys: Tensor, sampled: list[int]) -> Tensor:
        """The next token of each row, int64 [n], from its logits after penalties and masks.

        `keys` [n, 2] are the rows' `noise_keys`. The rows `sampled` are not greedy.
        """
        if not sampled:
            return self.argmax(logits)
        if len(sampled) == len(logits):
            return self.argmax(scores(logits, batch) + gumbel(keys, logits.shape[-1]))
        index = torch.tensor(sampled).to(logits.device)
        drawn = scores(logits[index], batch.select(sampled)) + gumbel(keys[index], logits.shape[-1])
        return self.argmax(logits).index_copy(0, index, self.argmax(drawn))

    def sample_padded(self, logits: Tensor, batch: SamplingBatch, keys: Tensor, is_filtered: bool = True) -> Tensor:
        """`sample` for rows whose options the host does not read; see `filters.padded_scores`."""
        drawn = self.argmax(padded_scores(logits, batch, is_filtered) + gumbel(keys, logits.shape[-1]))
        return torch.where(batch.temperature >= GREEDY_BELOW, drawn, self.argmax(logits))

    def top_probs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(probabilities, indexes) [..., count] of the highest of logits [..., V], best first."""
        best = logits.softmax(-1).topk(count)
        return best.values, best.indices

    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set the logits of tokens that are not allowed to minus infinity, in place; see TokenMask."""
        rows, bits = rows.to(logits.device), bits.to(logits.device)
        is_forbidden = ~allowed_by_bits(bits, logits.shape[1])
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(is_forbidden, -torch.inf))

    def with_noise(self, logits: Tensor, temperature: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
        """Logits [B, nodes, V] over temperature and with noise where requests are sampled, float32.

        `temperature` is float32 [B], `keys` int32 [B, 2]; `ids` int64 [V] are the columns' token ids, None: the same.
        """
        is_sampled = (temperature >= GREEDY_BELOW)[:, None, None]
        scaled = logits / temperature[:, None, None].where(is_sampled, 1.0)
        return torch.where(is_sampled, scaled + gumbel(keys, logits.shape[-1], ids)[:, None], logits)

    def level_keys(self, seeds: Tensor, ends: Tensor, num_levels: int) -> Tensor:
        """The `noise_keys` of the tokens behind the nodes of each level, int32 [levels, B, 2].

        `seeds` and `ends`, the positions of the roots, are int64 [B].
        """
        positions = ends + 1 + torch.arange(num_levels, device=ends.device)[:, None]
        return noise_keys(seeds, positions)

    def choose_drafts(
        self, logits: Tensor, temperature: Tensor | None, keys: Tensor | None, ids: Tensor | None
    ) -> Choices:
        """The most likely token of each row, with noise unless keys are None.

        `temperature`, `keys` and `ids` are those of `with_noise`.
        """
        if keys is not None:
            assert temperature is not None
            logits = self.with_noise(logits[:, None], temperature, keys, ids)[:, 0]
        logit, column = logits.max(-1)
        return Choices(column if ids is None else ids[column], logit.isfinite().to(torch.int8), ordered(logit.float()))

    # Training

    def soft_labels(self, final: Tensor, target_rows: Tensor) -> tuple[Tensor, Tensor]:
        """(probabilities [m, V], the most likely of each row int64 [m]) of logits final [m, H] @ target_rows [V, H]."""
        probs = final.new_empty(len(final), len(target_rows))
        chunk = _CHUNKS[final.device.type]
        for begin in range(0, len(final), chunk):
            rows = slice(begin, begin + chunk)
            probs[rows] = (final[rows] @ target_rows.T).float().softmax(-1)
        return probs, probs.argmax(-1)

    def compare_(
        self,
        logits: Tensor,
        labels: tuple[Tensor, Tensor],
        label_of: Tensor,
        total_variation: float,
        losses: Tensor,
        agrees: Tensor,
    ) -> None:
        """Replace `logits` [n, V] by their loss's gradient. Writes each row's loss and whether its best token agrees.

        `labels` are those of `soft_labels`, row `label_of[r]` for row r. See `specray.train.loss`.
        """
        chunk = _CHUNKS[logits.device.type]
        for begin in range(0, len(logits), chunk):
            rows = slice(begin, begin + chunk)
            wanted, best = labels[0].index_select(0, label_of[rows]), labels[1][label_of[rows]]
            losses[rows], agrees[rows] = _compare_chunk_(logits[rows], wanted, best, total_variation)

    # Threads

    def use_threads(self, count: int) -> None:
        """Compute on `count` threads of a CPU."""
        torch.set_num_threads(count)


def _compare_chunk_(logits: Tensor, wanted: Tensor, best: Tensor, total_variation: float) -> tuple[Tensor, Tensor]:
    """`compare_` of a few rows in torch. A pass over the logits costs as much as their matrix products."""
    drafted = logits.softmax(-1, dtype=torch.float32)
    highest = logits.amax(-1)
    normalizer = highest.float() - drafted.amax(-1).log()  # log(sum(exp(logits)))
    losses = normalizer - (wanted * logits).sum(-1, dtype=torch.float32)
    agrees = logits.gather(-1, best[:, None])[:, 0] >= highest
    if total_variation:
        lacking = torch.where(drafted < wanted, drafted, 0.0)  # those that a higher logit brings nearer
        lacking_mass = lacking.sum(-1)
        distance = torch.minimum(drafted, wanted).sum(-1, dtype=torch.float32).neg_().add_(1)
        losses = (1 - total_variation) * losses + total_variation * distance
        drafted.mul_((1 - total_variation + total_variation * lacking_mass)[:, None])
        drafted.sub_(lacking, alpha=total_variation)
    logits.copy_(drafted.sub_(wanted, alpha=1 - total_variation))
    return losses, agrees


def allowed_by_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """bool [n, vocab_size] of int32 bits [n, words]; see TokenMask."""
    is_allowed = (bits[:, :, None] >> torch.arange(_MASK_BITS, dtype=torch.int32, device=bits.device)) & 1
    return is_allowed.flatten(1)[:, :vocab_size] != 0


def ordered(values: Tensor) -> Tensor:
    """int32 in the order of float32 `values`; NaN is the largest, and both zeros are equal."""
    bits = (values + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.masked_fill(values.isnan(), 0x7FFFFFFF)
