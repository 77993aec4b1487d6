"""How many tokens are drafted for each request of a step.

`static` shares a fixed number among the requests. `auto` buys drafts in the order of the tokens that they are expected
to bring, while they raise the tokens per second: `acceptance` estimates what a draft brings, `costs` what it takes, and
`allocation` chooses. No choice changes a request's text.
"""

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.draft_budget.auto import AutoBudget
from specray.engine.draft_budget.budget import DraftBudget
from specray.engine.draft_budget.static import StaticBudget
from specray.engine.draft_budget.store import CostStore
from specray.engine.draft_budget.timer import StepTimer
from specray.engine.executor import Capacity

__all__ = ["DraftBudget", "StepTimer", "make_budget"]


def make_budget(config: EngineConfig, speculative: SpeculativeConfig, capacity: Capacity) -> DraftBudget:
    """The budget that `speculative.budget` names; costs that were learnt before are read."""
    most = speculative.max_step_draft_tokens
    if speculative.budget == "static":
        return StaticBudget(most)
    store = CostStore.of(config.model_copy(update={"speculative": speculative}), capacity)
    return AutoBudget(most, store.load(), store.save)
