"""The automatic budget on simulated machines: against the best fixed tree, and against no drafts at all."""

from collections.abc import Callable
from random import Random
from statistics import mean
from typing import NamedTuple

import pytest

from specray.engine.draft_budget.acceptance import MAX_MISSED_TOKENS, SURE_AFTER, RequestAcceptance
from specray.engine.draft_budget.auto import FORGET_AFTER, STEPS_PER_UPDATE, AutoBudget
from specray.engine.draft_budget.budget import DraftBudget, Drafting, Shares
from specray.engine.draft_budget.costs import KNOWN_AFTER, StepCosts, StepShape
from specray.engine.draft_budget.static import StaticBudget
from specray.engine.draft_budget.trials import FIRST_TRIAL_STEP

MOST = 16  # nodes of the drafter's trees
BATCHES = (1, 4, 16)


class Machine(NamedTuple):
    """Milliseconds of a step."""

    target: Callable[[int], float]  # by number of tokens
    fixed: float  # of calling the drafter
    level: float  # of each level of the trees, and a tenth of it for each request
    reached: float = 0.97  # share of the best speed

    def seconds(self, shape: StepShape) -> tuple[float, float]:
        """(the target's time, the rest)"""
        target = self.target(shape.num_requests + shape.num_drafts)
        drafting = self.fixed + self.level * min(4, shape.most_drafts) * (1 + shape.num_requests / 10)
        return target / 1000, (0.3 + drafting * (shape.most_drafts > 0)) / 1000


