"""Sampling options of requests: per request on the host, and as tensors of a batch. Masks of grammars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from specray.step import SamplingOptions

GREEDY_BELOW = 1e-5  # smaller temperatures would overflow float32
_MASK_BITS = 32  # of a word


@dataclass(slots=True, eq=False)
class SamplingState:
    """One request's sampling options and the token counts that its penalties need."""

    options: SamplingOptions
    num_output_tokens: int = 0
    output_counts: Tensor | None = None  # float32 [V], generated tokens; only with presence or frequency penalty
    is_known: Tensor | None = None  # bool [V], prompt and generated tokens; only with repetition penalty
    is_allowed: Tensor | None = None  # bool [V]; only with allowed_token_ids
    recent: list[int] = field(default_factory=list)  # the last generated tokens, as far as banned sequences reach
    is_sampled: bool = field(init=False)  # whether the temperature is above 0
    stop_ids: frozenset[int] = field(init=False)  # tokens that end the request
    adjusts_until: float = field(init=False)  # logits are adjusted while fewer tokens than this were generated

    def __post_init__(self) -> None:
        options, tensors = self.options, (self.output_counts, self.is_known, self.is_allowed)
        self.is_sampled = options.temperature >= GREEDY_BELOW
        self.stop_ids = frozenset(options.eos_token_ids)
        is_adjusted = any(t is not None for t in tensors) or bool(options.logit_bias or options.banned_sequences)
        self.adjusts_until = inf if is_adjusted else options.min_tokens if options.eos_token_ids else 0

    @classmethod
    def start(
        cls,
        options: SamplingOptions,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        vocab_size: int,
        device: torch.device,
    ) -> "SamplingState":
        """The state after `token_ids`, of which the first `num_prompt_tokens` are the prompt."""
        output_counts = is_known = is_allowed = None
        if options.presence_penalty or options.frequency_penalty:
            generated = torch.tensor(token_ids[num_prompt_tokens:], dtype=torch.int64, device=device)
            output_counts = torch.bincount(generated, minlength=vocab_size).float()
        if options.repetition_penalty != 1.0:
            is_known = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            is_known[torch.tensor(token_ids, dtype=torch.int64, device=device)] = True
        if options.allowed_token_ids is not None:
            is_allowed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            is_allowed[torch.tensor(options.allowed_token_ids, dtype=torch.int64, device=device)] = True
        recent = list(token_ids[num_prompt_tokens:][-_reach(options) :]) if options.banned_sequences else []
        return cls(options, len(token_ids) - num_prompt_tokens, output_counts, is_known, is_allowed, recent)

    def end_with(self, token_ids: Sequence[int], num_before: int) -> bool:
        """Whether one of these tokens ends the request; `num_before` tokens were generated before them."""
        if self.stop_ids.isdisjoint(token_ids):
            return False
        may_end = max(0, self.options.min_tokens - 1 - num_before)  # simulated acceptance ignores the mask
        return not self.stop_ids.isdisjoint(token_ids[may_end:])

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens."""
        return self.options.top_k > 0 or self.options.top_p < 1.0 or self.options.min_p > 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before temperature: by bias, penalties or tokens that are not allowed (yet)."""
        return self.num_output_tokens < self.adjusts_until

    @property
    def needs_walk(self) -> bool:
        """Whether tokens depend on the path in a draft tree, or logprobs are wanted: trees are walked by depth."""
        return self.adjusts_logits or self.options.logprobs is not None

    @property
    def reads_largest_logit(self) -> bool:
        """Whether tokens depend on nothing but the largest logit of each node."""
        return not self.is_sampled and not self.needs_walk

    @property
    def masks_end_tokens(self) -> bool:
        return self.num_output_tokens < self.options.min_tokens and bool(self.options.eos_token_ids)

    def banned_tokens(self) -> list[int]:
        """The tokens that would complete a banned sequence."""
        sequences = self.options.banned_sequences or ()
        return [s[-1] for s in sequences if len(s) == 1 or self.recent[1 - len(s) :] == s[:-1]]

    def append(self, token_id: int) -> None:
        """Count a token that was emitted."""
        self.num_output_tokens += 1
        if self.output_counts is not None:
            self.output_counts[token_id] += 1
        if self.is_known is not None:
            self.is_known[token_id] = True
        if self.options.banned_sequences:
            self.recent = [*self.recent, token_id][-_reach(self.options) :]


def _reach(options: SamplingOptions) -> int:
    """How many earlier tokens banned sequences look at, at most."""
    return max(map(len, options.banned_sequences or [[]]))


class OptionColumns(NamedTuple):
    """Sampling options of n rows as tensors."""

    seeds: Tensor  # int64 [n]
    temperature: Tensor  # float32 [n]
    top_k: Tensor  # int64 [n], 0: off
    top_p: Tensor  # float32 [n]
    min_p: Tensor  # float32 [n]


class SamplingBatch:
    """Sampling options of n rows: tensors for the device, states for the host's choice of a code path.

    The tensors are made when one of them is first read: on a CPU greedy requests need none. `states` is empty in a
    padded batch, where nothing depends on the host.
    """

    def __init__(self, states: list[SamplingState], make_columns: Callable[[], OptionColumns]) -> None:
        self.states = states
        self._make_columns = make_columns

    @classmethod
    def of(cls, states: Sequence[SamplingState], device: torch.device) -> "SamplingBatch":
        """Tensors from the states' options."""

        def make_columns() -> OptionColumns:
            options = [state.options for state in states]
            numbers = torch.tensor([(o.temperature, o.top_p, o.min_p) for o in options], dtype=torch.float32)
            temperature, top_p, min_p = numbers.view(-1, 3).to(device).unbind(1)
            integers = torch.tensor([(o.seed, o.top_k) for o in options], dtype=torch.int64)
            seeds, top_k = integers.view(-1, 2).to(device).unbind(1)
            return OptionColumns(seeds, temperature, top_k, top_p, min_p)

        return cls(list(states), make_columns)

    def of_rows(self, rows: Tensor) -> "SamplingBatch":
        """Rows `rows` int64 [m], of which one may be named more than once; without states."""
        return SamplingBatch([], lambda: OptionColumns(*(part.index_select(0, rows) for part in self.columns)))

    def select(self, rows: Sequence[int]) -> "SamplingBatch":
        """These rows, in this order, with their states."""
        if len(rows) == len(self.states) and list(rows) == list(range(len(rows))):
            return self
        index = torch.tensor(rows, dtype=torch.int64).to(self.seeds.device)
        return SamplingBatch([self.states[row] for row in rows], lambda: self.of_rows(index).columns)

    @cached_property
    def columns(self) -> OptionColumns:
        return self._make_columns()

    @property
    def seeds(self) -> Tensor:
        return self.columns.seeds

    @property
    def temperature(self) -> Tensor:
        return self.columns.temperature

    @property
    def top_k(self) -> Tensor:
        return self.columns.top_k

    @property
    def top_p(self) -> Tensor:
        return self.columns.top_p

    @property
    def min_p(self) -> Tensor:
        return self.columns.min_p


class TokenMask(NamedTuple):
    """The tokens that grammars allow at n rows of a step's logits; all are allowed at the others.

    One bit a token, as llguidance packs them.
    """

    rows: Tensor  # int64 [n], on the host
    bits: Tensor  # int32 [n, ceil(V / 32)], on the host: bit i of word j is set if token 32 * j + i is allowed


def num_mask_words(vocab_size: int) -> int:
    """Words of a row of a mask's bits."""
    return -(-vocab_size // _MASK_BITS)
