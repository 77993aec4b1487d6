"""Milliseconds of a decode step: the CPU kernels, torch's operations, and these compiled by torch.compile.

Plain decoding and EAGLE-3 with a tree of six nodes, one request, in bfloat16 and float32. Each combination of kernels
and type has a process of its own, because a process has one set of kernels. The drafter is never compiled.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from benchmarks.eagle import served
from benchmarks.figure import ROOT, Effort, Figure, Section
from specray.bench.command import engine_config
from specray.bench.variants import with_tree
from specray.engine.request import EngineRequest
from specray.errors import SpecRayError
from specray.llm import LLM
from specray.sampling_params import SamplingParams

KERNELS, EAGER, COMPILED = "CPU kernels", "torch", "torch.compile"
TREE = "4-3-6"
TYPES = ("bfloat16", "float32")
PROMPT = "Name three rivers."
TIMEOUT_S = 300


class Steps(NamedTuple):
    """Decode steps of one request."""

    milliseconds: float  # of a step, the median
    target_milliseconds: float  # of its forward pass of the target
    token_ids: list[int]


def measure(effort: Effort, wanted: set[str]) -> Iterator[Figure]:
    del wanted  # all rows come from the same processes
    for dtype in TYPES:
        found = {name: _measured(name, dtype, effort.max_tokens) for name in (KERNELS, EAGER, COMPILED)}
        for method in ("plain", f"EAGLE-3 {TREE}"):
            for name, steps in found.items():
                what = f"ms a step, {method}, {dtype}, {name} (target {steps[method].target_milliseconds:.1f})"
                yield Figure(what, steps[method].milliseconds, None, "{:.1f}")
            ratio = found[EAGER][method].milliseconds / found[COMPILED][method].milliseconds
            yield Figure(f"speed of {COMPILED} / {EAGER}, {method}, {dtype}", ratio, 1.0)
            ratio = found[COMPILED][method].milliseconds / found[KERNELS][method].milliseconds
            yield Figure(f"speed of {KERNELS} / {COMPILED}, {method}, {dtype}", ratio, 1.0)
        texts = {tuple(steps.token_ids) for name in (EAGER, COMPILED) for steps in found[name].values()}
        yield Figure(
            f"different texts of {EAGER} and {COMPILED}, plain and EAGLE-3, {dtype}", len(texts), None, "{:.0f}"
        )


def _measured(name: str, dtype: str, max_tokens: int) -> dict[str, Steps]:
    """Steps by method, from a process of its own."""
    environment = os.environ | {"SPECRAY_KERNELS": "auto" if name == KERNELS else "torch"}
    command = [sys.executable, "-m", "benchmarks.compiled", name, dtype, str(max_tokens)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SpecRayError(f"{name}, {dtype}: {done.stderr.strip()[-500:]}")
    return {method: Steps(*steps) for method, steps in json.loads(done.stdout).items()}


def main(name: str, dtype: str, max_tokens: int) -> None:
    """Measure in this process, and print JSON."""
    config = engine_config(None, 1, dtype=dtype, enable_torch_compile=name == COMPILED, torch_compile_max_bs=1)
    eagle3 = LLM(config.model_copy(update={"speculative": with_tree(served("eagle3"), TREE)}))
    plain = eagle3.with_speculative(config.speculative)
    print(json.dumps({"plain": _steps(plain, max_tokens), f"EAGLE-3 {TREE}": _steps(eagle3, max_tokens)}))


def _steps(llm: LLM, max_tokens: int) -> Steps:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.add_request(EngineRequest("steps", llm.tokenizer.encode(PROMPT), params))
    times, target_times = [], []
    token_ids: list[int] = []
    while llm.engine.has_work:
        start, before = time.perf_counter(), _target_seconds(llm)
        outputs = llm.engine.step()
        times.append(time.perf_counter() - start)
        target_times.append(_target_seconds(llm) - before)
        token_ids += [token for output in outputs for token in output.token_ids]
    decoding = slice(2, None)  # after the prompt, and the first step of its kind
    return Steps(1000 * median(times[decoding]), 1000 * median(target_times[decoding]), token_ids)


def _target_seconds(llm: LLM) -> float:
    return llm.engine.stats.labelled["specray_step_seconds_total"].get("forward", 0.0)


SECTIONS = (Section(("compile",), measure),)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
