"""The target's sampling noise at the nodes of growing trees, so that drafts of sampled requests are accepted more."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specray.ops.gpu import uses_triton
from specray.ops.noise import gumbel, noise_keys
from specray.ops.sampling_state import GREEDY_BELOW
from specray.spec_decode.request_table import RequestTable


@dataclass(frozen=True, eq=False)
class TreeNoise:
    """The target's noise for the next positions of sampled requests."""

    is_sampled: list[bool] | None  # None: only the device knows
    temperature: Tensor  # float32 [B]
    seeds: Tensor  # int64 [B]
    ends: Tensor  # int64 [B], positions of the roots
    num_levels: int

    @classmethod
    def of(
        cls, table: RequestTable, slots: Tensor, ends: Tensor, num_levels: int, is_sampled: list[bool] | None = None
    ) -> "TreeNoise":
        """The noise of the requests in table slots `slots` int64 [B], of which some are not greedy."""
        temperature, seeds = table.temperature.index_select(0, slots), table.seeds.index_select(0, slots)
        return cls(is_sampled, temperature, seeds, ends, num_levels)

    @cached_property
    def keys(self) -> Tensor:
        """int32 [B, levels, 2]; the CPU kernels make their own."""
        positions = self.ends[:, None] + 1 + torch.arange(self.num_levels, device=self.ends.device)
        return noise_keys(self.seeds[:, None], positions)

    @cached_property
    def keys_on_gpu(self) -> Tensor:
        """`keys` by the Triton kernels, int32 [levels, B, 2]."""
        from specray.ops.gpu.sampling import keys_of_nodes

        count, levels = len(self.seeds), self.num_levels
        chain = torch.arange(-1, levels - 1, device=self.ends.device).expand(count, levels)
        keys = keys_of_nodes(self.seeds, self.ends + 1, chain, levels)
        return keys.view(count, levels, 2).transpose(0, 1).contiguous()

    def added(self, logits: Tensor, level: int, ids: Tensor | None) -> Tensor:
        """Logits [B, nodes, V] under temperature and noise where the request is sampled."""
        if uses_triton(logits.device):
            from specray.ops.gpu.sampling import with_noise

            return with_noise(logits, self.temperature, self.keys_on_gpu[level], ids)
        if self.is_sampled is None:
            is_sampled = (self.temperature >= GREEDY_BELOW)[:, None, None]
            noise = gumbel(self.keys[:, level], logits.shape[-1], ids)
            scaled = logits / self.temperature[:, None, None].where(is_sampled, 1.0)
            return torch.where(is_sampled, scaled + noise[:, None], logits)
        if all(self.is_sampled):
            noise = gumbel(self.keys[:, level], logits.shape[-1], ids)
            return logits / self.temperature[:, None, None] + noise[:, None]
        rows = torch.tensor([row for row, is_so in enumerate(self.is_sampled) if is_so], device=logits.device)
        noise = gumbel(self.keys[rows, level], logits.shape[-1], ids)
        return logits.index_copy(0, rows, logits[rows] / self.temperature[rows, None, None] + noise[:, None])

    def probs(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """float32 [B, up to V]: the distribution of the most likely token under noise; zeros if greedy."""
        temperature = self.temperature[:, None]
        probs = (logits / temperature.clamp(min=GREEDY_BELOW)).softmax(-1) * (temperature >= GREEDY_BELOW)
        return probs if ids is None else probs.new_zeros(len(probs), int(ids.max()) + 1).index_copy_(1, ids, probs)
