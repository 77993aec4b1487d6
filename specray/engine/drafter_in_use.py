"""What an engine keeps for the drafter that it plans for, and how another one takes its place between two steps."""

from collections.abc import Callable, Sequence
from random import Random

from specray.config import EngineConfig, SpeculativeConfig
from specray.engine.draft_budget import DraftBudget, StepTimer, make_budget
from specray.engine.draft_limits import DraftLimits
from specray.engine.drafter_selection.selector import DrafterSelector
from specray.engine.executor import Capacity
from specray.engine.recorder import StatsRecorder
from specray.engine.stats import EngineStats
from specray.engine.step_times import MeasuredSpeedup
from specray.step import BucketSeconds


class DrafterInUse:
    """Its name, its timer, and with several drafters their selector; it sets the budget and the size of `limits`."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        limits: DraftLimits,
        stats: EngineStats,
        record: StatsRecorder,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """`decode` is the text of token ids."""
        self._config, self._capacity, self._limits = config, capacity, limits
        self._stats, self._record, self._decode = stats, record, decode
        self.name = config.speculative.drafter_name or "none"
        self.selector = self._make_selector(config.speculative)  # None until there are several drafters
        self._speedup = MeasuredSpeedup(stats)
        self.timer = self._make_timer(config.speculative)
        self.bucket_seconds: Sequence[BucketSeconds] = ()  # of the last result that had any

    def new_budget(self, speculative: SpeculativeConfig, max_draft_tokens: int) -> DraftBudget:
        """The budget for another drafter. Thread-safe; reads a file."""
        return make_budget(self._config, speculative, self._capacity._replace(max_draft_tokens=max_draft_tokens))

    def replace(self, speculative: SpeculativeConfig, max_draft_tokens: int, budget: DraftBudget | None = None) -> None:
        """Plan for another drafter. The worker may switch earlier or later, because it truncates trees to the plan.

        `budget` is that of `new_budget`, which is called here if it is None.
        """
        self._limits.budget = budget or self.new_budget(speculative, max_draft_tokens)
        if any(bucket.num_nodes > max_draft_tokens for bucket in self.bucket_seconds):  # else of smaller trees only
            self._limits.budget.record_bucket_seconds(self.bucket_seconds)
        self._limits.max_draft_tokens = max_draft_tokens
        self._record.drafter(speculative.drafter_name)
        self.name = speculative.drafter_name or "none"
        if self.selector is None:
            self.selector = self._make_selector(speculative)
        else:
            self.selector.use(speculative)
        self.timer = self._make_timer(speculative)

    def record_bucket_seconds(self, buckets: Sequence[BucketSeconds]) -> None:
        """The worker has measured its CUDA graphs, whose times are the same for every drafter."""
        self.bucket_seconds = buckets
        self._limits.budget.record_bucket_seconds(buckets)

    def _make_selector(self, speculative: SpeculativeConfig) -> DrafterSelector | None:
        return DrafterSelector(speculative, self._decode, self._stats, Random(0)) if speculative.drafters else None

    def _make_timer(self, speculative: SpeculativeConfig) -> StepTimer | None:
        """None where nothing is learnt from steps' times: no drafter is chosen, and no plain step is asked for."""
        learns = self._limits.budget.learns or self.selector is not None or speculative.plain_share > 0
        return StepTimer(self._speedup.record) if learns else None
