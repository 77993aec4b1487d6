"""The sizes that decode steps are padded to, of which each has its CUDA graphs."""

from typing import NamedTuple

_MANY_ROWS = 8  # larger numbers of rows are multiples of it
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
    every = [Bucket(rows, nodes) for rows in row_buckets(max_rows) for nodes in node_buckets(max_nodes)]
    fitting = [bucket for bucket in every if bucket.num_tokens <= MAX_TOKENS]
    return sorted(fitting, key=lambda bucket: bucket.num_tokens, reverse=True)


def row_buckets(most: int) -> list[int]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, multiples of 8, and `most`."""
    few = [size for size in (1, 2, 4) if size < most]
    return [*few, *range(_MANY_ROWS, most, _MANY_ROWS), most]


def draft_row_buckets(max_rows: int, nodes: int) -> list[int]:
    """Numbers of rows that the graphs of a drafter with trees of `nodes` nodes are captured for, if it has its own."""
    return [rows for rows in row_buckets(max_rows) if rows * nodes <= MAX_TOKENS]


def node_buckets(most: int) -> list[int]:
    """Numbers of nodes of a tree: powers of 4, and `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]
