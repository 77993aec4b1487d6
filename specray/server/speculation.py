"""Speculation options of one request: checking them, and reporting which ones the server accepts.

With exact verification, draft limits change only the speed. Replacing the drafter for all requests lives in
`routes.admin`.
"""

from typing import Any

from specray.config import SpeculativeConfig
from specray.errors import InvalidRequestError
from specray.sampling_params import SamplingParams
from specray.server.chat.protocol import ChatRequest
from specray.server.errors import short_repr
from specray.server.schemas.body import GrammarFields, Speculation
from specray.step import UNLIMITED, DraftLimit

Json = dict[str, Any]

NO_DRAFTING = DraftLimit(0, 0)
ROUNDING = (
    "rounding depends on the shape of the batch, so two tokens of nearly equal probability can swap places; "
    "set deterministic: true, or dtype: float32 and quantization: null on at most two GPUs, to avoid it"
)


class SpeculationCapabilities:
    """The speculation options that requests may set: the current drafter, and trees up to its size."""

    def __init__(
        self, speculative: SpeculativeConfig, max_draft_tokens: int, arithmetic: str, has_one_text: bool
    ) -> None:
        """`arithmetic` is the quantization of the weights and the dtype; see Capacity for `has_one_text`."""
        self._speculative = speculative
        self._arithmetic, self._has_one_text = arithmetic, has_one_text
        self.speculates = speculative.has_drafter
        # Each drafter's algorithm by name; a single drafter has no name.
        self.drafters = {drafter.name: drafter.algorithm for drafter in speculative.drafters}
        self.algorithms = list(dict.fromkeys(self.drafters.values() or filter(None, [speculative.algorithm])))
        self.num_draft_tokens = max_draft_tokens + 1
        depths = [member.num_steps for member in speculative.members.values()]
        # An upper bound where the depth is automatic.
        self.num_steps = max(depth or max_draft_tokens for depth in depths) if depths else max_draft_tokens

    def draft_limit(self, options: Speculation | None) -> DraftLimit:
        """The limit that a request's options set. InvalidRequestError if the server cannot satisfy them."""
        if options is None:
            return UNLIMITED
        given = options.model_dump(exclude_none=True, exclude={"trace"})  # a trace is not a limit
        if options.enabled is False:
            if others := sorted(given.keys() - {"enabled"}):
                raise _error(others[0], given[others[0]], "has no effect with enabled=false; leave one of them out")
            return NO_DRAFTING
        if given and not self.speculates:
            name, value = next(iter(given.items()))
            raise _error(name, value, "is not available, because this server does not speculate; leave it out")
        self._check_drafter(options)
        for name in ("num_steps", "num_draft_tokens"):
            if given.get(name, 0) > (maximum := getattr(self, name)):
                raise _error(name, given[name], f"is more than this server drafts; use at most {maximum}")
        num_tokens = UNLIMITED.num_tokens if options.num_draft_tokens is None else options.num_draft_tokens - 1
        return DraftLimit(num_tokens, options.num_steps or UNLIMITED.num_steps)

    def drafter(self, options: Speculation | None) -> str:
        """The name of the drafter that a request's valid options ask for; empty if the server may choose.

        Of several drafters with an algorithm, it is the default one, or the first that is not only a shadow.
        """
        if options is None:
            return ""
        members = self._speculative.members
        same = [name for name in members if self.drafters.get(name) == options.algorithm]
        return options.drafter or next(iter(same), "")

    def capabilities(self) -> Json:
        """The limits of a request's `speculative`, the exactness of the output, and unsupported options."""
        speculates, named = self.speculates, {"drafter": list(self.drafters)} if self.drafters else {}
        return {
            "algorithm": self._speculative.algorithm,
            **({"drafters": self.drafters} if self.drafters else {}),
            "request_limits": {
                "enabled": [True, False] if speculates else [False],
                "algorithm": self.algorithms,
                **named,
                "num_steps": {"min": 1, "max": self.num_steps} if speculates else None,
                "num_draft_tokens": {"min": 2, "max": self.num_draft_tokens} if speculates else None,
            },
            "output": _output(self._speculative, self._arithmetic, self._has_one_text),
            "options": {
                "exact": EXACT_OPTIONS,
                "refused": sorted(ChatRequest.refused_fields()),
            },
        }

    def _check_drafter(self, options: Speculation) -> None:
        algorithm, name = options.algorithm, options.drafter
        if algorithm is not None and algorithm not in self.algorithms:
            known = " or ".join(map(repr, self.algorithms))
            raise _error("algorithm", algorithm, f"is not served here; use {known} or leave it out")
        if name is None:
            return
        if not self.drafters:
            raise _error("drafter", name, "is not available, because this server has a single drafter; leave it out")
        if name not in self.drafters:
            known = ", ".join(self.drafters)
            off = "; enabled=false turns drafting off" if name == "none" else ""
            raise _error("drafter", name, f"is not served here; use one of {known}, or leave it out{off}")
        if algorithm not in (None, self.drafters[name]):
            raise _error("algorithm", algorithm, f"contradicts drafter={name!r}, which is {self.drafters[name]}")


# Sampling applies each option identically with and without drafts (specray/ops/sampling.py).
EXACT_OPTIONS = sorted(
    ChatRequest.model_fields.keys() & SamplingParams.__dataclass_fields__.keys() | GrammarFields.model_fields.keys()
)


def _output(speculative: SpeculativeConfig, arithmetic: str, has_one_text: bool) -> Json:
    """Exactness of greedy and sampled output: the text of plain decoding, its distribution, or neither."""
    output = {"arithmetic": arithmetic} | _verified_output(speculative)
    return output if has_one_text else output | {"one_seed_one_text": False, "rounding": ROUNDING}


def _verified_output(speculative: SpeculativeConfig) -> Json:
    if speculative.is_simulated:
        return {"greedy": "meaningless", "sampled": "meaningless", "one_seed_one_text": False}
    if speculative.is_lossy:
        return {"greedy": "exact", "sampled": "lossy", "one_seed_one_text": False}
    if speculative.verification == "rejection":
        return {"greedy": "exact", "sampled": "exact in distribution", "one_seed_one_text": False}
    return {"greedy": "exact", "sampled": "exact", "one_seed_one_text": True}


def _error(name: str, value: object, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"speculative.{name}={short_repr(value)} {reason}", f"speculative.{name}")
