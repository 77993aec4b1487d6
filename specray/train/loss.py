"""The loss: cross-entropy of a head's logits against the target's soft labels, over the draft vocabulary.

Logits never exist as a whole: rows go through in chunks, and each chunk's gradient is made while its logits are at
hand, so that backward has nothing left to compute. Not here: which rows count (`unroll`).
"""

from typing import Any

import torch
from torch import Tensor

_CHUNK = 256  # rows; with 8 K draft tokens a chunk's logits stay in the cache


def soft_labels(final: Tensor, target_rows: Tensor) -> Tensor:
    """The target's law over the draft vocabulary, renormalised: [n, V] from final [n, H] and target_rows [V, H]."""
    labels = final.new_empty(len(final), len(target_rows))
    for begin in range(0, len(final), _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        labels[rows] = (final[rows] @ target_rows.T).float().softmax(-1)
    return labels


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, label_of: Tensor, importance: Tensor
) -> tuple[Tensor, Tensor]:
    """(sum over rows of importance * cross-entropy, bool [n]: the row's best token is that of its labels).

    Row r has the logits hidden[r] @ weight.T and the labels labels[label_of[r]]; hidden [n, H] and weight [V, H] in one
    type, labels [m, V] with rows that sum to 1, label_of int64 [n], importance float32 [n].
    """
    loss, agrees = _SoftCrossEntropy.apply(hidden, weight, labels, label_of, importance)  # type: ignore[no-untyped-call]
    return loss, agrees


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, label_of: Tensor, importance: Tensor
    ) -> tuple[Tensor, Tensor]:
        trains_weight = ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        total = hidden.new_zeros((), dtype=torch.float32)
        agrees = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for begin in range(0, len(hidden), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            logits = (hidden[rows] @ weight.T).float()
            wanted = labels[label_of[rows]].float()
            agrees[rows] = logits.argmax(-1) == wanted.argmax(-1)
            normaliser = logits.logsumexp(-1, keepdim=True)
            logits.sub_(normaliser)
            total -= torch.einsum("nv,nv,n->", wanted, logits, importance[rows])
            error = logits.exp_().sub_(wanted).mul_(importance[rows, None]).to(hidden.dtype)
            hidden_grad[rows] = error @ weight
            if weight_grad is not None:
                weight_grad += error.T @ hidden[rows]
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(agrees)
        return total, agrees

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * loss_grad, None if weight_grad is None else weight_grad * loss_grad, None, None, None
