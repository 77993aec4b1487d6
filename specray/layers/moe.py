"""Mixture of experts: a router chooses some experts for each token, and their outputs are added.

The order of a token's sum does not depend on the rest of the batch: by expert in `ExpertList`, the reference for all
devices, and by the router's preference in `specray.ops.gpu.experts`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from specray.layers.module import Layer
from specray.ops.device_ops import ops_on
from specray.ops.linear import is_row_wise, make_gated, make_linear
from specray.ops.quantised_weight import Weight

# float32 router logits [T, experts] -> (weights float32, experts int64), each [T, experts per token]
Route = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class SoftmaxRoute:
    """The most likely experts (Mixtral, Qwen3-MoE, DeepSeek-V2), optionally only from the best groups of experts."""

    num_chosen: int
    normalize: bool = False  # the weights of a token's experts sum to 1
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probs = logits.softmax(-1)
        best_of_group = probs.view(len(probs), self.num_groups, -1).amax(-1)
        allowed = in_best_groups(best_of_group, self.num_chosen_groups, logits.shape[-1])
        weights, experts = probs.masked_fill(~allowed, 0.0).topk(self.num_chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scale, experts


@dataclass(frozen=True, slots=True, eq=False)
class SigmoidRoute:
    """DeepSeek-V3's `noaux_tc`: a load-balancing bias affects the choice of experts, but not their weights."""

    bias: Tensor  # float32 [experts]
    num_chosen: int
    normalize: bool
    scale: float
    num_groups: int
    num_chosen_groups: int

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probs = ops_on(logits.device).sigmoid(logits)
        wanted = probs + self.bias
        best_two = wanted.view(len(wanted), self.num_groups, -1).topk(2).values.sum(-1)
        allowed = in_best_groups(best_two, self.num_chosen_groups, logits.shape[-1])
        experts = wanted.masked_fill(~allowed, float("-inf")).topk(self.num_chosen).indices
        weights = probs.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts


def in_best_groups(scores: Tensor, num_chosen: int, num_experts: int) -> Tensor:
    """bool [T, experts]: the experts in the `num_chosen` groups with the highest `scores` [T, groups]."""
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(num_chosen).indices, value=True)
    return chosen.repeat_interleave(num_experts // scores.shape[-1], -1)


class Expert(Layer):
    """A rank's part of down(silu(gate(x)) * up(x)); gate and up [ffn / ranks, hidden], down [hidden, ffn / ranks]."""

    def __init__(self, gate: Weight, up: Weight, down: Weight, quantization: str | None = None) -> None:
        super().__init__()
        self._gate_up = make_gated(gate, up, quantization)
        self._down = make_linear(down, quantization=quantization)

    @property
    def is_row_wise(self) -> bool:
        """See TargetModel."""
        return is_row_wise(self._gate_up) and is_row_wise(self._down)

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self._gate_up(x))


class Experts(Protocol):
    """This rank's part of all routed experts."""

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum over a token's experts, float32 [T, hidden], from x [T, hidden] and a Route's result."""


class ExpertList(Layer):
    """Experts one after the other, each for its tokens. Reads on the host which experts have tokens."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        super().__init__()
        self._experts = nn.ModuleList(experts)
        self.is_row_wise = all(expert.is_row_wise for expert in experts)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in sorted(set(chosen.flatten().tolist())):  # a host copy, which saves the experts without tokens
            tokens, places = (chosen == index).nonzero(as_tuple=True)
            parts = self._experts[index](x[tokens]).float() * weights[tokens, places, None]
            out.index_add_(0, tokens, parts)
        return out


EXPERTS_READ = (
    "its experts run one after the other, and the host reads which of them have tokens; set moe_runner_backend: "
    "triton, which multiplies in the model's dtype (quantization: null)"
)


def reason_without_graphs(model: object) -> str | None:
    """Why CUDA graphs cannot have this model; None if they can. A model's own `reason_without_graphs` comes first."""
    if reason := getattr(model, "reason_without_graphs", None):
        return str(reason)
    is_read = isinstance(model, nn.Module) and any(isinstance(part, ExpertList) for part in model.modules())
    return EXPERTS_READ if is_read else None


class MixtureOfExperts(Layer):
    """Routed experts and, in some models, a feed-forward shared by all tokens. Each rank has a part of every expert.

    `gate` is float32 [experts, hidden]: rounding in a smaller type would change which experts are chosen.
    """

    def __init__(
        self,
        gate: Tensor,
        route: Route,
        experts: Experts,
        shared: Layer | None = None,
    ) -> None:
        """`shared` returns this rank's part of its output, like the mixture."""
        super().__init__()
        self._gate = make_linear(gate)
        self._route = route
        self._experts = experts
        self._shared = shared

    @property
    def is_row_wise(self) -> bool:
        """See TargetModel."""
        return all(is_row_wise(part) for part in (self._gate, self._experts, self._shared) if part is not None)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> this rank's part of [T, hidden]"""
        weights, chosen = self._route(self._gate(x.float()))
        out = self._experts(x, weights, chosen).to(x.dtype)
        return out if self._shared is None else out + self._shared(x)
