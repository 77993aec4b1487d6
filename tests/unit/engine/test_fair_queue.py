"""Order of starts: first come first served within a tenant, equal shares between tenants, nobody left waiting."""

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
from specray.engine.executor import Capacity
from specray.engine.fair_queue import AGE_SHARE, FairQueue
from specray.engine.request import EngineRequest, Request
from specray.sampling_params import SamplingParams
from tests.support.ranks import SimulatedRanks
from tests.support.toy import VOCAB_SIZE, toy_tokenizer

ARRIVALS = count()
STEP_S = 0.02  # of SmolLM2-135M on two cores
LIGHT = [f"light{index}" for index in range(8)]


def request(tenant: str, prompt: int = 1, output: int = 1) -> Request:
    number = next(ARRIVALS)
    params = SamplingParams(seed=1, max_tokens=output)
    spec = EngineRequest(f"r{number}", [0] * prompt, params, tenant=tenant)
    return Request(spec, prompt + output, float(number), [0] * prompt, prompt)


class QueueMachine(RuleBasedStateMachine):
    """A caller who remembers who waits; `returned` were put back, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: list[Request] = []
        self.returned: list[Request] = []
        self.started: list[Request] = []

    @rule(tenant=st.sampled_from("abc"), prompt=st.integers(1, 50), output=st.integers(1, 50))
    def append(self, tenant: str, prompt: int, output: int) -> None:
        self.waiting.append(request(tenant, prompt, output))
        self.queue.append(self.waiting[-1])

    @precondition(lambda self: self.waiting or self.returned)
    @rule()
    def pop(self) -> None:
        first = self.queue.popleft()
        if self.returned:
            assert first is self.returned.pop(0)
        else:
            own = [r for r in self.waiting if r.spec.tenant == first.spec.tenant]
            assert first is own[0], "first come, first served within a tenant"
            self.waiting.remove(first)
        self.started.append(first)

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        back = data.draw(st.sampled_from(self.started))
        self.started.remove(back)
        self.returned.insert(0, back)
        self.queue.appendleft(back)

    @precondition(lambda self: self.waiting or self.returned)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.waiting + self.returned))
        self.queue.remove(gone)
        (self.waiting if gone in self.waiting else self.returned).remove(gone)

    @precondition(lambda self: self.started)
    @rule(data=st.data(), num_tokens=st.integers(0, 60))
    def charge(self, data: st.DataObject, num_tokens: int) -> None:
        self.queue.charge(data.draw(st.sampled_from(self.started)), num_tokens)

    @invariant()
    def holds_exactly_those_that_wait(self) -> None:
        assert len(self.queue) == len(self.waiting) + len(self.returned)
        assert bool(self.queue) is bool(self.waiting or self.returned)
        assert Counter(self.queue) == Counter(self.waiting + self.returned)
        assert list(self.queue)[: len(self.returned)] == self.returned


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Server:
    """`num_slots` requests run, each emits up to three tokens a step; whoever ends makes room for the next."""

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
        """One step; those that ended in it."""
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
        """Those that still wait included."""
        still = [STEP_S * (self.now - since) for waits, since in self._since.items() if waits.spec.tenant == tenant]
        return max([self.waits.get(tenant, 0.0), *still])


def closed_loop(server: Server, clients: dict[str, int], prompt: int, output: int, num_steps: int) -> None:
    """Each tenant has that many clients; each sends its next request as soon as its last one has ended."""
    for tenant, number in clients.items():
        for _ in range(number):
            server.add(request(tenant, prompt, output))
    for _ in range(num_steps):
        for ended in server.step():
            server.add(request(ended.spec.tenant, prompt, output))


def test_light_keys_get_their_fair_share_beside_a_heavy_one_and_all_start_in_time() -> None:
    """Q3: one key with 64 requests at once and eight with a few, every one of which would take more than its share."""
    server = Server(num_slots=16)
    closed_loop(server, {"heavy": 64} | dict.fromkeys(LIGHT, 4), prompt=20, output=40, num_steps=6000)
    fair = server.served.total() / 9
    assert all(server.served[tenant] >= 0.9 * fair for tenant in LIGHT), server.served
    assert max(map(server.longest_wait, ["heavy", *LIGHT])) <= 30.0


def test_light_keys_that_take_less_than_their_share_do_not_wait_for_the_heavy_one() -> None:
    """With one request at a time a light key starts at the next free slot; the heavy one gets what is left."""
    server = Server(num_slots=16)
    closed_loop(server, {"heavy": 64} | dict.fromkeys(LIGHT, 1), prompt=20, output=40, num_steps=6000)
    alone = 6000 * 60 / 20  # tokens of a client that never waits: 20 steps for 20 + 40 tokens
    assert all(server.served[tenant] >= 0.9 * alone for tenant in LIGHT), server.served
    assert max(map(server.longest_wait, LIGHT)) <= 0.2
    assert server.longest_wait("heavy") <= 30.0


def test_a_flood_with_a_huge_prompt_each_leaves_the_others_their_share() -> None:
    """Shares are of tokens, not of requests, also where the flood is always the oldest to wait."""
    server = Server(num_slots=4)
    for _ in range(400):
        server.add(request("flood", 900, 100))
    closed_loop(server, dict.fromkeys(LIGHT[:3], 4), prompt=10, output=10, num_steps=8000)
    fair = server.served.total() / 4
    assert all(server.served[tenant] >= 0.9 * fair - 4000 for tenant in LIGHT[:3]), server.served


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=2, max_size=6), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_tenants_that_always_wait_are_served_nine_tenths_of_an_equal_share(
    sizes: list[tuple[int, int]], seed: int
) -> None:
    """Whatever a tenant's requests look like; those in flight, and one more, are what shares may be apart by."""
    num_slots = 3
    server = Server(num_slots, seed)
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
def test_nobody_starves_whatever_his_tenant_was_served_before(seed: int, debt: int) -> None:
    """A request starts once AGE_SHARE times the tokens have been served that it and all older ones may fill."""
    random, queue = Random(seed), FairQueue()
    for tenant in ("debtor", "a", "b"):
        queue.append(request(tenant))
    first = [queue.popleft() for _ in range(2)]
    queue.append(request("c"))  # somebody waits all the time, so nothing is forgotten
    queue.charge(next(r for r in [*first, *queue] if r.spec.tenant == "debtor"), debt)
    older = list(queue)
    long_job = request("debtor", random.randint(1, 100), random.randint(1, 100))
    queue.append(long_job)
    num_served, largest = 0, 0
    while long_job in list(queue):
        queue.append(request(random.choice("abc"), random.randint(1, 20), random.randint(1, 20)))
        started = queue.popleft()
        queue.charge(started, started.max_length - started.num_prompt_tokens)
        num_served += started.max_length
        largest = max(largest, started.max_length)
    assert num_served - 2 * largest <= AGE_SHARE * sum(r.max_length for r in [*older, long_job])


