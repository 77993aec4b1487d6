"""How the token at a node of a draft tree is chosen: what verification is about. The walk is `verifier`'s.

The choice is one function, made once for a configuration; the children of the node are only something to choose among.
Here is the ordinary one, which does not even look at them; `rejection`, `thresholds` and `simulation` hold the others.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from specray.config import SpeculativeConfig
from specray.ops.sampling import SamplerRow, sample
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.rejection import by_rejection
from specray.spec_decode.simulation import Simulated, rates_of
from specray.spec_decode.thresholds import Thresholds

logger = logging.getLogger(__name__)


class NodeSampler(Protocol):
    """The token after a node, for nodes of several rows."""

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[SamplerRow],
        positions: Sequence[int],
        children: Sequence[Mapping[int, int]],
        draft_probs: Tensor | None,
        depth: int,
    ) -> Tensor:
        """int64 [rows] from float32 logits [rows, V], not changed, of which one is not finite only in broken rows.

        `positions` are those of the tokens to choose, `children[i]` the drafts below node i by token, best first.
        `draft_probs` [rows, up to V] are the laws they were drawn from, zeros for those that are not known to be draws.
        All nodes are `depth` levels below their roots.
        """


def coupled(
    logits: Tensor,
    rows: Sequence[SamplerRow],
    positions: Sequence[int],
    children: Sequence[Mapping[int, int]],  # noqa: ARG001
    draft_probs: Tensor | None,  # noqa: ARG001
    depth: int,  # noqa: ARG001
) -> Tensor:
    """The token that the target samples with the request's noise for this position, drafts or not."""
    return sample(logits, rows, positions)


def make_choice(config: SpeculativeConfig) -> NodeSampler:
    """How tokens are chosen when drafts are verified."""
    if config.is_simulated:
        rates = config.simulate_accept_rates or rates_of(config.simulate_accept_length or 1.0)
        logger.warning("SIMULATED acceptance at rates %s by depth: the output is MEANINGLESS", rates)
        return Simulated(rates)
    if config.verification == "rejection":
        return by_rejection
    if not config.is_lossy:
        return coupled
    single, acc = config.accept_threshold_single, config.accept_threshold_acc
    logger.warning("accept_threshold_single=%s, accept_threshold_acc=%s: output is LOSSY where sampled", single, acc)
    return Thresholds(single, acc)


def children_of(tree: DraftTree) -> list[dict[int, dict[int, int]]]:
    """Per row, for each parent, token -> node in the tree's order; of equal siblings the first counts."""
    tables: list[dict[int, dict[int, int]]] = []
    for row in tree.rows():
        table: dict[int, dict[int, int]] = {}
        for node in range(1, len(row.tokens)):
            table.setdefault(row.parents[node], {}).setdefault(row.tokens[node], node)
        tables.append(table)
    return tables
