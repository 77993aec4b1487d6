"""Gives every request one of several drafters when it is admitted, and learns from the steps that follow."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from specray.config import MAX_TREE_NODES, SpeculativeConfig
from specray.engine.drafter_selection.bandit import DrafterBandit, DrafterChoice
from specray.engine.drafter_selection.paired_gain import PairedGain
from specray.engine.drafter_selection.text_kind import NUM_TOKENS, text_kind
from specray.engine.request import Emitted, Request
from specray.engine.stats import EngineStats
from specray.engine.step_times import UsualTimes
from specray.metrics import METRICS
from specray.step import DrafterUse, StepResult

PAIRED = tuple(f"specray_shadow_pair_{field}" for field in ("requests", "trees", "gain", "gain_squares"))  # PairedGain
LOWER_BOUND = "specray_shadow_gain_lower_bound"
OBSERVED_TOKENS = 32  # a request's tokens are passed to the bandit in portions of this size, and at its end


class DrafterSelector:
    """The drafters of `speculative.drafters`, and which request gets which.

    `decode` is the text of token ids. `random` decides which requests the shadow drafts for.
    """

    def __init__(
        self,
        speculative: SpeculativeConfig,
        decode: Callable[[Sequence[int]], str],
        stats: EngineStats,
        random: Random,
    ) -> None:
        self._decode = decode
        self._stats = stats
        self._random = random
        self._bandit = DrafterBandit()
        self._usual = UsualTimes()
        self._members: dict[str, SpeculativeConfig] = {}
        self._compared: tuple[str | None, str | None] = None, None  # default and shadow
        self.use(speculative)

    def use(self, speculative: SpeculativeConfig) -> None:
        """Choose among other drafters from now on, or by another rule. Requests keep theirs."""
        members = speculative.members if speculative.drafters else {}
        if members != self._members or (speculative.default_drafter, speculative.shadow.drafter) != self._compared:
            for metric in (*PAIRED, LOWER_BOUND):  # what was compared is another thing from now on
                self._stats.labelled[metric] = dict.fromkeys(members, 0)
        self._compared = speculative.default_drafter, speculative.shadow.drafter
        for name, member in self._members.items():
            if members.get(name) != member:
                self._bandit.forget(name)
        self._members, self._default = members, speculative.default_drafter
        self._shadow, self._share = speculative.shadow.drafter, speculative.shadow.share
        others = [name for name in members if name != self._shadow]
        self._replaced = self._default or (others[0] if len(others) == 1 else None)  # None: the bandit chooses
        sizes = {name: member.num_nodes for name, member in members.items()}
        self._most = {name: MAX_TREE_NODES if size is None else size - 1 for name, size in sizes.items()}
        _name_drafters(self._stats, members)

    def assign(self, request: Request) -> None:
        """Choose the drafter of a new request."""
        if not self._members:
            return
        spec = request.spec
        tail = spec.prompt_token_ids[-NUM_TOKENS:]
        kind = text_kind(tail, self._decode(tail))
        wanted = spec.drafter if spec.drafter in self._members else self._default
        if wanted is None:
            wanted = self._bandit.choose(spec.tenant, kind, [name for name in self._members if name != self._shadow])
        else:
            self._bandit.start(spec.tenant, kind, wanted)
        # A client's own choice says nothing about the drafter that the shadow would replace.
        may_have_shadow = self._shadow is not None and self._replaced in (None, wanted) and request.is_typical
        is_shadowed = may_have_shadow and self._random.random() < self._share
        request.acceptance.drafter = wanted
        shadow = self._shadow if is_shadowed else None
        most = max(self._most[name] for name in (wanted, shadow) if name is not None)
        request.drafter = DrafterChoice(wanted, shadow or "", kind, most)
        if not spec.is_probe:
            self._stats.add_labelled("specray_drafter_requests_total", wanted)

    def record_step(self, emitted: Sequence[Emitted], result: StepResult, seconds: float) -> None:
        """Learn from a step: what each request generated, and its share of the step's `seconds`."""
        draft_seconds: dict[str, float] = {}
        for use in result.drafters:
            draft_seconds[use.drafter] = draft_seconds.get(use.drafter, 0.0) + use.seconds
            _count_drafter_use(self._stats, use)
        shadow_seconds = sum(use.shadow_seconds for use in result.drafters)
        rows = [
            StepRow(self.drafter_of(part.request), part.num_tokens + part.result.num_draft_tokens) for part in emitted
        ]
        shares = step_shares(rows, max(0.0, seconds - shadow_seconds), draft_seconds)
        if emitted and all(part.num_tokens == 1 and part.result.token_ids for part in emitted):
            self._usual.observe(len(emitted), sum(len(part.result.token_ids) for part in emitted), seconds)
        usual = self._usual.of(len(emitted))
        for part, share in zip(emitted, shares, strict=True):
            room = part.request.max_length - len(part.request.token_ids)  # the output ends there
            choice, num_tokens = part.request.drafter, min(len(part.result.token_ids), room)
            if choice is None or not num_tokens or part.num_tokens > 1 or not part.request.num_output_tokens:
                continue  # the end of a prompt has no drafts
            if not part.request.is_typical:
                continue
            if part.request.in_flight[0].num_drafts:  # the step's limit: a shadow's trees count where drafts may be
                _count_drafter_tree(
                    self._stats, self.drafter_of(part.request), part.result.num_draft_tokens, num_tokens - 1
                )
            if usual is not None:
                choice.tokens, choice.time = choice.tokens + num_tokens, choice.time + share / usual
                if choice.tokens >= OBSERVED_TOKENS:
                    self._observe(part.request, choice)

    def end(self, request: Request) -> None:
        """A request has ended."""
        if (choice := request.drafter) is None:
            return
        if choice.tokens:
            self._observe(request, choice)
        if choice.name in self._members:
            self._bandit.end(request.spec.tenant, choice.kind, choice.name)

    def drafter_of(self, request: Request) -> str:
        """The drafter that drafts for a request: the first one if the request's own was dropped."""
        name = "" if request.drafter is None else request.drafter.name
        return name if name in self._members else next(iter(self._members), name)

    def _observe(self, request: Request, choice: DrafterChoice) -> None:
        if choice.name in self._members:  # it may have been dropped
            self._bandit.observe(request.spec.tenant, choice.kind, choice.name, choice.tokens, choice.time)
        choice.tokens, choice.time = 0, 0.0


