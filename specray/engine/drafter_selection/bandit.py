"""A bandit that learns which drafter generates the most tokens in a given time, per tenant and kind of text.

It is discounted UCB: the drafter with the highest optimistic estimate is chosen. The less a drafter was used, the more
optimistic its estimate, and old measurements fade, so a drafter that was slower is tried again later. A new tenant
starts from the measurements of all tenants. There is no randomness: equal measurements give equal choices.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt

REQUEST_TOKENS = 128  # a unit of experience: the tokens of one request differ far less than those of two
MEMORY_TOKENS = 64 * REQUEST_TOKENS  # after this many tokens of its kind, a measurement counts e times less
OPTIMISM = 0.3  # relative error of an estimate from one unit of experience
LEAST_TOKENS = 1.0  # experience that has faded to less is none; its numbers would end as zeros
PRIOR_TOKENS = 2 * REQUEST_TOKENS  # of all tenants' experience, for a tenant without its own
UNKNOWN_SHARE = 0.25  # of the running requests: a new drafter, which may be slow, has no more beside known ones
MAX_TENANTS = 1024  # the one that was not seen for the longest time is forgotten


@dataclass(slots=True, eq=False)
class DrafterChoice:
    """Which of several drafters a request has, and what it generated since this was last counted."""

    name: str
    shadow: str  # the drafter that is measured beside it; empty: none
    kind: Hashable
    max_draft_tokens: int  # drafts of the largest tree of the drafter or its shadow
    tokens: int = 0
    time: float = 0.0  # duration in units of what a token usually takes


@dataclass(slots=True)
class Experience:
    """Tokens that requests with one drafter generated, and the time that it took; both fade."""

    tokens: float = 0.0
    seconds: float = 0.0
    num_running: int = 0  # requests that were given this drafter and have not ended

    def fade(self, factor: float) -> None:
        self.tokens, self.seconds = self.tokens * factor, self.seconds * factor


@dataclass(slots=True)
class Cell:
    """The drafters' experience with one kind of text, of one tenant or of all."""

    drafters: dict[str, Experience] = field(default_factory=dict)

    def of(self, drafter: str) -> Experience:
        return self.drafters.setdefault(drafter, Experience())

    def observe(self, drafter: str, tokens: float, seconds: float) -> None:
        for experience in self.drafters.values():
            experience.fade(exp(-tokens / MEMORY_TOKENS))
        experience = self.of(drafter)
        experience.tokens, experience.seconds = experience.tokens + tokens, experience.seconds + seconds


class DrafterBandit:
    """Chooses drafters by name. Times only have to be comparable with each other."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._all: dict[Hashable, Cell] = {}  # by kind of text
        self._tenants: OrderedDict[str, dict[Hashable, Cell]] = OrderedDict()

    def choose(self, tenant: str, kind: Hashable, drafters: Sequence[str]) -> str:
        """The drafter for a new request. The first of `drafters` wins ties. `end` must follow."""
        own, of_all = self._cells(tenant, kind)
        estimates = {name: _estimate(own.of(name), of_all.of(name)) for name in drafters}
        known = {name for name in drafters if estimates[name][0] != inf}
        if known:
            most = UNKNOWN_SHARE * sum(of_all.of(name).num_running for name in drafters)
            drafters = [name for name in drafters if name in known or of_all.of(name).num_running <= most]
        total = sum(tokens for _, tokens in estimates.values()) / REQUEST_TOKENS
        chosen = max(drafters, key=lambda name: _optimistic(*estimates[name], total))
        self.start(tenant, kind, chosen)
        return chosen

    def start(self, tenant: str, kind: Hashable, drafter: str) -> None:
        """A request was given this drafter, by `choose` or otherwise."""
        for cell in self._cells(tenant, kind):
            cell.of(drafter).num_running += 1

    def observe(self, tenant: str, kind: Hashable, drafter: str, tokens: float, seconds: float) -> None:
        """A request generated `tokens` in `seconds` of its own."""
        for cell in self._cells(tenant, kind):
            cell.observe(drafter, tokens, seconds)

    def end(self, tenant: str, kind: Hashable, drafter: str) -> None:
        """A request has ended."""
        for cell in self._cells(tenant, kind):
            experience = cell.of(drafter)
            experience.num_running = max(0, experience.num_running - 1)  # its tenant may have been forgotten meanwhile

    def forget(self, drafter: str) -> None:
        """Forget a drafter that was dropped: another one may get its name."""
        for cells in (self._all, *self._tenants.values()):
            for cell in cells.values():
                cell.drafters.pop(drafter, None)

    def _cells(self, tenant: str, kind: Hashable) -> tuple[Cell, Cell]:
        """(the tenant's own, that of all tenants)."""
        cells = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        while len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        return cells.setdefault(kind, Cell()), self._all.setdefault(kind, Cell())


def _estimate(own: Experience, of_all: Experience) -> tuple[float, float]:
    """(tokens per second, the tokens behind this estimate). The rate is infinite if nothing is known.

    Requests that still run count as experience to come, so that a burst is spread over the drafters.
    """
    if of_all.tokens < LEAST_TOKENS or not of_all.seconds:
        return inf, REQUEST_TOKENS * float(of_all.num_running)
    share = min(1.0, PRIOR_TOKENS / of_all.tokens)
    tokens, seconds = own.tokens + share * of_all.tokens, own.seconds + share * of_all.seconds
    return tokens / seconds, tokens + REQUEST_TOKENS * own.num_running


def _optimistic(rate: float, tokens: float, total: float) -> tuple[float, float]:
    """Compares drafters: by their optimistic rate; unknown ones first, those with the fewest requests before others."""
    units = tokens / REQUEST_TOKENS
    if rate == inf:
        return rate, -units
    return rate * (1 + OPTIMISM * sqrt(log(1 + total) / max(units, 1e-3))), 0.0
