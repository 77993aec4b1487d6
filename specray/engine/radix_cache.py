"""Free KV blocks, and the prefix cache: a radix tree over full ones for each namespace, with LRU eviction of leaves.

A node's key is the token ids of its block, so there are no hash collisions. Where a drafter's KV of a token depends on
the next token, the key includes that token (SGLang's bigram keys), and a hit has the same draft KV. Each namespace (a
tenant's `cache_salt`) has its own root and shares nothing. Only KV of committed tokens is cached.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from specray.engine.cache_nodes import CacheNode, IdleLeaves


class BlockPool:
    """Allocates block ids 1 … num_blocks - 1, low ids first. Block 0 stays zero and is read as padding by attention."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, in ascending runs where possible, so that a request's KV tends to be contiguous."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def free(self, block_ids: list[int]) -> None:
        self._free.extend(reversed(block_ids))


class RadixCache:
    """Owns the blocks of its nodes and returns them to `pool`. A key has `block_size + lookahead` tokens."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        enabled: bool = True,
        lookahead: int = 0,
        forget: Callable[[CacheNode], object] = lambda _: None,
    ) -> None:
        """`forget` is called with each evicted node."""
        self.pool = pool
        self._forget = forget
        self.block_size = block_size
        self.enabled = enabled
        self.lookahead = lookahead  # tokens after a block on which its KV depends
        self.num_cached = 0  # blocks in the tree
        self.num_idle = 0  # of these, blocks no running request uses
        self._roots: dict[str, CacheNode] = {}
        self._clock = count(1)
        self._idle_leaves = IdleLeaves()

    def match(self, namespace: str, token_ids: Sequence[int]) -> list[CacheNode]:
        """The longest cached path of full blocks at the start of `token_ids`."""
        node = self._roots.get(namespace)
        path: list[CacheNode] = []
        for key in self._keys(token_ids):
            node = node.children.get(key) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def lock(self, path: list[CacheNode]) -> None:
        """Protect a path from eviction until `unlock`."""
        for node in path:
            self.num_idle -= node.num_users == 0
            node.num_users += 1

    def unlock(self, path: list[CacheNode]) -> None:
        now = next(self._clock)
        for node in reversed(path):
            node.num_users -= 1
            self.num_idle += node.num_users == 0
            node.last_used = now
            self._idle_leaves.offer(node)

    def insert(self, namespace: str, path: list[CacheNode], key: tuple[int, ...], block_id: int) -> CacheNode:
        """Lock and return the node of block `key` below `path`; a new one takes over `block_id`.

        If the returned node has another block, the same tokens were already cached and the caller keeps its own block.
        """
        assert len(key) == self.block_size + self.lookahead
        parent = path[-1] if path else self._root(namespace)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = CacheNode(block_id, parent, key)
            self.num_cached += 1
            self.num_idle += 1
        self.lock([node])
        return node

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Free blocks, evicting idle cached ones if needed; None, without evicting, if there are not enough."""
        if num_blocks > self.pool.num_free + self.num_idle:
            return None
        while self.pool.num_free < num_blocks:
            self._evict_one()
        return self.pool.allocate(num_blocks)

    def grow(self, block_ids: list[int], num_tokens: int) -> list[int] | None:
        """The blocks that `num_tokens` need beside `block_ids`, appended to these; None if there are not enough."""
        missing = -(-num_tokens // self.block_size) - len(block_ids)
        blocks = self.allocate(missing) if missing > 0 else []
        block_ids += blocks or []
        return blocks

    def evict(self, num_blocks: int) -> None:
        """Evict idle blocks, at most `num_blocks`, those first that were used least recently."""
        for _ in range(min(num_blocks, self.num_idle)):
            self._evict_one()

    def reset(self) -> None:
        """Match none of the cached blocks any more. Requests that use them keep them, and then they are evicted."""
        self._roots = {}

    def _keys(self, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if not self.enabled:
            return
        size = self.block_size + self.lookahead
        for start in range(0, len(token_ids) - size + 1, self.block_size):
            yield tuple(token_ids[start : start + size])

    def _evict_one(self) -> None:
        node = self._idle_leaves.take_oldest()
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self.num_cached -= 1
        self.num_idle -= 1
        self.pool.free([node.block_id])
        self._forget(node)
        self._idle_leaves.offer(parent)
        if not parent.children and self._roots.get(parent.namespace) is parent:
            del self._roots[parent.namespace]

    def _root(self, namespace: str) -> CacheNode:
        if namespace not in self._roots:
            self._roots[namespace] = CacheNode(block_id=0, parent=None, namespace=namespace)
        return self._roots[namespace]
