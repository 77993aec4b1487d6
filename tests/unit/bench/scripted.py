"""A benchmark session whose variants have speeds instead of models."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from specray.bench.measure import Key, Record, Settings
from specray.bench.prompts import Prompt
from specray.bench.session import Session
from specray.bench.variants import Run, TimedReply
from specray.config import SpeculativeConfig
from specray.outputs import RequestUsage

USAGE = RequestUsage(1, 0, 6, 2, 8, 4, 0, (0, 0, 2))


class ScriptedSession(Session):
    """`speed(variant, concurrency)` is in tokens/s; `answer(variant, settings)` are the tokens of its answers."""

    def __init__(
        self,
        speed: Callable[[str, int], float] = lambda *_: 1.0,
        answer: Callable[[str, Settings], list[int]] = lambda *_: [1, 2, 3, 4, 5, 6],
        usage: Callable[[str, Settings], RequestUsage] = lambda *_: USAGE,
    ) -> None:
        self.speed, self.answer, self.usage = speed, answer, usage
        self.defined: dict[str, SpeculativeConfig] = {}
        self.dropped: list[str] = []
        self.calls: list[tuple[list[str], list[Prompt], Settings]] = []

    def define(self, name: str, speculative: SpeculativeConfig) -> None:
        self.defined[name] = speculative

    def drop(self, name: str) -> None:
        self.dropped.append(name)

    def compare(
        self,
        names: Sequence[str],
        prompts: Sequence[Prompt],
        settings: Settings,
        progress: bool = False,
        title: str = "",
        between: Callable[[], None] | None = None,
    ) -> list[Record]:
        del progress, title, between
        self.calls.append((list(names), list(prompts), replace(settings)))
        return [
            Record(name, Key(prompt.category, number, 0, 0), self._run(name, settings))
            for number, prompt in enumerate(prompts)
            for name in names
        ]

    def _run(self, name: str, settings: Settings) -> Run:
        tokens = self.answer(name, settings)
        seconds = len(tokens) / self.speed(name, settings.concurrency)
        return Run([TimedReply(tokens, 0.1, seconds, self.usage(name, settings))], seconds, [0.01])