def _name_drafters(stats: EngineStats, names: Iterable[str]) -> None:
    """Start their series at zero."""
    for metric in METRICS:
        if metric.label == "drafter" and metric.kind == "counter":
            series = stats.labelled[metric.name]
            series |= {name: 0.0 for name in names if name not in series}


def _count_drafter_tree(stats: EngineStats, drafter: str, num_draft_tokens: int, num_accepted: int) -> None:
    """Count one verified tree."""
    stats.add_labelled("specray_drafter_verify_steps_total", drafter)
    stats.add_labelled("specray_drafter_draft_tokens_total", drafter, num_draft_tokens)
    stats.add_labelled("specray_drafter_accepted_tokens_total", drafter, num_accepted)


def _count_drafter_use(stats: EngineStats, use: DrafterUse) -> None:
    """Count what a drafter did for a step."""
    stats.add_labelled("specray_drafter_seconds_total", use.drafter, use.seconds + use.shadow_seconds)
    stats.add_labelled("specray_drafter_faults_total", use.drafter, use.num_faults)
    stats.add_labelled("specray_shadow_trees_total", use.drafter, use.num_shadow_trees)
    stats.add_labelled("specray_shadow_draft_tokens_total", use.drafter, use.num_shadow_drafts)
    stats.add_labelled("specray_shadow_accepted_tokens_total", use.drafter, use.num_shadow_accepted)
    pairs = use.num_shadow_requests, use.num_shadow_pairs, use.shadow_gain, use.shadow_gain_squares
    for metric, amount in zip(PAIRED, pairs, strict=True):
        stats.add_labelled(metric, use.drafter, amount)
    if use.num_shadow_requests:
        interval = PairedGain(*(stats.labelled[metric][use.drafter] for metric in PAIRED)).interval
        if interval is not None:
            stats.labelled[LOWER_BOUND][use.drafter] = interval[0]


class StepRow(NamedTuple):
    """One request's part of a step."""

    drafter: str
    num_tokens: int  # computed by the target: known tokens and drafts


def step_shares(rows: Sequence[StepRow], seconds: float, draft_seconds: Mapping[str, float]) -> list[float]:
    """Seconds of each row: those of its drafter, shared by the drafter's rows, and of the rest by tokens computed.

    `draft_seconds` are those of each drafter for its rows, and part of the step's `seconds`. Where a drafter runs in
    its own process they overlap with the host's work; the rest is then counted as shorter for all drafters.
    """
    counts = Counter(row.drafter for row in rows)
    rest = max(0.0, seconds - sum(draft_seconds.get(name, 0.0) for name in counts))
    num_tokens = max(1, sum(row.num_tokens for row in rows))
    return [
        rest * row.num_tokens / num_tokens + draft_seconds.get(row.drafter, 0.0) / counts[row.drafter] for row in rows
    ]
