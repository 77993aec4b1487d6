"""How the token at a node of a draft tree is chosen: what verification is about. The walk is `verifier`'s.

The choice is one function, made once for a configuration; the children of the node are only something to choose among.
Here is the ordinary one, which does not even look at them; `rejection`, `thresholds` and `simulation` hold the others.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from specray.ops.sampling import SamplerRow, sample
from specray.spec_decode.draft_tree import DraftTree


class Choose(Protocol):
    """The token after a node, for nodes of several rows."""

    def __call__(
        self, logits: Tensor, rows: Sequence[SamplerRow], positions: Sequence[int],
        children: Sequence[Mapping[int, int]], draft_laws: Tensor | None, depth: int,
    ) -> Tensor:  # fmt: skip
        """int64 [rows] from float32 logits [rows, V], not changed, of which one is not finite only in broken rows.

        `positions` are those of the tokens to choose, `children[i]` the drafts below node i by token, best first.
        `draft_laws` [rows, up to V] are the laws they were drawn from, zeros for those that are not known to be draws.
        All nodes are `depth` levels below their roots.
        """


def coupled(
    logits: Tensor, rows: Sequence[SamplerRow], positions: Sequence[int],
    children: Sequence[Mapping[int, int]], draft_laws: Tensor | None, depth: int,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """The token that the target samples with the request's noise for this position, drafts or not."""
    return sample(logits, rows, positions)


def children_of(tree: DraftTree) -> list[dict[int, dict[int, int]]]:
    """Per row, for each parent, token -> node in the tree's order; of equal siblings the first counts."""
    tables: list[dict[int, dict[int, int]]] = []
    for row in tree.rows():
        table: dict[int, dict[int, int]] = {}
        for node in range(1, len(row.tokens)):
            table.setdefault(row.parents[node], {}).setdefault(row.tokens[node], node)
        tables.append(table)
    return tables
