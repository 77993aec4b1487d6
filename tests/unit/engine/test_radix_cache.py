"""What the random walk of test_block_cache does not ask: order of eviction by example, and tenants without end."""

from specray.engine.block_pool import BlockPool
from specray.engine.radix_cache import CacheNode, RadixCache


def store(cache: RadixCache, namespace: str, token_ids: list[int]) -> list[CacheNode]:
    """Cache a text as a finished request leaves it."""
    size = cache.block_size
    path = cache.match(namespace, token_ids)
    cache.lock(path)
    blocks = cache.take_blocks((len(token_ids) - cache.lookahead) // size - len(path))
    assert blocks is not None
    for block_id in blocks:
        key = tuple(token_ids[len(path) * size :][: size + cache.lookahead])
        path.append(cache.insert(namespace, path, key, block_id))
    cache.unlock(path)
    return path


def evict(cache: RadixCache, num_blocks: int) -> None:
    """Make room beyond what is free, and give it back."""
    blocks = cache.take_blocks(cache.pool.num_free + num_blocks)
    assert blocks is not None
    cache.pool.give(blocks)


def test_a_million_tenants_leave_only_the_roots_that_still_hold_blocks() -> None:
    cache = RadixCache(BlockPool(9), 2)
    for salt in range(5000):
        cache.match(f"asked {salt}", [1, 2])
        store(cache, f"tenant {salt}", [1, 2, 3, 4])
        assert len(cache._roots) <= 4
        assert len(cache._evictable) <= 8
    assert set(cache._roots) == {f"tenant {salt}" for salt in range(4996, 5000)}
    cache.clear()
    assert not cache._roots
    assert cache.pool.num_free == cache.pool.num_usable


def test_an_emptied_namespace_can_be_filled_again() -> None:
    cache = RadixCache(BlockPool(9), 2)
    store(cache, "tenant", [1, 2])
    cache.clear()
    assert cache.match("tenant", [1, 2]) == []
    path = store(cache, "tenant", [1, 2])
    assert cache.match("tenant", [1, 2, 3]) == path


def test_the_end_of_a_text_goes_before_its_beginning() -> None:
    cache = RadixCache(BlockPool(9), 2)
    path = store(cache, "", [1, 2, 3, 4, 5, 6])
    for left in (2, 1, 0):
        evict(cache, 1)
        assert cache.match("", [1, 2, 3, 4, 5, 6]) == path[:left]


def test_the_text_not_read_for_longest_goes_first_in_whatever_namespace() -> None:
    cache = RadixCache(BlockPool(9), 2)
    texts = [("a", [1, 2]), ("b", [3, 4]), ("a", [5, 6])]
    for namespace, token_ids in texts:
        store(cache, namespace, token_ids)
    store(cache, "a", [1, 2])  # read again
    gone = []
    for _ in texts:
        evict(cache, 1)
        gone += [text for text in texts if not cache.match(*text) and text not in gone]
    assert gone == [texts[1], texts[2], texts[0]]


def test_what_is_read_at_the_moment_stays_and_too_much_is_refused_without_harm() -> None:
    cache = RadixCache(BlockPool(5), 2)
    in_use = store(cache, "", [1, 2, 3, 4])
    store(cache, "", [5, 6])
    cache.lock(in_use)
    assert cache.take_blocks(3) is None  # one free, one idle
    assert cache.match("", [5, 6])
    assert cache.take_blocks(2) is not None
    assert cache.match("", [1, 2, 3, 4]) == in_use
    assert cache.match("", [5, 6]) == []


def test_an_equal_block_that_came_second_stays_its_owners() -> None:
    cache = RadixCache(BlockPool(9), 2)
    first, second = cache.pool.take(2)
    node = cache.insert("", [], (1, 2), first)
    assert cache.insert("", [], (1, 2), second) is node
    assert (node.block_id, node.num_users, cache.num_cached) == (first, 2, 1)


def test_only_full_blocks_match() -> None:
    cache = RadixCache(BlockPool(9), 4)
    [node] = store(cache, "", [1, 2, 3, 4])
    assert cache.match("", [1, 2, 3]) == []
    assert cache.match("", [1, 2, 3, 4, 5, 6, 7]) == [node]
    assert cache.match("", [1, 2, 3, 5]) == []


def test_with_lookahead_a_block_is_found_by_the_token_after_it_too() -> None:
    cache = RadixCache(BlockPool(9), 2, lookahead=1)
    first, second = store(cache, "", [1, 2, 3, 4, 5])
    assert cache.match("", [1, 2, 3, 4, 5]) == [first, second]
    assert cache.match("", [1, 2, 3, 4, 6]) == [first]
    assert cache.match("", [1, 2, 7, 4, 5]) == []


def test_with_lookahead_the_rest_of_a_text_is_left_to_be_computed() -> None:
    """Of a full block whose next token is not known, the drafter's KV of the last token is not known either."""
    cache = RadixCache(BlockPool(9), 2, lookahead=1)
    first, second = store(cache, "", [1, 2, 3, 4, 5])
    assert cache.match("", [1, 2]) == []
    assert cache.match("", [1, 2, 3]) == cache.match("", [1, 2, 3, 4]) == [first]
    assert cache.match("", [1, 2, 3, 4, 5, 9, 9]) == [first, second]


def test_with_lookahead_one_prefix_before_two_tokens_is_two_blocks() -> None:
    cache = RadixCache(BlockPool(9), 2, lookahead=1)
    [one], [other] = store(cache, "", [1, 2, 3]), store(cache, "", [1, 2, 4])
    assert one.block_id != other.block_id
    assert cache.num_cached == 2
    evict(cache, 1)
    assert cache.match("", [1, 2, 3]) == []
    assert cache.match("", [1, 2, 4]) == [other]


def test_a_text_of_pages_of_one_with_lookahead() -> None:
    cache = RadixCache(BlockPool(9), 1, lookahead=1)
    path = store(cache, "", [5, 5, 5, 6])
    assert [node.key for node in path] == [(5, 5), (5, 5), (5, 6)]
    assert cache.match("", [5, 5, 6]) == path[:1]  # its second 5 stands before another token
    assert cache.match("", [5, 5, 5]) == path[:2]
