"""How many tokens are drafted for each request of a step. No choice changes a request's text.

`budget` has the interface. `static` shares a fixed number among the requests. `auto` verifies drafts while
they raise the tokens per second, and `trials` says when it tries other numbers; `graphs` does so where steps are CUDA
graphs. `step_timer` measures steps, `costs` estimates their time, `store` keeps that for the next start, and
`acceptance` and `by_place` estimate how many drafts are accepted.
"""

from specray.config import EngineConfig, SpeculativeConfig, with_values
from specray.engine.draft_budget.auto import AutoBudget
from specray.engine.draft_budget.budget import DraftBudget, Drafting
from specray.engine.draft_budget.graphs import GraphBudget
from specray.engine.draft_budget.static import StaticBudget
from specray.engine.draft_budget.step_timer import StepTimer
from specray.engine.draft_budget.store import CostStore
from specray.engine.executor import Capacity

__all__ = ["DraftBudget", "Drafting", "StepTimer", "budget_kind", "make_budget"]


def budget_kind(speculative: SpeculativeConfig, capacity: Capacity) -> str:
    """`speculative.budget`, or what it means where it is null."""
    # Without graphs, costs are learnt by trials, which change the text where a seed has several.
    may_learn = capacity.learns_budget and (capacity.has_graphs or capacity.has_one_text)
    learns = may_learn and speculative.ignores_drafts and speculative.has_drafter
    return speculative.budget or ("auto" if learns else "static")


def make_budget(config: EngineConfig, speculative: SpeculativeConfig, capacity: Capacity) -> DraftBudget:
    """The budget of `budget_kind`; costs that were learnt before are read."""
    most = speculative.max_step_draft_tokens
    if budget_kind(speculative, capacity) == "static":
        return StaticBudget(most, speculative.plain_share)
    if capacity.has_graphs:
        return GraphBudget(most, speculative.plain_share)
    store = CostStore.of(with_values(config, speculative=speculative), capacity)
    return AutoBudget(most, store.load(), store.save)
