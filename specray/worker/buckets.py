"""The sizes that decode steps are padded to, of which each has its CUDA graphs."""

from collections.abc import Sequence
from typing import NamedTuple

_MANY_ROWS = 8  # larger numbers of rows are multiples of it
# With so many rows or more each node costs the device time, so there are buckets for chains of 2 as well.
_SHALLOW_ROWS, _SHALLOW_NODES = 17, 3
MAX_TOKENS = 1024  # of a bucket; with a vocabulary of 128,000 its logits take 0.25 GB in bfloat16


class Bucket(NamedTuple):
    """Sizes of a padded step."""

    rows: int
    nodes: int  # nodes of each tree, the root included

    @property
    def num_tokens(self) -> int:
        return self.rows * self.nodes


def buckets(max_rows: int, max_nodes: int) -> list[Bucket]:
    """All buckets, the largest first: then later graphs find enough memory in the pool."""
    every = {Bucket(rows, nodes) for rows in row_buckets(max_rows) for nodes in node_buckets(max_nodes)}
    if max_nodes > _SHALLOW_NODES:
        every |= {Bucket(rows, _SHALLOW_NODES) for rows in row_buckets(max_rows) if rows >= _SHALLOW_ROWS}
    fitting = [bucket for bucket in every if bucket.num_tokens <= MAX_TOKENS]
    return sorted(fitting, key=lambda bucket: (bucket.num_tokens, bucket.rows), reverse=True)


def draft_buckets(max_rows: int, max_nodes: int) -> list[Bucket]:
    """Those of a drafter with graphs of its own, which has nothing to do for trees of one node."""
    return [bucket for bucket in buckets(max_rows, max_nodes) if bucket.nodes > 1]


def smallest_bucket(among: Sequence[Bucket], rows: int, nodes: int, drafted: int) -> Bucket | None:
    """The smallest one for `rows` trees of up to `nodes` nodes; None: there is none.

    The trees that are drafted next have `drafted` nodes, or fewer if no bucket for so many rows has as many.
    """
    fitting = [bucket for bucket in among if bucket.rows >= rows and bucket.nodes >= nodes]
    fitting = [bucket for bucket in fitting if bucket.nodes >= drafted] or fitting
    return min(fitting, key=lambda bucket: (bucket.num_tokens, bucket.rows), default=None)


def row_buckets(most: int) -> list[int]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, multiples of 8, and `most`."""
    few = [size for size in (1, 2, 4) if size < most]
    return [*few, *range(_MANY_ROWS, most, _MANY_ROWS), most]


def node_buckets(most: int) -> list[int]:
    """Numbers of nodes of a tree: powers of 4, and `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]
