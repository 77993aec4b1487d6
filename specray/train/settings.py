"""Options and counters of a training run. `specray train eagle3 --help` describes the options."""

from dataclasses import dataclass
from typing import Any

# Options that are used before the first step, or that shape the head or the order of the data.
_FIXED = (
    "batch_tokens",
    "max_length",
    "kind",
    "seed",
    "bias",
    "optimizer",
    "draft_vocab_size",
    "intermediate_size",
    "num_layers",
    "markov_rank",
    "layers",
    "start",
    "init_head",
)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Options of a run, stored in checkpoints and model cards."""

    kind: str  # eagle3, parallel, dflash, dspark, eagle2, mtp or draft
    tokens: int
    unroll: int = 3
    step_decay: float = 0.8
    total_variation: float = 0.0  # its weight in the loss; the rest is cross-entropy
    draft_vocab_size: int = 8192
    intermediate_size: int | None = None
    num_layers: int = 1  # the head's layers
    markov_rank: int = 0  # of a DSpark head's Markov rows
    layers: str = "4"  # the target's layers in a draft model: their number, or a list
    batch_tokens: int = 1024
    max_length: int = 2048
    learning_rate: float = 1e-3
    optimizer: str = "muon"
    weight_decay: float = 0.0
    warmup: float = 0.02
    decay: float = 0.25
    clip: float = 1.0
    seed: int = 0
    bias: bool = False
    start: str = "identity"
    init_head: str | None = None
    weights: str = "bfloat16"  # type of the exported head's: bfloat16 or int8
    dtype: str = "auto"
    validate_every: int = 500_000
    checkpoint_minutes: float = 10.0
    max_minutes: float | None = None

    def changed(self, saved: dict[str, Any]) -> str | None:
        """The first option that differs from a checkpoint's and must not change when a run resumes."""
        return next(
            (
                name
                for name in _FIXED
                if saved.get(name, getattr(self, name)) != getattr(self, name)  # older checkpoints have fewer options
            ),
            None,
        )

    def rate(self, tokens: int) -> float:
        """Learning rate after `tokens` tokens: linear warm-up, constant, then linear decay to 1 %.

        The schedule depends on --tokens, which may change when a run resumes.
        """
        warm = self.warmup * self.tokens
        left = (self.tokens - tokens) / max(self.decay * self.tokens, 1.0)
        factor = min((tokens + self.batch_tokens) / warm if warm else 1.0, 1.0, max(left, 0.01))
        return self.learning_rate * factor


@dataclass(slots=True)
class Counters:
    """A run's progress, stored in checkpoints."""

    steps: int = 0
    tokens: int = 0  # labels used, repeated ones counted each time
    next_validation: int = 0  # number of tokens at which it is due
    seconds: float = 0.0
    tokens_before: int = 0  # tokens that the head had learnt from before this run

    @property
    def all_tokens(self) -> int:
        return self.tokens_before + self.tokens
