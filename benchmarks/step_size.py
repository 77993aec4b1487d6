"""`python -m benchmarks.step_size`: the amount of code in a decoding step, plain and with EAGLE-3.

It counts every file of this project with a function that is called during `Engine.step`: all lines of the file, its
lines of code (without blank lines, comments and docstrings), and the lines of code of the functions that are called.
A second sum leaves out kernels and models (`KERNELS_AND_MODELS`), which depend on the hardware and the architecture.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from benchmarks.eagle import served
from benchmarks.figure import Effort, Figure, Section
from benchmarks.results import ROOT
from specray.bench.command import engine_config
from specray.engine.request import EngineRequest
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from specray.tables import format_table

KERNELS_AND_MODELS = ("specray/ops/cpu/", "specray/ops/attention", "specray/models/", "specray/layers/")
PACKAGES = (ROOT / "specray", ROOT / "cluster")
STEPS = range(8, 28)  # decoding steps, after the prompt and the first draft tree; some of them fill a KV block
PROMPT = "Name three rivers."
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class FileSize(NamedTuple):
    """Lines of one file."""

    name: str
    lines: int
    code: int
    called: int  # lines of code of the functions that are called


def main() -> None:
    llm = _load()
    for title, variant in (("plain decoding", llm), ("EAGLE-3", _with_eagle3(llm))):
        sizes = sorted(file_sizes(_called_in_a_step(variant)))
        sums = (_sum("all files", sizes), _sum("without kernels and models", _without_kernels(sizes)))
        rows = [[size.name, str(size.lines), str(size.code), str(size.called)] for size in (*sizes, *sums)]
        print(f"\n{title}\n\n{format_table(('file', 'lines', 'code', 'called'), rows, num_text_columns=1)}")


def step_size(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    del effort, wanted  # nothing to measure
    llm = _load()
    for title, variant, bound in (("plain", llm, 2000), ("EAGLE-3", _with_eagle3(llm), 2400)):
        sizes = file_sizes(_called_in_a_step(variant))
        every, rest = _sum("all files", sizes), _sum("", _without_kernels(sizes))
        what = f"code of a step, {title}, all {len(sizes)} files; {rest.code} lines without kernels and models"
        yield Figure(what, every.code, bound, "{:.0f}", at_most=True)


def file_sizes(codes: set[CodeType]) -> list[FileSize]:
    """The files of these functions."""
    by_file: dict[Path, set[int]] = {}
    for code in codes:
        by_file.setdefault(Path(code.co_filename), set()).add(code.co_firstlineno)
    return [_file_size(path, starts) for path, starts in by_file.items()]


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def _without_kernels(sizes: Sequence[FileSize]) -> list[FileSize]:
    return [size for size in sizes if not size.name.startswith(KERNELS_AND_MODELS)]


def _sum(name: str, sizes: Sequence[FileSize]) -> FileSize:
    return FileSize(
        name, sum(size.lines for size in sizes), sum(size.code for size in sizes), sum(size.called for size in sizes)
    )


def _file_size(path: Path, starts: set[int]) -> FileSize:
    """`starts` are the first lines of the functions that are called."""
    source = path.read_text(encoding="utf-8")
    code = code_lines(source)
    called: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min(part.lineno for part in (node, *decorators))
            if first in starts:
                called.update(range(first, (node.end_lineno or first) + 1))
    return FileSize(str(path.relative_to(ROOT)), len(source.splitlines()), len(code), len(code & called))


def _load() -> LLM:
    return LLM(engine_config(None, 1, dtype="float32"))


def _with_eagle3(llm: LLM) -> LLM:
    return llm.with_speculative(served("eagle3"))


def _called_in_a_step(llm: LLM) -> set[CodeType]:
    """The project's functions that a decoding step of one request calls."""
    called: set[CodeType] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and any(Path(frame.f_code.co_filename).is_relative_to(top) for top in PACKAGES):
            called.add(frame.f_code)

    token_ids = llm.tokenizer.encode(PROMPT)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=200, ignore_eos=True)
    llm.engine.add_request(EngineRequest("step", token_ids, params))
    for number in range(STEPS.stop):
        sys.setprofile(record if number in STEPS else None)
        llm.engine.step()
    sys.setprofile(None)
    llm.engine.abort(["step"])
    llm.engine.step()
    return called


SECTIONS = (Section(("step-size",), step_size),)


if __name__ == "__main__":
    main()
