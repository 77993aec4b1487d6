"""The order in which requests start: FCFS within a tenant, fair shares among tenants, no starvation."""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specray.config import EngineConfig
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.engine.executor import Capacity
from specray.engine.fair_queue import AGE_SHARE, FairQueue
from specray.engine.request import Request
from specray.sampling_params import SamplingParams
from tests.support.ranks import SimulatedRanks
from tests.support.toy import VOCAB_SIZE, toy_tokenizer

ARRIVALS = count()
STEP_S = 0.02  # a step of SmolLM2-135M on two cores
LIGHT = [f"light{index}" for index in range(8)]


def request(tenant: str, prompt: int = 1, output: int = 1, priority: int = 0) -> Request:
    number = next(ARRIVALS)
    params = SamplingParams(seed=1, max_tokens=output)
    spec = EngineRequest(f"r{number}", [0] * prompt, params, tenant=tenant, priority=priority)
    return Request(spec, prompt + output, float(number), [0] * prompt, prompt)


class QueueMachine(RuleBasedStateMachine):
    """Random calls, compared with lists of the waiting requests. `returned` is in reverse order of return."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: list[Request] = []
        self.returned: list[Request] = []
        self.started: list[Request] = []

    @rule(
        tenant=st.sampled_from("abc"),
        prompt=st.integers(1, 50),
        output=st.integers(1, 50),
        priority=st.sampled_from([0, 0, -1, 2]),
    )
    def append(self, tenant: str, prompt: int, output: int, priority: int) -> None:
        self.waiting.append(request(tenant, prompt, output, priority))
        self.queue.append(self.waiting[-1])

    @precondition(lambda self: self.waiting or self.returned)
    @rule()
    def pop(self) -> None:
        first = self.queue.popleft()
        if self.returned:
            assert first is self.returned.pop(0)
        else:
            own = [r for r in self.waiting if r.spec.tenant == first.spec.tenant]
            in_turn = min(own, key=lambda r: r.spec.priority)  # the oldest of them
            assert first in (in_turn, self.waiting[0]), "by priority and age, or the oldest of all"
            self.waiting.remove(first)
        self.started.append(first)

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def return_to_queue(self, data: st.DataObject) -> None:
        returned = data.draw(st.sampled_from(self.started))
        self.started.remove(returned)
        self.returned.insert(0, returned)
        self.queue.appendleft(returned)

    @precondition(lambda self: self.waiting or self.returned)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        removed = data.draw(st.sampled_from(self.waiting + self.returned))
        self.queue.remove(removed)
        (self.waiting if removed in self.waiting else self.returned).remove(removed)

    @precondition(lambda self: self.started)
    @rule(data=st.data(), num_tokens=st.integers(0, 60))
    def charge(self, data: st.DataObject, num_tokens: int) -> None:
        self.queue.charge(data.draw(st.sampled_from(self.started)), num_tokens)

    @invariant()
    def the_queue_contains_the_waiting_requests(self) -> None:
        assert len(self.queue) == len(self.waiting) + len(self.returned)
        assert bool(self.queue) is bool(self.waiting or self.returned)
        assert Counter(self.queue) == Counter(self.waiting + self.returned)
        by_tenant = Counter(request.spec.tenant for request in self.waiting)
        assert all(self.queue.num_waiting_of(tenant) == by_tenant[tenant] for tenant in "abc")
        assert list(self.queue)[: len(self.returned)] == self.returned


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class SimulatedServer:
    """Runs up to `num_slots` requests, each of which generates up to three tokens per step."""

    def __init__(self, num_slots: int, seed: int = 0) -> None:
        self.queue = FairQueue()
        self.served: Counter[str] = Counter()
        self.waits: dict[str, float] = {}  # the longest, by tenant
        self.now = 0
        self.random = Random(seed)
        self._num_slots = num_slots
        self._running: dict[Request, int] = {}  # tokens left
        self._since: dict[Request, int] = {}

    def add(self, new: Request) -> None:
        self._since[new] = self.now
        self.queue.append(new)

    def step(self) -> Iterator[Request]:
        """Run one step. Yields the requests that end in it."""
        self.now += 1
        while self.queue and len(self._running) < self._num_slots:
            self._start(self.queue.popleft())
        for running in list(self._running):
            num_tokens = min(self._running[running], self.random.randint(1, 3))
            self.queue.charge(running, num_tokens)
            self.served[running.spec.tenant] += num_tokens
            self._running[running] -= num_tokens
            if not self._running[running]:
                del self._running[running]
                yield running

    def _start(self, started: Request) -> None:
        tenant = started.spec.tenant
        self._running[started] = started.max_length - started.num_prompt_tokens
        self.served[tenant] += started.num_prompt_tokens
        self.waits[tenant] = max(self.waits.get(tenant, 0.0), STEP_S * (self.now - self._since.pop(started)))

    def longest_wait(self, tenant: str) -> float:
        """In seconds, including requests that still wait."""
        waiting = [STEP_S * (self.now - since) for each, since in self._since.items() if each.spec.tenant == tenant]
        return max([self.waits.get(tenant, 0.0), *waiting])


def closed_loop(server: SimulatedServer, clients: dict[str, int], prompt: int, output: int, num_steps: int) -> None:
    """Serve `clients[tenant]` clients per tenant. A client sends its next request as soon as its last one has ended."""
    for tenant, number in clients.items():
        for _ in range(number):
            server.add(request(tenant, prompt, output))
    for _ in range(num_steps):
        for ended in server.step():
            server.add(request(ended.spec.tenant, prompt, output))


def test_light_tenants_beside_a_heavy_one_get_their_fair_share() -> None:
    """One tenant has 64 clients and eight have four each; each of them could use more than its share."""
    server = SimulatedServer(num_slots=16)
    closed_loop(server, {"heavy": 64} | dict.fromkeys(LIGHT, 4), prompt=20, output=40, num_steps=6000)
    fair = server.served.total() / 9
    assert all(server.served[tenant] >= 0.9 * fair for tenant in LIGHT), server.served
    assert max(map(server.longest_wait, ["heavy", *LIGHT])) <= 30.0


def test_tenants_below_their_share_do_not_wait() -> None:
    """With one client, a light tenant starts at the next free slot. The heavy tenant gets the remaining capacity."""
    server = SimulatedServer(num_slots=16)
    closed_loop(server, {"heavy": 64} | dict.fromkeys(LIGHT, 1), prompt=20, output=40, num_steps=6000)
    alone = 6000 * 60 / 20  # tokens of a client that never waits: 60 tokens in 20 steps
    assert all(server.served[tenant] >= 0.9 * alone for tenant in LIGHT), server.served
    assert max(map(server.longest_wait, LIGHT)) <= 0.2
    assert server.longest_wait("heavy") <= 30.0


def test_a_flood_of_long_prompts_leaves_others_their_share() -> None:
    """Shares are counted in tokens, not in requests, although the flood's requests are always the oldest."""
    server = SimulatedServer(num_slots=4)
    for _ in range(400):
        server.add(request("flood", 900, 100))
    closed_loop(server, dict.fromkeys(LIGHT[:3], 4), prompt=10, output=10, num_steps=8000)
    fair = server.served.total() / 4
    assert all(server.served[tenant] >= 0.9 * fair - 4000 for tenant in LIGHT[:3]), server.served


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=2, max_size=6), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_tenants_that_always_wait_get_at_least_90_percent_of_an_equal_share(
    sizes: list[tuple[int, int]], seed: int
) -> None:
    """With requests of any sizes. Shares may differ by the requests in flight and one more."""
    num_slots = 3
    server = SimulatedServer(num_slots, seed)
    size_of = {str(index): size for index, size in enumerate(sizes)}
    for tenant, size in size_of.items():
        for _ in range(num_slots + 1):
            server.add(request(tenant, *size))
    for _ in range(2000):
        for ended in server.step():
            server.add(request(ended.spec.tenant, *size_of[ended.spec.tenant]))
    slack = (num_slots + 1) * max(map(sum, sizes)) * 2
    fair = server.served.total() / len(sizes)
    assert all(server.served[tenant] >= 0.9 * fair - slack for tenant in size_of), server.served


