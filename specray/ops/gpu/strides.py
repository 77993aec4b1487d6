"""Matrices in the layout that kernels read: contiguous rows, any row stride."""

from torch import Tensor


def by_rows(part: Tensor) -> Tensor:
    """[B, N] with contiguous rows."""
    return part if part.stride(1) == 1 or part.shape[1] == 1 else part.contiguous()


def alike(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Both with contiguous rows, as far apart in one as in the other."""
    if tokens.stride() == parents.stride() and tokens.stride(1) == 1:
        return tokens, parents
    return tokens.contiguous(), parents.contiguous()
