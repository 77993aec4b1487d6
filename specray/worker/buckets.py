"""The sizes that decode steps are padded to, of which each has its CUDA graphs.

The trees of a step lie one after the other, so what counts is the number of all their nodes: graphs of the target have
room for so many, in trees of any sizes. Graphs that draft have equal trees.
"""

from collections.abc import Sequence
from typing import NamedTuple

_MANY_ROWS = 8  # larger numbers of rows are multiples of it
_MANY_TOKENS = 64  # likewise
_ROWS_FACTOR = 4  # between numbers of rows of steps with drafts, which cost little where they are padding
# With so many rows or more each node costs the device time, so there are buckets for chains of 2 as well.
_SHALLOW_ROWS, _SHALLOW_NODES = 17, 3
MAX_TOKENS = 1024  # of a bucket; with a vocabulary of 128,000 its logits take 0.25 GB in bfloat16


class Bucket(NamedTuple):
    """Sizes of a padded step."""

    rows: int
    tokens: int  # nodes of all trees
    nodes: int  # most nodes of a tree, the root included


def buckets(max_rows: int, max_nodes: int) -> list[Bucket]:
    """All buckets of the target, the largest first: then later graphs find enough memory in the pool."""
    every = [Bucket(rows, rows, 1) for rows in row_buckets(max_rows) if rows <= MAX_TOKENS]
    fewer = 0
    for rows in _powers(_ROWS_FACTOR, max_rows) if max_nodes > 1 else ():
        sizes = token_buckets(min(rows * max_nodes, MAX_TOKENS))
        every += [Bucket(rows, tokens, max_nodes) for tokens in sizes if tokens > fewer + 1]
        fewer = rows
    return sorted(every, key=lambda bucket: (bucket.tokens, bucket.rows), reverse=True)


def draft_buckets(max_rows: int, max_nodes: int) -> list[Bucket]:
    """Those of a drafter, the largest first. It has nothing to do for trees of one node."""
    every = {(rows, nodes) for rows in row_buckets(max_rows) for nodes in node_buckets(max_nodes)}
    if max_nodes > _SHALLOW_NODES:
        every |= {(rows, _SHALLOW_NODES) for rows in row_buckets(max_rows) if rows >= _SHALLOW_ROWS}
    fitting = [Bucket(rows, rows * nodes, nodes) for rows, nodes in every if nodes > 1 and rows * nodes <= MAX_TOKENS]
    return sorted(fitting, key=lambda bucket: (bucket.tokens, bucket.rows), reverse=True)


def smallest_bucket(among: Sequence[Bucket], rows: int, nodes: int, tokens: int = 0, drafted: int = 0) -> Bucket | None:
    """That of the fewest rows, and then tokens, for `rows` trees of up to `nodes` nodes, `tokens` in all; or None.

    The trees that are drafted next have `drafted` nodes, or fewer if no bucket for so many rows has as many.
    """
    fitting = [bucket for bucket in among if bucket.rows >= rows and bucket.nodes >= nodes and bucket.tokens >= tokens]
    fitting = [bucket for bucket in fitting if bucket.nodes >= drafted] or fitting
    return min(fitting, default=None)


def row_buckets(most: int) -> list[int]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, multiples of 8, and `most`."""
    few = [size for size in (1, 2, 4) if size < most]
    return [*few, *range(_MANY_ROWS, most, _MANY_ROWS), most]


def token_buckets(most: int) -> list[int]:
    """Numbers of nodes of all trees: powers of 2 up to 64, multiples of 64, and `most`."""
    return sorted({*_powers(2, min(most, _MANY_TOKENS)), *range(_MANY_TOKENS, most, _MANY_TOKENS), most})


def node_buckets(most: int) -> list[int]:
    """Numbers of nodes of a tree: powers of 4, and `most`."""
    return _powers(4, most)


def _powers(base: int, most: int) -> list[int]:
    """From 1 on below `most`, and `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size *= base
    return [*sizes, most]