@given(st.integers(0, 2**32), st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_no_request_starves_however_much_its_tenant_was_served_before(seed: int, served_before: int) -> None:
    """A request starts before AGE_SHARE times as many tokens are served as it and all older requests may generate."""
    random, queue = Random(seed), FairQueue()
    for tenant in ("debtor", "a", "b"):
        queue.append(request(tenant))
    first = [queue.popleft() for _ in range(2)]
    queue.append(request("c"))  # the queue is never empty, so charges are kept
    queue.charge(next(r for r in [*first, *queue] if r.spec.tenant == "debtor"), served_before)
    older = list(queue)
    last = request("debtor", random.randint(1, 100), random.randint(1, 100))
    queue.append(last)
    num_served, largest = 0, 0
    while last in list(queue):
        queue.append(request(random.choice("abc"), random.randint(1, 20), random.randint(1, 20)))
        started = queue.popleft()
        queue.charge(started, started.max_length - started.num_prompt_tokens)
        num_served += started.max_length
        largest = max(largest, started.max_length)
    assert num_served - 2 * largest <= AGE_SHARE * sum(r.max_length for r in [*older, last])


def test_requests_of_one_tenant_start_in_order_of_arrival() -> None:
    queue, requests = FairQueue(), [request("", index % 7 + 1, index % 5 + 1) for index in range(100)]
    for each in requests:
        queue.append(each)
    assert [queue.popleft() for _ in requests] == requests


def test_aborted_requests_are_not_charged() -> None:
    queue, aborted = FairQueue(), [request("a", prompt=1000) for _ in range(5)]
    for each in aborted:
        queue.append(each)
    queue.append(request("b"))
    queue.append(late := request("a"))
    for each in aborted:
        queue.remove(each)
    assert queue.popleft().spec.tenant == "b"  # now the oldest
    assert queue.popleft() is late
    assert not queue


def test_returned_requests_go_first_and_are_charged_once() -> None:
    queue = FairQueue()
    for tenant in "aabb":
        queue.append(request(tenant, prompt=10))
    first = queue.popleft()
    for _ in range(5):
        queue.appendleft(first)
        assert queue.popleft() is first
    order = [queue.popleft().spec.tenant for _ in range(3)]
    assert (first.spec.tenant, order) == ("a", ["b", "a", "b"])


def test_tenants_gain_no_credit_while_absent_and_no_debt_while_alone() -> None:
    queue = FairQueue()
    for _ in range(50):  # only `a` has requests
        queue.append(request("a", prompt=100))
        queue.popleft()
    for tenant in "aaabbb":
        queue.append(request(tenant, prompt=100))
    assert [queue.popleft().spec.tenant for _ in range(6)] == list("ababab")
    for tenant in "aaa":
        queue.append(request(tenant, prompt=100))
    queue.popleft()
    for tenant in "cccc":  # `c` is new: it starts level with `a`
        queue.append(request(tenant, prompt=100))
    assert [queue.popleft().spec.tenant for _ in range(4)] in (list("caca"), list("acac"))


def test_state_of_inactive_tenants_is_dropped() -> None:
    queue = FairQueue()
    queue.append(request("always", prompt=5))
    for index in range(2000):
        queue.append(request(f"t{index}", prompt=5))
        queue.append(request("always", prompt=5))
        queue.popleft()
        queue.popleft()
    assert len(queue._served) < 20
    assert len(queue._lines) < 20
    assert len(queue._num_of) < 20


def test_a_priority_orders_the_requests_of_a_tenant() -> None:
    queue = FairQueue()
    for priority in (0, 3, -5, 0, -5, 3):
        queue.append(request("a", priority=priority))
    order = [queue.popleft() for _ in range(6)]
    assert [each.spec.priority for each in order] == [-5, -5, 0, 0, 3, 3]
    assert [each.arrival for each in order[::2]] < [each.arrival for each in order[1::2]]


def test_a_priority_gains_a_tenant_nothing_against_others() -> None:
    """Both have a request waiting at all times; one says that all of its are urgent."""
    queue, served = FairQueue(), Counter[str]()
    for tenant, priority in (("calm", 0), ("urgent", -100)):
        queue.append(request(tenant, 100, 1, priority))
    for _ in range(200):
        started = queue.popleft()
        served[started.spec.tenant] += 1
        queue.append(request(started.spec.tenant, 100, 1, started.spec.priority))
    assert abs(served["calm"] - served["urgent"]) <= 2


def test_a_low_priority_starts_although_urgent_requests_never_end() -> None:
    """Within the bound that the module promises."""
    queue, num_tokens = FairQueue(), 0
    patient = request("a", 100, 50, priority=9)
    queue.append(patient)
    queue.append(request("a", 100, 50, priority=-1))
    while (started := queue.popleft()) is not patient:
        num_tokens += 150
        queue.charge(started, 50)
        queue.append(request("a", 100, 50, priority=-1))
    assert 0 < num_tokens <= AGE_SHARE * 150


@pytest.mark.parametrize("num_blocks", [60, 14])
def test_tenants_change_the_order_and_no_output(num_blocks: int) -> None:
    """With 14 blocks, requests are preempted. Every tenant has a request among the first six to end."""
    config = EngineConfig(page_size=4, max_running_requests=4, chunked_prefill_size=8, disable_radix_cache=True)
    outputs = {}
    early: set[str] = set()
    for tenants in ([""], ["heavy"] * 6 + LIGHT[:2]):
        priorities = [0] if tenants == [""] else [2, 0, -1]
        ranks = SimulatedRanks(config, Capacity(num_blocks, 3, 40, VOCAB_SIZE, [1]), _text, Random(1))
        engine = Engine(config, ranks, toy_tokenizer().backend_tokenizer)
        for index in range(24):
            params = SamplingParams(seed=index, max_tokens=16, ignore_eos=True)
            prompt = [4 + index % 3] * (4 + index % 8)
            tenant, priority = tenants[index % len(tenants)], priorities[index % len(priorities)]
            engine.add_request(EngineRequest(str(index), prompt, params, tenant=tenant, priority=priority))
        tokens: dict[str, list[int]] = {str(index): [] for index in range(24)}
        ended: list[int] = []
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
                ended += [int(output.request_id)] if output.finish_reason else []
        outputs[len(tenants)] = tokens
        early = {tenants[index % len(tenants)] for index in ended[:6]}
        assert (engine.scheduler.slots.num_preemptions > 0) is (num_blocks == 14)
    assert outputs[1] == outputs[8]
    assert all(len(tokens) == 16 for tokens in outputs[8].values())
    assert early == {"heavy", *LIGHT[:2]}


def test_generated_tokens_are_charged() -> None:
    """If only prompts were charged, `a` with short prompts and long outputs would start five times as often as `b`."""
    config = EngineConfig(page_size=4, max_running_requests=1)
    ranks = SimulatedRanks(config, Capacity(60, 0, 40, VOCAB_SIZE, [1]), _text, Random(1))
    engine = Engine(config, ranks, toy_tokenizer().backend_tokenizer)
    for tenant, prompt, output in (("a", 2, 20), ("b", 10, 1)):
        for index in range(10):
            params = SamplingParams(seed=1, max_tokens=output, ignore_eos=True)
            engine.add_request(EngineRequest(f"{tenant}{index}", [5] * prompt, params, tenant=tenant))
    ended: list[str] = []
    while engine.has_work:
        ended += [output.request_id[0] for output in engine.step() if output.finish_reason]
    assert Counter(ended[:9]) == {"a": 3, "b": 6}


def _text(token_ids: list[int]) -> int:
    return 4 + hash(tuple(token_ids)) % (VOCAB_SIZE - 4)
