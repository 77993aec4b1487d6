"""The loss of a head's logits against the target's soft labels, over the draft vocabulary.

It is their cross-entropy, their total variation distance, or a mixture of both.

Rows are processed in chunks, so that the logits of a whole batch never exist in memory. The forward pass computes the
gradient of each chunk with its logits, and backward only scales it.
"""

from typing import Any

import torch
from torch import Tensor

_CHUNK = 256  # rows; with 8K draft tokens a chunk's logits fit in the CPU cache
_BLOCK = 2048  # rows per product with the errors, to limit passes over the weight's gradient


def soft_labels(final: Tensor, target_rows: Tensor) -> Tensor:
    """The target's probabilities over the draft vocabulary [n, V], from final [n, H] and target_rows [V, H]."""
    labels = final.new_empty(len(final), len(target_rows))
    for begin in range(0, len(final), _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        labels[rows] = (final[rows] @ target_rows.T).float().softmax(-1)
    return labels


def soft_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, label_of: Tensor, importance: Tensor, total_variation: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(sum of importance * loss over rows, bool [n]: whether a row's best token is its labels').

    A row's loss is (1 - total_variation) * cross-entropy + total_variation * total variation distance. The latter is
    the share of drafts that rejection sampling rejects (LK losses, arXiv 2602.23881).
    Row r has the logits hidden[r] @ weight.T and the labels labels[label_of[r]]. hidden [n, H] and weight [V, H] have
    one type; rows of labels [m, V] sum to 1; label_of is int64 [n], importance float32 [n].
    """
    loss, agrees = _SoftLoss.apply(hidden, weight, labels, label_of, importance, total_variation)  # type: ignore[no-untyped-call]
    return loss, agrees


class _SoftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        label_of: Tensor,
        importance: Tensor,
        total_variation: float,
    ) -> tuple[Tensor, Tensor]:
        """A pass over a chunk's logits costs as much as its matrix products, so there are as few as possible."""
        size = (min(_BLOCK, len(hidden)), len(weight))
        errors, hidden_grad = hidden.new_empty(size), torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        losses = torch.empty(len(hidden), device=hidden.device)
        agrees = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        best = labels.argmax(-1)
        # Importance is applied to [n, H] instead of [n, V].
        scaled = hidden * importance[:, None].to(hidden.dtype)
        for begin in range(0, len(hidden), _BLOCK):
            block = slice(begin, min(begin + _BLOCK, len(hidden)))
            for first in range(block.start, block.stop, _CHUNK):
                rows = slice(first, min(first + _CHUNK, block.stop))
                logits = hidden[rows] @ weight.T
                wanted = labels.index_select(0, label_of[rows])
                errors_of_rows = errors[rows.start - begin : rows.stop - begin]
                losses[rows], agrees[rows] = _compare(
                    logits, wanted, best[label_of[rows]], errors_of_rows, total_variation
                )
            part = errors[: block.stop - begin]
            hidden_grad[block] = part @ weight
            if weight_grad is not None:
                weight_grad += part.T @ scaled[block]
        hidden_grad *= importance[:, None]
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(agrees)
        return losses @ importance, agrees

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * loss_grad, None if weight_grad is None else weight_grad * loss_grad, None, None, None, None


def _compare(
    logits: Tensor, wanted: Tensor, best: Tensor, errors: Tensor, total_variation: float
) -> tuple[Tensor, Tensor]:
    """(loss, whether the best token is `best`) of each row. Writes the loss's gradient by logits to `errors`."""
    drafted = logits.softmax(-1, dtype=torch.float32)
    highest = logits.amax(-1)
    normalizer = highest.float() - drafted.amax(-1).log()  # log(sum(exp(logits)))
    losses = normalizer - (wanted * logits).sum(-1, dtype=torch.float32)
    if total_variation:
        lacking = torch.where(drafted < wanted, drafted, 0.0)  # those that a higher logit brings nearer
        lacking_mass = lacking.sum(-1)
        distance = torch.minimum(drafted, wanted).sum(-1, dtype=torch.float32).neg_().add_(1)
        losses = (1 - total_variation) * losses + total_variation * distance
        drafted.mul_((1 - total_variation + total_variation * lacking_mass)[:, None])
        drafted.sub_(lacking, alpha=total_variation)
    errors.copy_(drafted.sub_(wanted, alpha=1 - total_variation))
    return losses, logits.gather(-1, best[:, None])[:, 0] >= highest
