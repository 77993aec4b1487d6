"""One comparison: all variants answer the same prompts, in turns of a few prompts.

Interleaving keeps the comparison fair if the machine's speed drifts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from specray.bench.prompts import Prompt, by_category
from specray.bench.variants import BenchRequest, Run, Variant
from specray.models.tokenizer import render_chat
from specray.sampling_params import SamplingParams

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. Prompt i is answered with seed `seed + i`, in every variant and at any concurrency."""

    concurrency: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    turns: int = 1
    repeats: int = 1
    seed: int = 0
    ignore_eos: bool = False
    length_spread: float = 0.0  # requests' max_tokens differ by up to this share of `max_tokens`
    cache_salt: str = ""  # runs with different salts share no prefix cache


class Key(NamedTuple):
    """Runs of different variants with equal keys are compared."""

    category: str
    chunk: int
    repeat: int
    turn: int


class Record(NamedTuple):
    variant: str
    key: Key
    run: Run


class Chunk(NamedTuple):
    """Prompts of one category that a variant answers before the next variant's turn."""

    category: str
    number: int
    first: int  # the first prompt's index among all
    prompts: list[Prompt]


def compare(
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    progress: bool = False,
    title: str = "measuring",
) -> list[Record]:
    """All records. The order of variants rotates from chunk to chunk."""
    runner = ConversationRunner(tokenizer, settings)
    chunks = list(_chunks(prompts, settings.concurrency))
    for variant in variants:
        runner.warm_up(variant, chunks[0])
    records: list[Record] = []
    total = len(chunks) * settings.repeats * len(variants)
    with tqdm(total=total, desc=title, unit="run", disable=None if progress else True) as bar:
        for repeat in range(settings.repeats):
            for chunk in chunks:
                for variant in _rotated(variants, chunk.number + repeat):
                    bar.set_postfix_str(variant.name, refresh=True)
                    records += runner.run(variant, chunk, repeat)
                    bar.update()
    return records


class ConversationRunner:
    """Runs conversations turn by turn; each turn follows the variant's own answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def warm_up(self, variant: Variant, chunk: Chunk) -> None:
        """Run one prompt, so that one-time costs are not measured."""
        request = self._bench_request([{"role": "user", "content": chunk.prompts[0].turns[0]}], chunk.first)
        short = request._replace(params=replace(request.params, max_tokens=WARM_UP_TOKENS))
        variant.run([short], self._settings.concurrency, cache_salt=f"{self._settings.cache_salt}warm-up")

    def run(self, variant: Variant, chunk: Chunk, repeat: int) -> Iterator[Record]:
        """One record per turn. Repeats have different cache salts, so that they share no cached answers."""
        conversations: list[list[dict[str, str]]] = [[] for _ in chunk.prompts]
        for turn in range(self._settings.turns):
            asked = [i for i, prompt in enumerate(chunk.prompts) if turn < len(prompt.turns)]
            if not asked:
                return
            for i in asked:
                conversations[i].append({"role": "user", "content": chunk.prompts[i].turns[turn]})
            requests = [self._bench_request(conversations[i], chunk.first + i) for i in asked]
            salt = f"{self._settings.cache_salt}repeat-{repeat}"
            run = variant.run(requests, self._settings.concurrency, salt)
            for i, reply in zip(asked, run.replies, strict=True):
                answer = self._tokenizer.decode(reply.token_ids, skip_special_tokens=True)
                conversations[i].append({"role": "assistant", "content": str(answer)})
            yield Record(variant.name, Key(chunk.category, chunk.number, repeat, turn), run)

    def _bench_request(self, conversation: list[dict[str, str]], number: int) -> BenchRequest:
        settings = self._settings
        params = SamplingParams(
            temperature=settings.temperature,
            max_tokens=_spread(settings.max_tokens, settings.length_spread, number),
            ignore_eos=settings.ignore_eos,
            seed=settings.seed + number,
        )
        return BenchRequest(_encoded(self._tokenizer, conversation), params)


def _encoded(tokenizer: PreTrainedTokenizerFast, conversation: list[dict[str, str]]) -> list[int]:
    """Token ids up to the start of the answer. Without a chat template: of the texts, each in a line of its own."""
    if tokenizer.chat_template is not None:
        return render_chat(tokenizer, conversation)
    return list(tokenizer.encode("\n".join(message["content"] for message in conversation)))


def _spread(mean: int, spread: float, number: int) -> int:
    """A value for each number, evenly around the mean; those of successive numbers are far from each other."""
    place = number * 0.618034 % 1  # the golden ratio
    return max(1, round(mean * (1 + spread * (2 * place - 1))))


def _chunks(prompts: Sequence[Prompt], concurrency: int) -> Iterator[Chunk]:
    """One prompt at a time, or enough of them to keep `concurrency` running most of the time."""
    size = 1 if concurrency == 1 else 4 * concurrency
    numbers, first = count(), 0
    for category, members in by_category(prompts).items():
        for start in range(0, len(members), size):
            yield Chunk(category, next(numbers), first + start, members[start : start + size])
        first += len(members)


def _rotated(variants: Sequence[Variant], by: int) -> list[Variant]:
    start = by % len(variants)
    return [*variants[start:], *variants[:start]]
