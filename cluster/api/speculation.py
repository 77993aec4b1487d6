"""What a client may say of speculation, and what the server says of it: limits of a request's drafts, capabilities.

None of it changes a text: drafts cost or save time only. Not here: drafters for everyone (`admin`).
"""

from typing import Any

from cluster.api.errors import short_repr
from cluster.api.protocol import UNSUPPORTED, Speculation
from specray.config import SpeculativeConfig
from specray.errors import InvalidRequestError
from specray.sampling_params import SamplingParams
from specray.step import UNLIMITED, DraftLimit

Json = dict[str, Any]

NO_DRAFTING = DraftLimit(0, 0)
EXACT_ARITHMETIC = "float32"
ROUNDING = (
    "this rounds differently in batches of different shapes, so two tokens that are nearly as likely can trade places; "
    "with dtype: float32 and quantization: null they do not"
)


class SpeculationCapabilities:
    """What requests may ask for: the drafter in force, and trees no larger than it makes."""

    def __init__(self, speculative: SpeculativeConfig, max_draft_tokens: int, arithmetic: str) -> None:
        self._speculative = speculative
        self._arithmetic = arithmetic  # a type, and what weights are quantised to
        self.algorithm = speculative.algorithm
        self.num_draft_tokens = max_draft_tokens + 1
        self.num_steps = speculative.num_steps or max_draft_tokens  # what is automatic makes no deeper trees than that

    def draft_limit(self, wanted: Speculation | None) -> DraftLimit:
        """The wish as a limit; InvalidRequestError for one that cannot be granted."""
        if wanted is None:
            return UNLIMITED
        named = wanted.model_dump(exclude_none=True)
        if wanted.enabled is False:
            if others := sorted(named.keys() - {"enabled"}):
                raise _refusal(others[0], named[others[0]], "has no effect with enabled=false; leave one of them out")
            return NO_DRAFTING
        if named and self.algorithm is None:
            name, value = next(iter(named.items()))
            raise _refusal(name, value, "cannot be had, for this server decodes plainly; leave it out")
        if wanted.algorithm not in (None, self.algorithm):
            raise _refusal("algorithm", wanted.algorithm, f"is not served here; use {self.algorithm!r} or leave it out")
        for name in ("num_steps", "num_draft_tokens"):
            if named.get(name, 0) > (most := getattr(self, name)):
                raise _refusal(name, named[name], f"is more than this server drafts; at most {most}")
        num_tokens = UNLIMITED.num_tokens if wanted.num_draft_tokens is None else wanted.num_draft_tokens - 1
        return DraftLimit(num_tokens, wanted.num_steps or UNLIMITED.num_steps)

    def capabilities(self) -> Json:
        """What is exact, lossy or refused here, and the limits of a request's `speculative`."""
        drafts = self.algorithm is not None
        return {
            "algorithm": self.algorithm,
            "request_limits": {
                "enabled": [True, False] if drafts else [False],
                "algorithm": [self.algorithm] if drafts else [],
                "num_steps": {"min": 1, "max": self.num_steps} if drafts else None,
                "num_draft_tokens": {"min": 2, "max": self.num_draft_tokens} if drafts else None,
            },
            "output": _output(self._speculative, self._arithmetic),
            "options": {"exact": EXACT_OPTIONS, "refused": sorted(UNSUPPORTED)},
        }


# Each takes part in the one law by which a token is chosen, with drafts and without (specray/ops/sampling.py).
EXACT_OPTIONS = sorted(name for name in SamplingParams.__dataclass_fields__)


def _output(speculative: SpeculativeConfig, arithmetic: str) -> Json:
    """Of requests at temperature 0 and above: the plain text, a text by the plain law, or neither."""
    output = {"arithmetic": arithmetic} | _verified_output(speculative)
    return output if arithmetic == EXACT_ARITHMETIC else output | {"one_seed_one_text": False, "rounding": ROUNDING}


def _verified_output(speculative: SpeculativeConfig) -> Json:
    if speculative.is_simulated:
        return {"greedy": "meaningless", "sampled": "meaningless", "one_seed_one_text": False}
    if speculative.is_lossy:
        return {"greedy": "exact", "sampled": "lossy", "one_seed_one_text": False}
    if speculative.verification == "rejection":
        return {"greedy": "exact", "sampled": "exact in law", "one_seed_one_text": False}
    return {"greedy": "exact", "sampled": "exact", "one_seed_one_text": True}


def _refusal(name: str, value: object, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"speculative.{name}={short_repr(value)} {reason}", f"speculative.{name}")
