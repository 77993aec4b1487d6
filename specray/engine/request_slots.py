"""How a request starts and stops running: it gets a slot, its cached prefix and KV blocks, and gives them back.

The scheduler decides which requests run, and adds blocks to those that do.
"""

from specray.config import EngineConfig
from specray.engine.executor import Capacity
from specray.engine.radix_cache import BlockPool, RadixCache
from specray.engine.request import Request, Status
from specray.engine.stored_states import StoredStates


class RequestSlots:
    """Owns the running list (oldest first), the slots and the KV blocks."""

    def __init__(self, config: EngineConfig, capacity: Capacity) -> None:
        self.pool = BlockPool(capacity.num_blocks)
        is_cached = capacity.num_stored_states != 0 and not config.disable_radix_cache
        num_states = capacity.num_stored_states if is_cached else 0
        self.states = StoredStates(config.max_running_requests, num_states, config.page_size)
        self.cache = RadixCache(self.pool, config.page_size, is_cached, capacity.reads_next_token, self.states.forget)
        self.running: list[Request] = []
        self.free = list(range(config.max_running_requests - 1, -1, -1))
        self.freed: list[int] = []  # slots whose end has not been sent to the worker yet
        self.is_cache_unread = False  # a drafter that has not read it took over and has not drafted yet
        self.num_preemptions = 0

    @property
    def num_free(self) -> int:
        """Slots that a client's request can have now or soon: an audit makes way for it, and a probe needs one step."""
        return len(self.free) + sum(request.spec.is_probe for request in self.running)

    @property
    def max_request_tokens(self) -> int:
        """The longest request that the whole pool can hold."""
        return self.pool.num_usable * self.cache.block_size

    def admit(self, request: Request) -> bool:
        """Give a waiting request a slot, its cached prefix and blocks for its known tokens, if there are enough."""
        num_cacheable = len(request.token_ids) - 1  # one token is left to compute
        if request.prompt_logprobs is not None:  # their logits are computed again
            num_cacheable = min(num_cacheable, request.spec.params.prompt_logprobs_start)
        key = request.token_ids[: num_cacheable + self.cache.lookahead] if request.shares_prefix else []
        path = self.cache.match(request.spec.cache_salt, key)
        path = self.states.start(request, path)
        self.cache.lock(path)
        request.block_ids = [node.block_id for node in path]
        if self.cache.grow(request.block_ids, len(request.token_ids)) is None:
            self.cache.unlock(path)
            request.block_ids = []
            return False
        request.shared_path = path
        request.num_computed_tokens = len(path) * self.cache.block_size
        acceptance = request.acceptance  # what a preempted request computes again is read again
        acceptance.num_missed_tokens = min(acceptance.num_missed_tokens, request.num_computed_tokens)
        acceptance.is_new_to_drafter = self.is_cache_unread and bool(path)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.slot = self.free.pop()
        request.status = Status.RUNNING
        self.running.append(request)
        return True

    def preempt(self, request: Request) -> None:
        """Free a request's slot and blocks, so that it waits once more; its KV is recomputed later."""
        self.release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = []

    def release(self, request: Request) -> None:
        """Remove a running request. Its cached blocks stay cached; its other blocks become free."""
        self.running.remove(request)
        for planned in request.in_flight:
            self.states.release(planned.state_copies)
        self.pool.free(request.private_blocks())
        self.cache.unlock(request.shared_path)
        self.free.append(request.slot)
        self.freed.append(request.slot)
        request.slot, request.num_computed_tokens = -1, 0
        request.block_ids, request.shared_path, request.in_flight = [], [], []
        request.is_detached = False

    def drafter_took_over(self) -> None:
        """Note that another drafter has read nothing of the cache and of what running requests have computed.

        The result of the first step that it reads is not committed yet.
        """
        for request in self.running:
            request.acceptance.is_new_to_drafter |= request.num_computed_tokens > 0
        are_unread = (request.acceptance.is_new_to_drafter for request in self.running)
        self.is_cache_unread = self.cache.num_cached > 0 or any(are_unread)

    def detach_unread(self) -> None:
        """Have cached tokens computed again for a drafter that took over and has drafted now.

        One that ends before, each time that it is restarted, costs no request its cached prefix.
        """
        self.is_cache_unread = False
        self.cache.reset()
        for request in self.running:
            request.is_detached = request.acceptance.is_new_to_drafter