def test_without_tenants_it_is_first_come_first_served() -> None:
    queue, requests = FairQueue(), [request("", index % 7 + 1, index % 5 + 1) for index in range(100)]
    for each in requests:
        queue.append(each)
    assert [queue.popleft() for _ in requests] == requests


def test_an_abort_costs_its_tenant_nothing() -> None:
    queue, aborted = FairQueue(), [request("a", prompt=1000) for _ in range(5)]
    for each in aborted:
        queue.append(each)
    queue.append(request("b"))
    queue.append(late := request("a"))
    for each in aborted:
        queue.remove(each)
    assert queue.popleft().spec.tenant == "b"  # it is the oldest now
    assert queue.popleft() is late
    assert not queue


def test_what_is_put_back_goes_first_and_is_charged_once() -> None:
    queue = FairQueue()
    for tenant in "aabb":
        queue.append(request(tenant, prompt=10))
    first = queue.popleft()
    for _ in range(5):
        queue.appendleft(first)
        assert queue.popleft() is first
    order = [queue.popleft().spec.tenant for _ in range(3)]
    assert (first.spec.tenant, order) == ("a", ["b", "a", "b"])


def test_a_newcomer_saves_nothing_up_and_a_loner_owes_nothing() -> None:
    queue = FairQueue()
    for _ in range(50):  # `a` has the server to itself
        queue.append(request("a", prompt=100))
        queue.popleft()
    for tenant in "aaabbb":
        queue.append(request(tenant, prompt=100))
    assert [queue.popleft().spec.tenant for _ in range(6)] == list("ababab")
    for tenant in "aaa":
        queue.append(request(tenant, prompt=100))
    queue.popleft()
    for tenant in "cccc":  # `c` was never there: it goes before `a`, but not four times
        queue.append(request(tenant, prompt=100))
    assert [queue.popleft().spec.tenant for _ in range(4)] in (list("caca"), list("acac"))


def test_tenants_that_are_served_and_gone_are_forgotten() -> None:
    queue = FairQueue()
    queue.append(request("always", prompt=5))
    for index in range(2000):
        queue.append(request(f"t{index}", prompt=5))
        queue.append(request("always", prompt=5))
        queue.popleft()
        queue.popleft()
    assert len(queue._served) < 20
    assert len(queue._lines) < 20


@pytest.mark.parametrize("num_blocks", [60, 14])
def test_the_order_of_tenants_changes_no_text(num_blocks: int) -> None:
    """Also where requests are preempted, on a pool of 14 blocks; every tenant gets something early on."""
    config = EngineConfig(page_size=4, max_running_requests=4, chunked_prefill_size=8, disable_radix_cache=True)
    texts = {}
    early: set[str] = set()
    for tenants in ([""], ["heavy"] * 6 + LIGHT[:2]):
        ranks = SimulatedRanks(config, Capacity(num_blocks, 3, 40, VOCAB_SIZE, [1]), _text, Random(1))
        engine = Engine(config, ranks, toy_tokenizer().backend_tokenizer)
        for index in range(24):
            params = SamplingParams(seed=index, max_tokens=16, ignore_eos=True)
            prompt = [4 + index % 3] * (4 + index % 8)
            engine.add_request(EngineRequest(str(index), prompt, params, tenant=tenants[index % len(tenants)]))
        said: dict[str, list[int]] = {str(index): [] for index in range(24)}
        ended: list[int] = []
        while engine.has_work:
            for output in engine.step():
                said[output.request_id] += output.token_ids
                ended += [int(output.request_id)] if output.finish_reason else []
        texts[len(tenants)] = said
        early = {tenants[index % len(tenants)] for index in ended[:6]}
        assert (engine.scheduler.num_preemptions > 0) is (num_blocks == 14)
    assert texts[1] == texts[8]
    assert all(len(said) == 16 for said in texts[8].values())
    assert early == {"heavy", *LIGHT[:2]}


def test_the_scheduler_charges_what_was_generated() -> None:
    """By prompts alone `a`, with its short prompts and long answers, would start five times as often as `b`."""
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
