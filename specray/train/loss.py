"""The loss of a head's logits against the target's soft labels, over the draft vocabulary.

It is their cross-entropy, their total variation distance, or a mixture of both.

Rows are processed in blocks, so that the logits of a whole batch never exist in memory. The forward pass replaces the
logits of a block by their gradient, and backward only scales it. On a CPU a kernel compares the rows; torch's
operations, which the tests compare it with, would take more time than the matrix products.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specray.ops.cpu.library import Kernels, kernels_on
from specray.ops.cpu.pointer import pointer
from specray.ops.cpu.structs import FLOAT_TYPES

# Rows that torch compares at once. With 8K draft tokens a chunk's logits fit in a CPU's cache; on a GPU launches cost
# more than memory.
_CHUNKS = {"cpu": 256, "cuda": 4096}
_BLOCK = 2048  # rows per product with the gradients, to limit passes over the weight's gradient


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's distributions over the draft vocabulary."""

    probs: Tensor  # [m, V]; rows sum to 1
    best: Tensor  # int64 [m]: the most likely of each row


def soft_labels(final: Tensor, target_rows: Tensor) -> Labels:
    """The target's probabilities over the draft vocabulary, from final [m, H] and target_rows [V, H]."""
    own = kernels_on(final.device)
    if own is None:
        probs = final.new_empty(len(final), len(target_rows))
        chunk = _CHUNKS[final.device.type]
        for begin in range(0, len(final), chunk):
            rows = slice(begin, begin + chunk)
            probs[rows] = (final[rows] @ target_rows.T).float().softmax(-1)
        return Labels(probs, probs.argmax(-1))
    probs, best = final @ target_rows.T, torch.empty(len(final), dtype=torch.int64)
    own.soft_labels(pointer(probs), FLOAT_TYPES[probs.dtype], *probs.shape, pointer(best), torch.get_num_threads())
    return Labels(probs, best)


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
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        losses = torch.empty(len(hidden), device=hidden.device)
        agrees = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        # Importance is applied to [n, H] instead of [n, V].
        scaled = hidden * importance[:, None].to(hidden.dtype)
        for begin in range(0, len(hidden), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            logits = hidden[block] @ weight.T
            _compare_(logits, labels, label_of[block], total_variation, losses[block], agrees[block])
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


def _compare_(
    logits: Tensor, labels: Labels, label_of: Tensor, total_variation: float, losses: Tensor, agrees: Tensor
) -> None:
    """Replace `logits` [n, V] by their loss's gradient. Writes each row's loss and whether its best token agrees."""
    own = kernels_on(logits.device)
    if own is not None:
        return _compare_with(own, logits, labels, label_of, total_variation, losses, agrees)
    chunk = _CHUNKS[logits.device.type]
    for begin in range(0, len(logits), chunk):
        rows = slice(begin, begin + chunk)
        wanted, best = labels.probs.index_select(0, label_of[rows]), labels.best[label_of[rows]]
        losses[rows], agrees[rows] = _compare_chunk_(logits[rows], wanted, best, total_variation)
    return None


def _compare_with(
    own: Kernels,
    logits: Tensor,
    labels: Labels,
    label_of: Tensor,
    total_variation: float,
    losses: Tensor,
    agrees: Tensor,
) -> None:
    own.soft_loss(
        pointer(logits),
        pointer(labels.probs),
        FLOAT_TYPES[logits.dtype],
        *logits.shape,
        pointer(label_of),
        pointer(labels.best),
        total_variation,
        pointer(losses),
        pointer(agrees),
        torch.get_num_threads(),
    )


def _compare_chunk_(logits: Tensor, wanted: Tensor, best: Tensor, total_variation: float) -> tuple[Tensor, Tensor]:
    """`_compare_` of a few rows in torch. A pass over the logits costs as much as their matrix products."""
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
