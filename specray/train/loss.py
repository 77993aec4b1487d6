"""The loss of a head's logits against the target's soft labels, over the draft vocabulary.

It is their cross-entropy, their total variation distance, or a mixture of both.

Rows are processed in blocks, so that the logits of a whole batch never exist in memory. The forward pass replaces the
logits of a block by their gradient, and backward only scales it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specray.ops.device_ops import ops_on

_BLOCK = 2048  # rows per product with the gradients, to limit passes over the weight's gradient


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's distributions over the draft vocabulary."""

    probs: Tensor  # [m, V]; rows sum to 1
    best: Tensor  # int64 [m]: the most likely of each row


def soft_labels(final: Tensor, target_rows: Tensor) -> Labels:
    """The target's probabilities over the draft vocabulary, from final [m, H] and target_rows [V, H]."""
    return Labels(*ops_on(final.device).soft_labels(final, target_rows))


def soft_loss(
    hidden: Tensor, weight: Tensor, labels: Labels, label_of: Tensor, importance: Tensor, total_variation: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(sum of importance * loss over rows, bool [n]: whether a row's best token is its labels').

    A row's loss is (1 - total_variation) * cross-entropy + total_variation * total variation distance. The latter is
    the share of drafts that rejection sampling rejects (LK losses, arXiv 2602.23881).
    Row r has the logits hidden[r] @ weight.T and the labels of row label_of[r]. hidden [n, H], weight [V, H] and the
    labels have one type; label_of is int64 [n], importance float32 [n].
    """
    loss, agrees = _SoftLoss.apply(hidden, weight, labels, label_of, importance, total_variation)  # type: ignore[no-untyped-call]
    return loss, agrees


class _SoftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Labels,
        label_of: Tensor,
        importance: Tensor,
        total_variation: float,
    ) -> tuple[Tensor, Tensor]:
        ops, hidden_grad = ops_on(hidden.device), torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        losses = torch.empty(len(hidden), device=hidden.device)
        agrees = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        # Importance is applied to [n, H] instead of [n, V].
        scaled = hidden * importance[:, None].to(hidden.dtype)
        for begin in range(0, len(hidden), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            logits = hidden[block] @ weight.T
            results = losses[block], agrees[block]
            ops.compare_(logits, (labels.probs, labels.best), label_of[block], total_variation, *results)
            hidden_grad[block] = logits @ weight
            if weight_grad is not None:
                weight_grad += logits.T @ scaled[block]
        hidden_grad *= importance[:, None]
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(agrees)
        return losses @ importance, agrees

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * loss_grad, None if weight_grad is None else weight_grad * loss_grad, None, None, None, None
