"""What a step of each drafting method costs on this machine, measured by generating logged requests again for a moment.

A step's cost depends on the number of requests and drafts, somewhat on the lengths of their contexts, and hardly on
the text. So a few dozen tokens from the middle of a few requests, whose lengths are spread as those of all, show it.
Methods take turns, as in a comparison.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from specray.bench.variants import BenchRequest, EngineVariant
from specray.engine.draft_budget.costs import StepCosts, StepShape
from specray.engine.draft_budget.static import StaticBudget
from specray.engine.request_log import LoggedRequest
from specray.llm import LLM

NUM_TOKENS = 24  # of each request and turn
NUM_TURNS = 4  # of each method at each batch size
# Options that end a text early, or that cost something beside the step.
_LEFT_OUT: dict[str, Any] = {"stop": [], "stop_token_ids": [], "logprobs": None, "prompt_logprobs": None}


class MeasuringBudget(StaticBudget):
    """Whole trees, as a replay has them; the times of their steps are kept."""

    learns = True

    def __init__(self, max_step_draft_tokens: int | None) -> None:
        super().__init__(max_step_draft_tokens)
        self.costs = StepCosts()

    def record_step(self, shape: StepShape, target_seconds: float, rest_seconds: float | None) -> None:
        self.costs.observe(shape, target_seconds, rest_seconds)


def measure_costs(
    engines: Mapping[str, LLM],
    requests: Sequence[LoggedRequest],
    batch_sizes: Sequence[int],
    progress: bool = False,
) -> dict[str, StepCosts]:
    """Costs by name of the engine. Of contexts that are too long for a batch the ends are used."""
    costs = {}
    for name, llm in engines.items():
        budget = MeasuringBudget(llm.config.speculative.max_step_draft_tokens)
        llm.engine.drafter.replace(llm.config.speculative, llm.engine.capacity.max_draft_tokens, budget)
        costs[name] = budget.costs
    variants = [EngineVariant(name, llm) for name, llm in engines.items()]
    with tqdm(
        total=len(batch_sizes) * NUM_TURNS * len(variants), desc="costs", unit="run", disable=not progress
    ) as bar:
        for size in batch_sizes:
            room = min(llm.engine.admission.max_length for llm in engines.values()) // size - 2 * NUM_TOKENS
            asked = [_middle(each, max(1, room)) for each in _spread(requests, size * NUM_TURNS)]
            for turn in range(NUM_TURNS):
                for place in range(len(variants)):
                    variants[(turn + place) % len(variants)].run(asked[turn::NUM_TURNS], size, f"{size}-{turn}")
                    bar.update()
    return costs


def _spread(requests: Sequence[LoggedRequest], count: int) -> list[LoggedRequest]:
    """`count` requests at equal distances in the order of their lengths."""
    by_length = sorted(requests, key=lambda each: each.num_prompt_tokens + each.num_output_tokens)
    return [by_length[(2 * place + 1) * len(requests) // (2 * count)] for place in range(count)]


def _middle(logged: LoggedRequest, room: int) -> BenchRequest:
    """Continues the request from the middle of its text."""
    params = replace(logged.params, **_LEFT_OUT, max_tokens=NUM_TOKENS, min_tokens=0, ignore_eos=True)
    context = [*logged.prompt_token_ids, *logged.output_token_ids[: logged.num_output_tokens // 2]]
    return BenchRequest(context[-room:], params)