MACHINES = {
    "cpu": Machine(lambda tokens: 9 + 0.55 * tokens, 0.6, 0.5),
    "gpu": Machine(lambda tokens: 6 + 0.02 * max(0, tokens - 100), 0.5, 0.4),
    # Bends between the numbers of tokens that were tried stay unseen.
    "tiles of 16": Machine(lambda tokens: 5 + 3 * -(-tokens // 16), 0.3, 0.3, reached=0.93),
    "slow drafter": Machine(lambda tokens: 4 + 0.1 * tokens, 6.0, 3.0),
}
ACCEPTANCE = {
    "good": [0.75, 0.55, 0.42, 0.33, 0.25, 0.2, 0.16, 0.13, 0.11, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03],
    "bad": [0.15, 0.06, 0.03] + [0.01] * 13,
}


def tokens_per_second(
    budget: DraftBudget, machine: Machine, rates: list[float], num_requests: int, seed: int = 0
) -> float:
    """Tokens per second after the first steps; node k is accepted with rate k, which is its marginal gain."""
    skip = 700
    steps = skip + (800 if num_requests == 1 else 400)  # several requests show more in a step
    random, requests = Random(seed), [RequestAcceptance() for _ in range(num_requests)]
    tokens = seconds = 0.0
    last = None
    for step in range(steps):
        shares, feeds, _ = budget.shares([Drafting(MOST, request) for request in requests])
        accepted = [[node + 1 for node in range(count) if random.random() < rates[node]] for count in shares]
        shape = StepShape(num_requests, sum(shares), max(shares))
        target, rest = machine.seconds(shape)
        noise = random.uniform(0.95, 1.05)
        if step >= skip:
            tokens += num_requests + sum(map(len, accepted))
            seconds += target + rest
        for request, count, nodes in zip(requests, shares, accepted, strict=True):
            budget.record_tree(request, count, nodes)
        if (shape.most_drafts, feeds) == last and feeds == (shape.most_drafts > 0):
            budget.record_step(shape, target * noise, rest * noise)
        last = (shape.most_drafts, feeds)
    return tokens / seconds


@pytest.mark.parametrize("quality", ACCEPTANCE)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("num_requests", BATCHES)
def test_it_loses_nothing_to_the_best_fixed_tree_or_to_no_drafts(name: str, quality: str, num_requests: int) -> None:
    machine, rates = MACHINES[name], ACCEPTANCE[quality]
    target, rest = machine.seconds(StepShape(num_requests, 0, 0))
    best = num_requests / (target + rest)
    for count in range(1, MOST + 1):
        target, rest = machine.seconds(StepShape(num_requests, count * num_requests, count))
        best = max(best, num_requests * (1 + sum(rates[:count])) / (target + rest))
    assert tokens_per_second(AutoBudget(None), machine, rates, num_requests) >= machine.reached * best


def test_costs_that_were_stored_under_the_load_of_other_programs_are_soon_forgotten() -> None:
    """A restarted server learnt that each draft is dear, and drafted too little or too much for its first requests."""
    machine, loaded, rates = MACHINES["cpu"], Machine(lambda tokens: 14 + 2.2 * tokens, 1.0, 1.5), ACCEPTANCE["good"]

    def first_requests(costs: StepCosts, machine: Machine = machine, seed: int = 0, steps: int = 400) -> float:
        """Tokens per second of four requests, and four others after each 64 steps; the costs learn."""
        budget, random, requests, last = AutoBudget(None, costs), Random(seed), [RequestAcceptance()], None
        tokens = seconds = 0.0
        for step in range(steps):
            if step % 64 == 0:
                requests = [RequestAcceptance() for _ in range(4)]
            shares, feeds, _ = budget.shares([Drafting(MOST, request) for request in requests])
            for request, count in zip(requests, shares, strict=True):
                accepted = [node + 1 for node in range(count) if random.random() < rates[node]]
                budget.record_tree(request, count, accepted, [0.98 - 0.05 * node for node in range(count)])
                tokens += 1 + len(accepted)
            shape = StepShape(4, sum(shares), max(shares))
            target, rest = machine.seconds(shape)
            seconds += target + rest
            if (shape.most_drafts, feeds) == last and feeds == (shape.most_drafts > 0):
                noise = random.uniform(0.95, 1.05)
                budget.record_step(shape, target * noise, rest * noise)
            last = (shape.most_drafts, feeds)
        return tokens / seconds

    first_requests(learnt := StepCosts(), loaded, steps=3000)
    stored = learnt.to_json()
    speeds = [
        mean(first_requests(StepCosts.from_json(data), seed=seed) for seed in range(3))
        for data in (stored, StepCosts().to_json())
    ]
    assert speeds[0] > 0.93 * speeds[1]


def test_traffic_that_changes_gains_over_every_fixed_budget() -> None:
    machine, rates = MACHINES["cpu"], ACCEPTANCE["good"]

    def expected(budget: StaticBudget, num_requests: int) -> float:
        """Tokens per second of a budget that learns nothing."""
        shares = budget.shares([Drafting(MOST, RequestAcceptance()) for _ in range(num_requests)]).num_drafts
        target, rest = machine.seconds(StepShape(num_requests, sum(shares), max(shares)))
        return (num_requests + sum(sum(rates[:count]) for count in shares)) / (target + rest)

    def both_loads(one: float, many: float) -> float:
        """Tokens per second where each load takes half of the steps."""
        return 2 / (1 / one + 1 / many)

    fixed = max(both_loads(*(expected(StaticBudget(most), n) for n in (1, 32))) for most in (None, 2, 4, 8, 16, 32))

    def learnt(seed: int) -> float:
        budget = AutoBudget(None)
        return both_loads(*(tokens_per_second(budget, machine, rates, n, seed) for n in (1, 32)))

    assert mean(map(learnt, range(3))) >= fixed


def test_a_step_without_drafts_in_sight_does_not_call_the_drafter() -> None:
    machine = MACHINES["slow drafter"]
    budget, requests = AutoBudget(None), [RequestAcceptance() for _ in range(4)]
    fed = []
    for _ in range(600):
        shares, feeds, _ = budget.shares([Drafting(MOST, request) for request in requests])
        for request, count in zip(requests, shares, strict=True):
            budget.record_tree(request, count, [])
        shape = StepShape(4, sum(shares), max(shares))
        budget.record_step(shape, *machine.seconds(shape))
        fed.append(feeds)
    assert sum(fed[-300:]) < 15


def test_steps_in_which_no_request_may_draft_do_not_stop_the_drafter() -> None:
    """It still reads their prompts, because a request that drafts may share them."""
    budget = AutoBudget(None)
    request = Drafting(MOST, RequestAcceptance())
    before = budget.shares([request])
    for _ in range(2 * FIRST_TRIAL_STEP):
        assert budget.shares([Drafting(0, RequestAcceptance())] * 2) == Shares([0, 0], runs_drafter=True)
    assert budget.shares([request]) == before


def test_a_request_that_accepts_nothing_drafts_nothing() -> None:
    machine = MACHINES["cpu"]
    budget, good, bad = AutoBudget(None), RequestAcceptance(), RequestAcceptance()
    counts = []
    random = Random(1)
    for _ in range(1500):
        shares, *_ = budget.shares([Drafting(MOST, good), Drafting(MOST, bad)])
        rates = ACCEPTANCE["good"]
        budget.record_tree(good, shares[0], [node + 1 for node in range(shares[0]) if random.random() < rates[node]])
        budget.record_tree(bad, shares[1], [])
        shape = StepShape(2, sum(shares), max(shares))
        budget.record_step(shape, *machine.seconds(shape))
        counts.append(shares)
    good_drafts, bad_drafts = (sum(count) for count in zip(*counts[-500:], strict=True))
    assert bad_drafts < 0.1 * good_drafts


def test_a_request_that_repeats_a_text_soon_drafts_as_much_as_it_may() -> None:
    """By place, where a drafter knows no scores: the usual rates of deep nodes are near 0."""
    budget, random = AutoBudget(None), Random(0)

    def drafts_of_a_request(rate: float, steps: int) -> list[int]:
        """Drafts of each step; a draft whose parent was accepted is accepted with this rate."""
        request, counts = RequestAcceptance(), []
        for _ in range(steps):
            [count] = budget.shares([Drafting(MOST, request)]).num_drafts
            accepted = next((node for node in range(count) if random.random() >= rate), count)
            budget.record_tree(request, count, range(1, accepted + 1))
            budget.record_step(StepShape(1, count, count), (6 + 0.4 * count) / 1000, 0.4 / 1000)
            counts.append(count)
        return counts

    usual = [count for _ in range(30) for count in drafts_of_a_request(0.35, 100)]
    assert mean(usual[-1000:]) < 3
    assert mean(drafts_of_a_request(1.0, 30)[10:]) > 0.9 * MOST
    assert mean(drafts_of_a_request(0.35, 100)) < 3


def test_several_drafters_have_averages_of_their_own() -> None:
    """A request of the drafter that is never accepted gets nothing, although the other one's trees pay."""
    machine, budget = MACHINES["cpu"], AutoBudget(None)
    requests = [RequestAcceptance(drafter=name) for name in ("good", "bad")]
    for _ in range(400):
        num_drafts, *_ = budget.shares([Drafting(MOST, request) for request in requests])
        for request, count in zip(requests, num_drafts, strict=True):
            budget.record_tree(request, count, range(1, count + 1) if request.drafter == "good" else [])
        shape = StepShape(2, sum(num_drafts), max(num_drafts))
        budget.record_step(shape, *machine.seconds(shape))
    newcomers = [RequestAcceptance(drafter=name) for name in ("good", "bad")]
    shares = [budget.shares([Drafting(MOST, request) for request in newcomers]).num_drafts for _ in range(9)]
    good, bad = (sorted(counts)[4] for counts in zip(*shares, strict=True))  # a few may be trials
    assert (good > 3, bad) == (True, 0)


def drafting_budget(costs: StepCosts) -> tuple[AutoBudget, RequestAcceptance]:
    """A budget that has seen enough trees of a draft model whose drafts are often accepted, and a request."""
    budget, request = AutoBudget(None, costs), RequestAcceptance()
    for _ in range(40):
        budget.record_tree(request, 3, [1, 2], scores=[0.9, 0.7, 0.4])
    return budget, request


def test_a_request_that_the_draft_model_did_not_read_gets_no_drafts() -> None:
    budget, read = drafting_budget(StepCosts())
    behind = RequestAcceptance(num_missed_tokens=MAX_MISSED_TOKENS + 1)
    first, second = budget.shares([Drafting(MOST, read), Drafting(MOST, behind)]).num_drafts
    assert (first > 0, second) == (True, 0)
    read.num_missed_tokens = MAX_MISSED_TOKENS + 1
    assert budget.shares([Drafting(MOST, read), Drafting(MOST, behind)]).num_drafts == [0, 0]


def test_a_choice_that_is_kept_for_the_next_step_follows_its_requests() -> None:
    budget, request = drafting_budget(StepCosts())
    whole = budget.shares([Drafting(MOST, request)]).num_drafts
    assert budget.shares([Drafting(MOST, request)]).num_drafts == whole
    assert budget.shares([Drafting(1, request)]).num_drafts == [1] != whole
    assert len(budget.shares([Drafting(MOST, request)] * 2).num_drafts) == 2


def test_fewer_drafts_are_tried_as_well_as_more_and_none() -> None:
    """A cost that was measured too high would otherwise keep a number of drafts from ever being measured again."""
    costs = StepCosts()
    for num_drafts, rest in ((0, 0.1), (3, 2.6), (4, 2.6), (5, 9.0)):
        for _ in range(KNOWN_AFTER):
            costs.observe(StepShape(1, num_drafts, num_drafts), 9.0, rest)
    budget, request = AutoBudget(None, costs), RequestAcceptance()
    for _ in range(40):
        budget.record_tree(request, 5, [1, 2, 3, 4], scores=[0.99, 0.98, 0.97, 0.96, 0.95])
    counts = [budget.shares([Drafting(MOST, request)]).num_drafts[0] for _ in range(2000)]
    assert max(set(counts), key=counts.count) == 4
    assert {0, 3, 6, 9} <= set(counts)


def test_drafts_that_hardly_pay_are_not_begun_for_the_few_requests_that_were_read() -> None:
    """The drafter's time is the same for few requests as for all, and others are read only when they are new."""
    costs = StepCosts()
    for num_drafts, seconds in ((0, 1.0), (8, 1.9), (16, 2.8)):
        costs.observe(StepShape(8, num_drafts, num_drafts // 8), seconds, 0.0)
    budget, read = drafting_budget(costs)
    assert all(budget.shares([Drafting(MOST, read)] * 8).num_drafts), "5 % more tokens a second"
    budget, read = drafting_budget(costs)
    behind = RequestAcceptance(num_missed_tokens=MAX_MISSED_TOKENS + 1)
    assert not any(budget.shares([Drafting(MOST, read)] + [Drafting(MOST, behind)] * 7).num_drafts)


def test_a_new_draft_model_that_has_read_no_running_request_soon_drafts_for_none() -> None:
    budget, behind = AutoBudget(None), RequestAcceptance(num_missed_tokens=99)
    assert budget.shares([Drafting(MOST, behind)]).num_drafts[0] > 0, "it may be a drafter that reads nothing"
    budget.record_tree(behind, 3, [], scores=[0.9, 0.7, 0.4])
    assert budget.shares([Drafting(MOST, behind)]).num_drafts == [0]
    assert budget.shares([Drafting(MOST, behind), Drafting(MOST, RequestAcceptance())]).num_drafts == [0, MOST]


def test_a_running_request_of_a_drafter_that_was_replaced_drafts_while_its_own_trees_pay() -> None:
    costs = StepCosts()
    for num_drafts, seconds in ((0, 1.0), (3, 1.5)):
        costs.observe(StepShape(1, num_drafts, num_drafts), seconds, 0.0)
    budget, other = drafting_budget(costs)
    running = RequestAcceptance(is_new_to_drafter=True)
    for accepted, drafts in (([1], True), ([], False)):
        for _ in range(8 * STEPS_PER_UPDATE):
            [count] = budget.shares([Drafting(MOST, running)]).num_drafts
            budget.record_tree(running, count, accepted[:count], scores=[0.9, 0.7, 0.4])
        counts = [budget.shares([Drafting(MOST, running)]).num_drafts[0] for _ in range(STEPS_PER_UPDATE)]
        assert (counts.count(0) < STEPS_PER_UPDATE // 2) is drafts
    counts = [budget.shares([Drafting(MOST, other)]).num_drafts[0] for _ in range(2 * STEPS_PER_UPDATE)]
    assert counts[-1] > 0, "its trees say nothing about others"


@pytest.mark.parametrize("scores", [[0.9, 0.7, 0.4], []])
def test_a_drafter_that_replaces_another_drafts_for_the_running_requests_before_it_has_others(
    scores: list[float],
) -> None:
    """Nothing is known of it then. Its trees of these requests count for each of them alone."""
    costs = StepCosts()
    for num_drafts, seconds in ((0, 1.0), (3, 1.5)):
        costs.observe(StepShape(1, num_drafts, num_drafts), seconds, 0.0)
    budget = AutoBudget(None, costs)
    good, bad = RequestAcceptance(is_new_to_drafter=True), RequestAcceptance(is_new_to_drafter=True)
    for request, share_with_drafts in ((good, 0.8), (bad, 0.5)):
        num_with_drafts = 0
        for _ in range(100):
            shares = budget.shares([Drafting(3, request)])
            request.num_missed_tokens += not shares.runs_drafter
            [count] = shares.num_drafts
            num_with_drafts += count > 0
            accepted = range(1, 1 + count) if request is good else []
            budget.record_tree(request, count, accepted, scores if count else [])
        assert (num_with_drafts / 100 > share_with_drafts) is (request is good)
    for _ in range(400):
        budget.record_tree(bad, 3, [], scores)
    counts = [budget.shares([Drafting(3, RequestAcceptance())]).num_drafts[0] for _ in range(STEPS_PER_UPDATE)]
    assert counts.count(3) > STEPS_PER_UPDATE // 2


def test_trees_of_a_request_that_was_not_read_say_nothing_about_the_draft_model() -> None:
    budget, read = drafting_budget(StepCosts())
    for _ in range(400):
        budget.record_tree(RequestAcceptance(num_missed_tokens=99), 3, [], scores=[0.9, 0.7, 0.4])
    assert budget.shares([Drafting(MOST, read)]).num_drafts[0] > 0


def test_a_trial_without_drafts_stops_the_drafter_only_to_measure_what_it_costs() -> None:
    def trial(
        costs: StepCosts, num_reading: int = 0, *, is_reading: bool = False, num_missed_tokens: int = 0
    ) -> Shares:
        budget, request = drafting_budget(costs)
        request.num_missed_tokens = num_missed_tokens
        drafting = Drafting(MOST, request, is_reading=is_reading)
        shares = [budget.shares([drafting], num_reading) for _ in range(FIRST_TRIAL_STEP + 2)]
        return next(each for each in shares if each.num_drafts == [0])

    costs = StepCosts()
    assert not trial(costs).runs_drafter
    assert trial(costs, num_reading=1).runs_drafter, "such steps are not timed, and a missed prompt gets no drafts"
    assert trial(costs, is_reading=True).runs_drafter, "the same"
    assert trial(costs, num_missed_tokens=MAX_MISSED_TOKENS - 1).runs_drafter, "it would get no drafts after the trial"
    costs.observe(StepShape(1, 1, 1), 0.01, 0.001)
    for _ in range(KNOWN_AFTER):
        assert not trial(costs).runs_drafter, "one of the first measurements may have been disturbed"
        costs.observe(StepShape(1, 0, 0), 0.01, 0.001)
    assert trial(costs).runs_drafter


def test_prompts_are_read_where_as_many_requests_will_draft() -> None:
    """The parts of a long prompt come before its request drafts, and a request that was not read never would."""

    def seconds(shape: StepShape) -> float:
        return (5 + 4 * max(0, shape.num_requests + shape.num_drafts - 16)) / 1000

    budget, _ = drafting_budget(StepCosts())
    for num_requests in (1, 32):
        requests = [Drafting(MOST, RequestAcceptance()) for _ in range(num_requests)]
        for _ in range(200):
            num_drafts = budget.shares(requests).num_drafts
            shape = StepShape(num_requests, sum(num_drafts), max(num_drafts))
            budget.record_step(shape, seconds(shape), 0.0005)
    assert not budget.shares([]).runs_drafter
    assert [budget.shares([], num_reading=count).runs_drafter for count in (1, 32)] == [True, False]
    others = [Drafting(MOST, RequestAcceptance()) for _ in range(31)]
    assert not budget.shares(others, num_reading=1).runs_drafter


def scored_budget(seconds: Callable[[StepShape], float]) -> AutoBudget:
    """A budget for a draft model of known costs, whose trees bring 1.5 tokens."""
    costs = StepCosts()
    for num_requests in (1, 8):
        for num_drafts in (0, 1, 3, 8, 24):
            shape = StepShape(num_requests, num_drafts, min(3, num_drafts))
            for _ in range(KNOWN_AFTER):
                costs.observe(shape, seconds(shape), 0.003 * (num_drafts > 0))
    budget, random = AutoBudget(None, costs), Random(0)
    for _ in range(200):
        accepted = [node for node, rate in ((1, 0.8), (2, 0.5), (3, 0.2)) if random.random() < rate]
        budget.record_tree(RequestAcceptance(), 3, accepted, scores=[0.8, 0.5, 0.2])
    return budget


def test_requests_that_may_not_draft_are_not_counted_among_those_that_gain() -> None:
    """A step with drafts takes a third longer: eight requests gain more, one beside seven without drafts does not."""
    budget = scored_budget(lambda _: 0.010)
    may, may_not = (Drafting(most, RequestAcceptance()) for most in (3, 0))
    assert min(budget.shares([may] * 8).num_drafts) > 0
    budget = scored_budget(lambda _: 0.010)
    assert not any(budget.shares([may] + [may_not] * 7).num_drafts)


def test_a_request_whose_scored_drafts_are_never_accepted_stops_drafting_where_verification_is_cheap() -> None:
    """All nodes of a tree are verified then, and drafting is what costs."""
    budget, request, random = scored_budget(lambda _: 0.010), RequestAcceptance(), Random(0)
    counts = []
    for _ in range(200):
        [count] = budget.shares([Drafting(3, request)]).num_drafts
        budget.record_tree(request, count, [], scores=[0.8, 0.5, 0.2][:count])
        counts.append(count)
        for _ in range(4):  # others go on as before
            accepted = [node for node, rate in ((1, 0.8), (2, 0.5), (3, 0.2)) if random.random() < rate]
            budget.record_tree(RequestAcceptance(), 3, accepted, scores=[0.8, 0.5, 0.2])
    assert mean(count > 0 for count in counts[-100:]) < 0.4


def test_drafts_by_place_are_priced_in_the_step_of_all_requests() -> None:
    """Thirty other requests make the rows of two requests dear, which alone would pay."""
    costs = StepCosts()
    for num_tokens in (1, 2, 4, 8, 16, 32, 40, 64):
        shape = StepShape(num_tokens, 0, 0)
        costs.observe(shape, 0.010 + 0.001 * max(0, num_tokens - 16), 0.0005)
        costs.observe(StepShape(num_tokens, 1, 1), 0.010 + 0.001 * max(0, num_tokens - 15), 0.0005)
    budget = AutoBudget(None, costs)
    for _ in range(40):
        budget.record_tree(RequestAcceptance(drafter="n-gram"), 3, [1], scores=[])
        budget.record_tree(RequestAcceptance(drafter="head"), 3, [], scores=[0.3, 0.2, 0.1])
    two = [Drafting(3, RequestAcceptance(drafter="n-gram"), is_recorded=False)] * 2
    others = [Drafting(0, RequestAcceptance(drafter="head"))] * 30
    assert min(budget.shares(two).num_drafts) > 0
    assert budget.shares(two + others).num_drafts[:2] == [0, 0]


def test_a_request_that_was_lucky_does_not_count_as_one_that_repeats_for_ever() -> None:
    """With one draft in each step, eight accepted ones in a row are no copy. Without drafts it stayed one."""
    request = RequestAcceptance()
    for _ in range(SURE_AFTER):
        request.count_in_row(1, 1)
    assert request.repeats
    request.fade()
    assert not request.repeats


def test_trees_whose_scores_are_all_1_are_those_of_a_drafter_without_scores() -> None:
    """Of several drafters, a draft model has scores, so the others' trees are given 1."""
    budget, request = AutoBudget(None), RequestAcceptance(drafter="n-gram")
    for _ in range(40):
        budget.record_tree(request, 3, [1, 2, 3], scores=[1.0, 1.0, 1.0])
    assert request.repeats
    behind = RequestAcceptance(drafter="n-gram", num_missed_tokens=99)
    assert budget.shares([Drafting(MOST, behind)]).num_drafts[0] > 0, "n-grams have nothing to read"


def test_requests_whose_trees_are_not_recorded_do_not_draft_whole_trees_for_ever() -> None:
    """A server whose requests all have a grammar assumes the usual acceptance."""
    budget, machine = AutoBudget(None), MACHINES["slow drafter"]
    counts = []
    for _ in range(200):
        num_drafts = budget.shares(
            [Drafting(MOST, RequestAcceptance(), is_recorded=False) for _ in range(16)]
        ).num_drafts
        shape = StepShape(16, sum(num_drafts), max(num_drafts))
        budget.record_step(shape, *machine.seconds(shape))
        counts.append(sum(num_drafts))
    assert mean(counts[-100:]) < 16 * MOST / 4


def test_a_drafter_that_makes_no_trees_leaves_the_others_their_best_choice() -> None:
    """Its logits are not finite, say, so that it never has a first tree to learn from."""
    costs = StepCosts()
    for num_drafts in (0, 4, 40):
        costs.observe(StepShape(2, num_drafts, num_drafts), 0.01 * (1 + num_drafts), 0.001)
    budget, request = drafting_budget(costs)
    both = [Drafting(MOST, request), Drafting(MOST, RequestAcceptance(drafter="broken"))]
    assert budget.shares(both).num_drafts == [0, MOST]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [([13, 1, 1, 1], [13, 1, 1, 1]), ([9, 1, 9, 2], [7, 1, 6, 2]), ([9, 9, 9, 0], [6, 5, 5, 0])],
)
def test_shares_that_are_not_wanted_go_to_the_others(wanted: list[int], expected: list[int]) -> None:
    requests = [Drafting(most, RequestAcceptance()) for most in wanted]
    assert StaticBudget(16).shares(requests).num_drafts == expected


def test_equal_shares_go_to_those_that_want_drafts() -> None:
    assert StaticBudget(8).shares([Drafting(most, RequestAcceptance()) for most in (0, 5, 0, 9)]).num_drafts == [
        0,
        4,
        0,
        4,
    ]


def test_requests_that_accept_drafts_get_them_again_after_those_that_accept_none() -> None:
    """A draft model that is turned off reads no prompts, so that its trees show nothing, however good they became."""
    machine, budget, random = MACHINES["cpu"], AutoBudget(None), Random(0)
    scores = [0.8, 0.7, 0.5, 0.4, 0.3, 0.2]

    def share_of_steps_with_drafts(rate: float, num_steps: int) -> float:
        """In the second half of the steps, of one request after another, each of 50 tokens after its prompt."""
        num_with_drafts, request = 0, RequestAcceptance()
        for step in range(num_steps):
            if step % 50 == 0:
                request = RequestAcceptance()
            [count], feeds, _ = budget.shares([Drafting(len(scores), request, is_reading=step % 50 == 0)])
            if not feeds:
                request.num_missed_tokens += 20 if step % 50 == 0 else 1
            accepted = next((node for node in range(count) if random.random() >= rate), count)
            budget.record_tree(request, count, range(1, accepted + 1), scores[:count])
            shape = StepShape(1, count, count)
            budget.record_step(shape, *machine.seconds(shape))
            num_with_drafts += count > 0 and step >= num_steps // 2
        return 2 * num_with_drafts / num_steps

    assert share_of_steps_with_drafts(0.02, 3000) < 0.1
    assert share_of_steps_with_drafts(0.9, 2 * FORGET_AFTER + 400) > 0.9
    assert share_of_steps_with_drafts(0.02, 20_000) < 0.05, "trying costs little"
