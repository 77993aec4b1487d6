"""Gives every request one of several drafters when it is admitted, and learns from the steps that follow."""

from collections.abc import Callable, Sequence
from random import Random

from specray.config import MAX_TREE_NODES, SpeculativeConfig
from specray.engine.drafter_selection.bandit import DrafterBandit
from specray.engine.drafter_selection.choice import DrafterChoice
from specray.engine.drafter_selection.counters import count_drafter_tree, count_drafter_use, name_drafters
from specray.engine.drafter_selection.step_time import StepRow, UsualTimes, step_shares
from specray.engine.drafter_selection.text_kind import NUM_TOKENS, text_kind
from specray.engine.request import Emitted, Request
from specray.engine.stats import EngineStats
from specray.step import UNLIMITED, StepResult

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
        self.use(speculative)

    def use(self, speculative: SpeculativeConfig) -> None:
        """Choose among other drafters from now on, or by another rule. Requests keep theirs."""
        members = speculative.members if speculative.drafters else {}
        for name, member in self._members.items():
            if members.get(name) != member:
                self._bandit.forget(name)
        self._members, self._default = members, speculative.default_drafter
        self._shadow, self._share = speculative.shadow.drafter, speculative.shadow.share
        sizes = {name: member.num_draft_tokens for name, member in members.items()}
        self._most = {name: MAX_TREE_NODES if size is None else size - 1 for name, size in sizes.items()}
        name_drafters(self._stats, members)

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
        may_have_shadow = self._shadow not in (None, wanted) and _is_typical(request)
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
            count_drafter_use(self._stats, use)
        shadow_seconds = sum(use.shadow_seconds for use in result.drafters)
        rows = [StepRow(self._drafter(part), part.num_tokens + part.result.num_draft_tokens) for part in emitted]
        shares = step_shares(rows, max(0.0, seconds - shadow_seconds), draft_seconds)
        if emitted and all(part.num_tokens == 1 and part.result.token_ids for part in emitted):
            self._usual.observe(len(emitted), sum(len(part.result.token_ids) for part in emitted), seconds)
        usual = self._usual.of(len(emitted))
        for part, share in zip(emitted, shares, strict=True):
            room = part.request.max_length - len(part.request.token_ids)  # the output ends there
            choice, num_tokens = part.request.drafter, min(len(part.result.token_ids), room)
            if choice is None or not num_tokens or part.num_tokens > 1 or not part.request.num_output_tokens:
                continue  # the end of a prompt has no drafts
            if not _is_typical(part.request):
                continue
            if part.request.in_flight[0].num_drafts:  # the step's limit: a shadow's trees count where drafts may be
                count_drafter_tree(self._stats, self._drafter(part), part.result.num_draft_tokens, num_tokens - 1)
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

    def _drafter(self, part: Emitted) -> str:
        """The drafter that drafts for a request: the first one if the request's own was dropped."""
        name = "" if part.request.drafter is None else part.request.drafter.name
        return name if name in self._members else next(iter(self._members), name)

    def _observe(self, request: Request, choice: DrafterChoice) -> None:
        if choice.name in self._members:  # it may have been dropped
            self._bandit.observe(request.spec.tenant, choice.kind, choice.name, choice.tokens, choice.time)
        choice.tokens, choice.time = 0, 0.0


def _is_typical(request: Request) -> bool:
    """Whether what the request generates says something about its drafter alone."""
    spec = request.spec
    has_own_trees = spec.draft_limit != UNLIMITED or spec.predicted_token_ids or spec.params.grammar is not None
    return not has_own_trees and not spec.is_probe
