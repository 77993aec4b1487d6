"""The target's sampling noise at the nodes of growing trees, so that drafts of sampled requests are accepted more."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from specray.ops.device_ops import ops_on
from specray.ops.sampling_state import GREEDY_BELOW
from specray.spec_decode.request_table import RequestTable


@dataclass(frozen=True, eq=False)
class TreeNoise:
    """The target's noise for the next positions of sampled requests."""

    temperature: Tensor  # float32 [B], below GREEDY_BELOW where a request is greedy
    seeds: Tensor  # int64 [B]
    ends: Tensor  # int64 [B], positions of the roots
    num_levels: int

    @classmethod
    def of(cls, table: RequestTable, slots: Tensor, ends: Tensor, num_levels: int) -> "TreeNoise":
        """The noise of the requests in table slots `slots` int64 [B], of which some are not greedy."""
        temperature, seeds = table.temperature.index_select(0, slots), table.seeds.index_select(0, slots)
        return cls(temperature, seeds, ends, num_levels)

    @cached_property
    def keys(self) -> Tensor:
        """int32 [levels, B, 2]; the CPU kernels that grow trees make their own."""
        return ops_on(self.seeds.device).level_keys(self.seeds, self.ends, self.num_levels)

    def added(self, logits: Tensor, level: int, ids: Tensor | None) -> Tensor:
        """Logits [B, nodes, V] under temperature and noise where the request is sampled."""
        return ops_on(logits.device).with_noise(logits, self.temperature, self.keys[level], ids)

    def probs(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """float32 [B, up to V]: the distribution of the most likely token under noise; zeros if greedy."""
        temperature = self.temperature[:, None]
        probs = (logits / temperature.clamp(min=GREEDY_BELOW)).softmax(-1) * (temperature >= GREEDY_BELOW)
        return probs if ids is None else probs.new_zeros(len(probs), int(ids.max()) + 1).index_copy_(1, ids, probs)
