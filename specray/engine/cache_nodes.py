"""The nodes of the prefix cache's trees, and the order in which those that nobody uses are evicted."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count


@dataclass(slots=True, eq=False)
class CacheNode:
    """One cached block. `num_users` counts the running requests that use it or a block below it."""

    block_id: int
    parent: "CacheNode | None"
    key: tuple[int, ...] = ()
    namespace: str = ""  # namespace of the prefixes below a root; a root holds no block
    children: dict[tuple[int, ...], "CacheNode"] = field(default_factory=dict)
    num_users: int = 0
    last_used: int = 0
    is_offered: bool = False  # whether it is in IdleLeaves, which has it at most once


class IdleLeaves:
    """Candidates for eviction: leaves that no running request uses."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, CacheNode]] = []  # (last_used when offered, tie, node)
        self._ties = count()

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: CacheNode) -> None:
        """Remember a node that may have become an idle leaf."""
        is_idle_leaf = node.num_users == 0 and not node.children and node.parent is not None
        if is_idle_leaf and not node.is_offered:
            node.is_offered = True
            heappush(self._heap, (node.last_used, next(self._ties), node))

    def take_oldest(self) -> CacheNode:
        """A heap entry may be outdated: a node used since it was offered is offered again with its new time."""
        while True:
            last_used, _, node = heappop(self._heap)
            node.is_offered = False
            if last_used == node.last_used and node.num_users == 0 and not node.children:
                return node
            self.offer(node)
