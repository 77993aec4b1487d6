"""One comparison: every arm answers the same prompts, a few at a time and in turn, so that a drifting machine is fair.

Not here: what an arm does (`arms`), and what the numbers mean (`report`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from specray.bench.arms import Arm, Job, Run
from specray.bench.floor import Floor
from specray.bench.prompts import Prompt, by_category
from specray.models.tokenizer import render_chat
from specray.sampling_params import SamplingParams

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. Request i of a turn is sampled with seed `seed + i`, the same in every arm."""

    concurrency: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    turns: int = 1
    repeats: int = 1
    seed: int = 0
    ignore_eos: bool = False


class Key(NamedTuple):
    """What runs of different arms must share to be compared."""

    category: str
    chunk: int
    repeat: int
    turn: int


class Record(NamedTuple):
    arm: str
    key: Key
    run: Run


class Chunk(NamedTuple):
    """Prompts of one category that one arm answers before the next arm's turn."""

    category: str
    number: int
    prompts: list[Prompt]


def compare(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    floor: Floor | None = None,
    progress: bool = False,
) -> list[Record]:
    """All records. The order of arms rotates from chunk to chunk; `floor` is sampled once after each arm."""
    interview = Interview(tokenizer, settings)
    chunks = list(_chunks(prompts, settings.concurrency))
    for arm in arms:
        interview.warm_up(arm, chunks[0])
    records: list[Record] = []
    total = len(chunks) * settings.repeats * len(arms)
    with tqdm(total=total, desc="measuring", unit="run", disable=None if progress else True) as bar:
        for repeat in range(settings.repeats):
            for chunk in chunks:
                for arm in _rotated(arms, chunk.number + repeat):
                    bar.set_postfix_str(arm.name, refresh=True)
                    records += interview.hold(arm, chunk, repeat)
                    if floor is not None:
                        floor.sample()
                    bar.update()
    return records


class Interview:
    """Asks one arm the turns of some prompts, each after the arm's own answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def warm_up(self, arm: Arm, chunk: Chunk) -> None:
        """Let everything that happens once happen before the first record."""
        jobs = self._jobs([[{"role": "user", "content": prompt.turns[0]}] for prompt in chunk.prompts[:1]])
        short = [job._replace(params=replace(job.params, max_tokens=WARM_UP_TOKENS)) for job in jobs]
        arm.run(short, self._settings.concurrency, cache_salt="warm-up")

    def hold(self, arm: Arm, chunk: Chunk, repeat: int) -> Iterator[Record]:
        """One record per turn. A salt of its own keeps a repeat from finding the last one's answers in a cache."""
        talks: list[list[dict[str, str]]] = [[] for _ in chunk.prompts]
        for turn in range(self._settings.turns):
            asked = [(talk, p.turns[turn]) for talk, p in zip(talks, chunk.prompts, strict=True) if turn < len(p.turns)]
            if not asked:
                return
            for talk, question in asked:
                talk.append({"role": "user", "content": question})
            jobs = self._jobs([talk for talk, _ in asked])
            run = arm.run(jobs, self._settings.concurrency, cache_salt=f"repeat-{repeat}")
            for (talk, _), reply in zip(asked, run.replies, strict=True):
                answer = self._tokenizer.decode(reply.token_ids, skip_special_tokens=True)
                talk.append({"role": "assistant", "content": str(answer)})
            yield Record(arm.name, Key(chunk.category, chunk.number, repeat, turn), run)

    def _jobs(self, talks: Sequence[list[dict[str, str]]]) -> list[Job]:
        settings = self._settings
        options = SamplingParams(
            temperature=settings.temperature, max_tokens=settings.max_tokens, ignore_eos=settings.ignore_eos
        )
        return [
            Job(render_chat(self._tokenizer, talk), replace(options, seed=settings.seed + index))
            for index, talk in enumerate(talks)
        ]


def _chunks(prompts: Sequence[Prompt], concurrency: int) -> Iterator[Chunk]:
    """One prompt at a time, or enough of them that `concurrency` are under way most of the time."""
    size = 1 if concurrency == 1 else 4 * concurrency
    numbers = count()
    for category, members in by_category(prompts).items():
        for start in range(0, len(members), size):
            yield Chunk(category, next(numbers), members[start : start + size])


def _rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    start = by % len(arms)
    return [*arms[start:], *arms[:start]]
