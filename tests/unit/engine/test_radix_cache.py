"""Examples of eviction order, lookahead and many namespaces; test_block_cache has random operations."""

from specray.engine.cache_nodes import CacheNode
from specray.engine.radix_cache import BlockPool, RadixCache


def store(cache: RadixCache, namespace: str, token_ids: list[int]) -> list[CacheNode]:
    """Cache a text, as a finished request does."""
    size = cache.block_size
    path = cache.match(namespace, token_ids)
    cache.lock(path)
    blocks = cache.allocate((len(token_ids) - cache.lookahead) // size - len(path))
    assert blocks is not None
    for block_id in blocks:
        key = tuple(token_ids[len(path) * size :][: size + cache.lookahead])
        path.append(cache.insert(namespace, path, key, block_id))
    cache.unlock(path)
    return path


def evict(cache: RadixCache, num_blocks: int) -> None:
    """Evict `num_blocks` blocks."""
    blocks = cache.allocate(cache.pool.num_free + num_blocks)
    assert blocks is not None
    cache.pool.free(blocks)


def test_roots_without_blocks_are_removed() -> None:
    cache = RadixCache(BlockPool(9), 2)
    for salt in range(5000):
        cache.match(f"unknown {salt}", [1, 2])
        store(cache, f"tenant {salt}", [1, 2, 3, 4])
        assert len(cache._roots) <= 4
        assert len(cache._idle_leaves) <= 8
    assert set(cache._roots) == {f"tenant {salt}" for salt in range(4996, 5000)}
    cache.evict(cache.num_idle)
    assert not cache._roots
    assert cache.pool.num_free == cache.pool.num_usable


def test_a_part_of_the_idle_blocks_can_be_evicted() -> None:
    cache = RadixCache(BlockPool(9), 2)
    store(cache, "old", [1, 2, 3, 4])
    path = store(cache, "new", [1, 2, 3, 4])
    cache.evict(3)
    assert (cache.num_cached, cache.num_idle) == (1, 1)
    assert cache.match("old", [1, 2, 3, 4]) == []
    assert cache.match("new", [1, 2, 3, 4]) == path[:1]
    cache.evict(5)
    assert cache.num_idle == 0


def test_a_cleared_namespace_can_be_used_again() -> None:
    cache = RadixCache(BlockPool(9), 2)
    store(cache, "tenant", [1, 2])
    cache.evict(cache.num_idle)
    assert cache.match("tenant", [1, 2]) == []
    path = store(cache, "tenant", [1, 2])
    assert cache.match("tenant", [1, 2, 3]) == path


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    cache = RadixCache(BlockPool(9), 2)
    path = store(cache, "", [1, 2, 3, 4, 5, 6])
    for left in (2, 1, 0):
        evict(cache, 1)
        assert cache.match("", [1, 2, 3, 4, 5, 6]) == path[:left]


def test_the_least_recently_used_text_of_any_namespace_is_evicted_first() -> None:
    cache = RadixCache(BlockPool(9), 2)
    texts = [("a", [1, 2]), ("b", [3, 4]), ("a", [5, 6])]
    for namespace, token_ids in texts:
        store(cache, namespace, token_ids)
    store(cache, "a", [1, 2])  # used again
    evicted = []
    for _ in texts:
        evict(cache, 1)
        evicted += [text for text in texts if not cache.match(*text) and text not in evicted]
    assert evicted == [texts[1], texts[2], texts[0]]


def test_locked_blocks_are_not_evicted_and_a_refusal_evicts_nothing() -> None:
    cache = RadixCache(BlockPool(5), 2)
    in_use = store(cache, "", [1, 2, 3, 4])
    store(cache, "", [5, 6])
    cache.lock(in_use)
    assert cache.allocate(3) is None  # one free, one idle
    assert cache.match("", [5, 6])
    assert cache.allocate(2) is not None
    assert cache.match("", [1, 2, 3, 4]) == in_use
    assert cache.match("", [5, 6]) == []


def test_a_second_block_with_equal_tokens_is_not_cached() -> None:
    cache = RadixCache(BlockPool(9), 2)
    first, second = cache.pool.allocate(2)
    node = cache.insert("", [], (1, 2), first)
    assert cache.insert("", [], (1, 2), second) is node
    assert (node.block_id, node.num_users, cache.num_cached) == (first, 2, 1)


def test_only_full_blocks_match() -> None:
    cache = RadixCache(BlockPool(9), 4)
    [node] = store(cache, "", [1, 2, 3, 4])
    assert cache.match("", [1, 2, 3]) == []
    assert cache.match("", [1, 2, 3, 4, 5, 6, 7]) == [node]
    assert cache.match("", [1, 2, 3, 5]) == []


def test_with_lookahead_a_key_includes_the_next_token() -> None:
    cache = RadixCache(BlockPool(9), 2, lookahead=1)
    first, second = store(cache, "", [1, 2, 3, 4, 5])
    assert cache.match("", [1, 2, 3, 4, 5]) == [first, second]
    assert cache.match("", [1, 2, 3, 4, 6]) == [first]
    assert cache.match("", [1, 2, 7, 4, 5]) == []


def test_with_lookahead_a_block_without_a_known_next_token_does_not_match() -> None:
    """The drafter's KV of a block's last token depends on the next token."""
    cache = RadixCache(BlockPool(9), 2, lookahead=1)
    first, second = store(cache, "", [1, 2, 3, 4, 5])
    assert cache.match("", [1, 2]) == []
    assert cache.match("", [1, 2, 3]) == cache.match("", [1, 2, 3, 4]) == [first]
    assert cache.match("", [1, 2, 3, 4, 5, 9, 9]) == [first, second]


def test_with_lookahead_a_prefix_before_two_tokens_has_two_blocks() -> None:
    cache = RadixCache(BlockPool(9), 2, lookahead=1)
    [one], [other] = store(cache, "", [1, 2, 3]), store(cache, "", [1, 2, 4])
    assert one.block_id != other.block_id
    assert cache.num_cached == 2
    evict(cache, 1)
    assert cache.match("", [1, 2, 3]) == []
    assert cache.match("", [1, 2, 4]) == [other]


def test_lookahead_with_blocks_of_one_token() -> None:
    cache = RadixCache(BlockPool(9), 1, lookahead=1)
    path = store(cache, "", [5, 5, 5, 6])
    assert [node.key for node in path] == [(5, 5), (5, 5), (5, 6)]
    assert cache.match("", [5, 5, 6]) == path[:1]  # the second 5 has another next token
    assert cache.match("", [5, 5, 5]) == path[:2]


def test_blocks_are_matched_no_more_after_a_reset_but_kept_until_their_requests_end() -> None:
    cache = RadixCache(BlockPool(9), 2)
    used = store(cache, "tenant", [1, 2, 3, 4])
    cache.lock(used)
    cache.reset()
    assert cache.match("tenant", [1, 2, 3, 4]) == []
    longer = cache.insert("tenant", used, (5, 6), cache.pool.allocate(1)[0])
    again = store(cache, "tenant", [1, 2, 3, 4])
    assert cache.match("tenant", [1, 2, 3, 4, 5, 6]) == again
    cache.unlock([*used, longer])
    assert cache.num_idle == 5
    cache.evict(5)
    assert cache.pool.num_free == cache.pool.num_usable
