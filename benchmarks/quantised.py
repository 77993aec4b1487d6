"""Figures of quantised checkpoints: plain decoding beside bfloat16, and drafts beside plain decoding.

The embedded model's linear layers are quantised into the files of each format, as published checkpoints have them.
"""

import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.eagle import EAGLE3, served
from benchmarks.figure import Effort, Figure, Section, prompts_of
from specray.bench.command import engine_config
from specray.bench.measure import Settings
from specray.bench.report import speed_ratios
from specray.bench.session import Session
from specray.bench.variants import PLAIN
from specray.config import EMBEDDED_MODEL, SpeculativeConfig
from specray.models.files import resolve_model
from specray.models.gguf_blocks import BLOCKS_FILE
from tests.support.quantised import published, quantise_model

FORMATS = published(64)  # 128 inputs would not divide the 576 of the model
BASELINE = "bfloat16"
NGRAM = "ngram"
TABLE = "Quantised checkpoints, one request, `budget: auto`"
ROUNDS = 4  # for each of the effort's


def measure(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    """All models answer a prompt in turn, because one comparison has one target."""
    del wanted
    with ExitStack() as stack:
        folders = {name: Path(stack.enter_context(tempfile.TemporaryDirectory())) for name in FORMATS}
        sessions = {BASELINE: _session(EMBEDDED_MODEL)}
        sessions |= {name: _session(str(_write(name, folder))) for name, folder in folders.items()}
        ratios: defaultdict[str, list[float]] = defaultdict(list)
        gains: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        chat, copies = prompts_of("chat", effort.num_chat), prompts_of("copy", effort.num_copy)
        for number in range(ROUNDS * effort.rounds):
            settings = Settings(max_tokens=effort.max_tokens, ignore_eos=True, cache_salt=f"{number}-")
            speeds = {}
            for name, session in sessions.items():
                both = session.compare([PLAIN, EAGLE3], [chat[number % len(chat)]], settings)
                gains[name, EAGLE3] += speed_ratios(both, EAGLE3, PLAIN)
                copied = session.compare([PLAIN, NGRAM], [copies[number % len(copies)]], settings)
                gains[name, NGRAM] += speed_ratios(copied, NGRAM, PLAIN)
                speeds[name] = next(record.run.tokens_per_s for record in both if record.variant == PLAIN)
            for name in FORMATS:
                ratios[name].append(speeds[name] / speeds[BASELINE])
        for name in FORMATS:
            for what, samples, goal in (
                ("plain / bfloat16", ratios[name], 1.3),
                ("EAGLE-3 / plain", gains[name, EAGLE3], 1.0),
                ("n-grams / plain, copying", gains[name, NGRAM], 1.0),
            ):
                yield Figure.of(f"{name}: {what}", samples, goal, (TABLE, name, what))


def _write(name: str, folder: Path) -> Path:
    """The embedded model in a format, in a folder of `folder`."""
    source, copy = resolve_model(EMBEDDED_MODEL, None, "auto", progress=False), folder / "source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(BLOCKS_FILE))
    return quantise_model(copy, folder / "quantised", FORMATS[name])


def _session(model: str) -> Session:
    session = Session(engine_config(None, 1, dtype="bfloat16", model=model), progress=sys.stderr.isatty())
    session.define(EAGLE3, served(EAGLE3).model_copy(update={"budget": "auto"}))
    session.define(NGRAM, SpeculativeConfig(algorithm="NGRAM", budget="auto"))
    return session


SECTIONS = (Section(("quantised",), measure),)
