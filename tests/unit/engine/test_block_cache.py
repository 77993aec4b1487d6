"""Random operations on a block pool and a radix cache, compared with a simple reference model."""

from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from specray.engine.cache_nodes import CacheNode
from specray.engine.radix_cache import BlockPool, RadixCache

NUM_BLOCKS = 14
Key = tuple[int, ...]
Path = tuple[str, tuple[Key, ...]]  # namespace, and the keys of blocks from the root


@dataclass(eq=False)
class Holder:
    """A running request: a locked path of cached blocks, and its private blocks."""

    namespace: str
    tokens: list[int]
    path: list[CacheNode]
    blocks: list[int] = field(default_factory=list)

    def private(self) -> list[int]:
        shared = [node.block_id for node in self.path]
        return [b for i, b in enumerate(self.blocks) if i >= len(shared) or shared[i] != b]


@dataclass(eq=False)
class Expected:
    """A cached block of the reference model."""

    block_id: int
    users: int = 0
    last_used: int = 0


class BlocksMachine(RuleBasedStateMachine):
    holders = Bundle("holders")

    @initialize(size=st.sampled_from([1, 2, 4]), lookahead=st.integers(0, 1))
    def start(self, size: int, lookahead: int) -> None:
        self.size = size
        self.key_size = size + lookahead
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = RadixCache(self.pool, size, lookahead=lookahead)
        self.cached: dict[Path, Expected] = {}
        self.alive: list[Holder] = []
        self.clock = count(1)

    @rule(target=holders, namespace=st.sampled_from(["", "a"]), tokens=st.lists(st.integers(0, 1), max_size=12))
    def admit(self, namespace: str, tokens: list[int]) -> Holder:
        path = self.cache.match(namespace, tokens)
        holder = Holder(namespace, list(tokens), path, [node.block_id for node in path])
        assert holder.blocks == self.longest_match(namespace, tokens)
        self.cache.lock(path)
        for depth in range(len(path)):
            self.cached[self.key(holder, depth)].users += 1
        self.alive.append(holder)
        self.take(holder, -(-len(tokens) // self.size) - len(path))
        return holder

    @rule(holder=holders, num_tokens=st.integers(1, 6), token=st.integers(0, 1))
    def grow(self, holder: Holder, num_tokens: int, token: int) -> None:
        if holder in self.alive:
            holder.tokens += [token] * num_tokens
            self.take(holder, -(-len(holder.tokens) // self.size) - len(holder.blocks))

    @rule(holder=holders)
    def commit(self, holder: Holder) -> None:
        """Insert the holder's full blocks into the cache."""
        if holder not in self.alive:
            return
        full = min((len(holder.tokens) - self.key_size) // self.size + 1, len(holder.blocks))
        for depth in range(len(holder.path), full):
            key = tuple(holder.tokens[depth * self.size :][: self.key_size])
            node = self.cache.insert(holder.namespace, holder.path, key, holder.blocks[depth])
            holder.path.append(node)
            expected = self.cached.setdefault(self.key(holder, depth), Expected(holder.blocks[depth]))
            assert node.block_id == expected.block_id
            expected.users += 1

    @rule(holder=consumes(holders))
    def release(self, holder: Holder) -> None:
        if holder in self.alive:
            self.drop(holder)

    @rule()
    def clear(self) -> None:
        self.cache.evict(self.cache.num_idle)
        self.cached = {key: block for key, block in self.cached.items() if block.users}

    @invariant()
    def every_block_is_free_cached_or_held_once(self) -> None:
        held = [block for holder in self.alive for block in holder.private()]
        cached = [block.block_id for block in self.cached.values()]
        assert len(set(held + cached)) == len(held) + len(cached)
        assert self.pool.num_free + len(held) + len(cached) == self.pool.num_usable == NUM_BLOCKS - 1
        assert 0 not in held + cached

    @invariant()
    def the_cache_equals_the_reference_model(self) -> None:
        assert self.cache.num_cached == len(self.cached)
        assert self.cache.num_idle == sum(block.users == 0 for block in self.cached.values())
        for (namespace, keys), block in self.cached.items():
            path = self.cache.match(namespace, [t for key in keys[:-1] for t in key[: self.size]] + list(keys[-1]))
            assert path[len(keys) - 1].block_id == block.block_id

    def take(self, holder: Holder, num_blocks: int) -> None:
        """Take blocks, evicting in the reference model's order. A holder that gets none is dropped."""
        num_idle = sum(block.users == 0 for block in self.cached.values())
        fits = num_blocks <= self.pool.num_free + num_idle
        for _ in range(num_blocks - self.pool.num_free if fits else 0):
            del self.cached[self.oldest_leaf()]
        blocks = self.cache.allocate(max(0, num_blocks))
        assert (blocks is not None) == fits
        if blocks is None:
            self.drop(holder)
        else:
            holder.blocks += blocks

    def drop(self, holder: Holder) -> None:
        now = next(self.clock)
        for depth in range(len(holder.path)):
            block = self.cached[self.key(holder, depth)]
            block.users -= 1
            block.last_used = now
        self.alive.remove(holder)
        self.pool.free(holder.private())
        self.cache.unlock(holder.path)

    def oldest_leaf(self) -> Path:
        def is_leaf(path: Path) -> bool:
            return not any(space == path[0] and keys[:-1] == path[1] for space, keys in self.cached)

        leaves = [path for path, block in self.cached.items() if block.users == 0 and is_leaf(path)]
        return min(leaves, key=lambda path: self.cached[path].last_used)

    def longest_match(self, namespace: str, tokens: list[int]) -> list[int]:
        blocks: list[int] = []
        keys: tuple[Key, ...] = ()
        for start in range(0, len(tokens) - self.key_size + 1, self.size):
            keys = (*keys, tuple(tokens[start : start + self.key_size]))
            if (namespace, keys) not in self.cached:
                break
            blocks.append(self.cached[namespace, keys].block_id)
        return blocks

    def key(self, holder: Holder, depth: int) -> Path:
        starts = range(0, (depth + 1) * self.size, self.size)
        return holder.namespace, tuple(tuple(holder.tokens[s : s + self.key_size]) for s in starts)


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_repeated_use_of_a_prefix_does_not_grow_the_eviction_heap() -> None:
    """Without evictions, entries of the heap are never popped."""
    cache = RadixCache(BlockPool(10), 2)
    [block] = cache.allocate(1) or []
    path = [cache.insert("", [], (1, 2), block)]
    cache.unlock(path)
    for _ in range(10_000):
        cache.lock(path)
        cache.unlock(path)
    assert len(cache._idle_leaves) < 100


def test_a_disabled_cache_matches_nothing() -> None:
    cache = RadixCache(BlockPool(10), 2, enabled=False)
    assert cache.match("", [1, 2, 3, 4]) == []


def test_namespaces_share_no_blocks() -> None:
    cache = RadixCache(BlockPool(10), 2)
    [block] = cache.allocate(1) or []
    cache.insert("tenant", [], (1, 2), block)
    assert cache.match("tenant", [1, 2])
    assert cache.match("", [1, 2]) == cache.match("other", [1, 2]) == []


def test_blocks_are_allocated_in_ascending_order() -> None:
    assert BlockPool(10).allocate(4) == [1, 2, 3, 4]
