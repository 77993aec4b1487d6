"""The columns of what a step committed of R requests, int64 [R, 2 + 2 * (D + 1)]; see StepOutput."""

from torch import Tensor


def num_kept(outcome: Tensor) -> Tensor:
    """int64 [R], nodes whose KV is kept."""
    return outcome[:, 0]


def num_emitted(outcome: Tensor) -> Tensor:
    """int64 [R], tokens."""
    return outcome[:, 1]


def tokens(outcome: Tensor) -> Tensor:
    """int64 [R, D + 1]; undefined past `num_emitted`."""
    return outcome[:, 2 : 1 + outcome.shape[1] // 2]


def nodes(outcome: Tensor) -> Tensor:
    """int64 [R, D + 1], the root first; undefined past `num_kept`."""
    return outcome[:, 1 + outcome.shape[1] // 2 :]
