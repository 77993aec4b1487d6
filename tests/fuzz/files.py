"""Mutated model files: loading them works or raises ConfigError, and nothing else.

Loading runs in a process of its own, which may crash, hang or exceed its memory without ending the run.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from specray.caches import kernel_cache
from specray.config import EngineConfig
from specray.errors import ConfigError, InvalidRequestError
from specray.layers.parallel import RankGroup
from specray.llm import LLM
from specray.models.files import resolve_model
from specray.models.registry import load_model
from specray.models.tokenizer import load_tokenizer, render_chat
from specray.spec_decode.model_files import check_model_files
from tests.fuzz.mutations import dumps, mutated_bytes, mutated_json
from tests.support.gguf_toy import write_gguf
from tests.support.gpt_oss import write_gpt_oss
from tests.support.heads import write_random_head
from tests.support.mtp import write_mimo_layers
from tests.support.toy import write_toy

HANG_S = 60.0
REFUSAL_CPU_S = 1.0  # within which a file is refused
EXTRA_MEMORY = 4 * 2**30  # bytes of address space beyond what the libraries have mapped
HEADER_BYTES = 4096  # of a safetensors or GGUF file: most mutations go there
READY = "ready"
SPEED: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_total_tokens": 512}


@dataclass(slots=True)
class FileFindings:
    """How many mutants were loaded or refused, and what else happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest_refusal_s: float = 0.0  # of CPU time
    memory_growth: int = 0  # bytes of the process beyond what loading the unchanged files took


class Report(NamedTuple):
    """One mutant, as the process that loaded it reports it."""

    mutant: str
    outcome: str
    cpu_s: float = 0.0
    memory_growth: int = 0


class Subject(NamedTuple):
    """A folder of files, and how it is loaded."""

    name: str
    write: Callable[[Path], None]  # into an empty folder
    load: Callable[[Path], None]


def fuzz_files(num_mutants: int, seed: int) -> FileFindings:
    """Load mutants of all subjects in turn."""
    findings, start, first = FileFindings(), time.perf_counter(), 0
    context = multiprocessing.get_context("spawn")
    while first < num_mutants:
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_load_mutants, args=(first, num_mutants, seed, sender), daemon=True)
        worker.start()
        sender.close()
        assert receiver.recv() == READY  # EOFError: a file that is not changed does not load
        first = _collect(receiver, first, num_mutants, findings)
        worker.kill()
        worker.join()
    findings.seconds = time.perf_counter() - start
    return findings


def _collect(receiver: Connection, first: int, num_mutants: int, findings: FileFindings) -> int:
    """Read the worker's reports until it has ended; the number of the next mutant."""
    mutant = "the first one"
    for number in range(first, num_mutants):
        try:
            if not receiver.poll(HANG_S):
                findings.problems.append(f"no end within {HANG_S:g} s after {mutant}")
                return number + 1
            report: Report = receiver.recv()
        except EOFError:
            findings.problems.append(f"the process died after {mutant} (mutant {number})")
            return number + 1
        mutant, outcome = report.mutant, report.outcome
        findings.outcomes[outcome.partition(":")[0]] += 1
        findings.memory_growth = max(findings.memory_growth, report.memory_growth)
        if outcome not in ("loaded", "refused"):
            findings.problems.append(f"{mutant}: {outcome}")
        elif outcome == "refused":
            findings.slowest_refusal_s = max(findings.slowest_refusal_s, report.cpu_s)
            if report.cpu_s > REFUSAL_CPU_S:
                findings.problems.append(f"{mutant}: refused after {report.cpu_s:.1f} s of CPU time")
    return num_mutants


def _load_mutants(first: int, last: int, seed: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="specray-fuzz-") as folder:
        root = Path(folder)
        os.environ["SPECRAY_KERNEL_CACHE"] = str(kernel_cache())  # or the kernels would be compiled again
        os.environ["SPECRAY_CACHE"] = str(root / "cache")  # of converted GGUF files
        bases = {subject.name: root / f"base-{subject.name}" for subject in SUBJECTS}
        for subject in SUBJECTS:
            bases[subject.name].mkdir()
            subject.write(bases[subject.name])
            subject.load(bases[subject.name])  # unchanged files load
        _limit_memory()
        loaded = _peak_memory()
        sender.send(READY)
        for number in range(first, last):
            subject = SUBJECTS[number % len(SUBJECTS)]
            mutant = root / "mutant"
            shutil.copytree(bases[subject.name], mutant)
            name = _mutate(mutant, random.Random(f"{seed}-{number}"))
            begin = time.process_time()
            outcome = _outcome(subject, mutant)
            cpu_s, growth = time.process_time() - begin, _peak_memory() - loaded
            sender.send(Report(f"{subject.name}: {name} (mutant {number})", outcome, cpu_s, growth))
            shutil.rmtree(mutant)


def _peak_memory() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _mutate(folder: Path, rng: random.Random) -> str:
    """Change one file of the folder. Returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name != "target")
    path = rng.choice(files)
    content = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.7:
        path.write_bytes(dumps(mutated_json(json.loads(content), rng)))
        return f"{path.name}, values"
    if rng.random() < 0.05:
        path.unlink()
        return f"{path.name}, removed"
    cut = HEADER_BYTES if rng.random() < 0.8 else len(content)
    path.write_bytes(mutated_bytes(content[:cut], rng) + content[cut:])
    return f"{path.name}, bytes"


def _outcome(subject: Subject, folder: Path) -> str:
    try:
        subject.load(folder)
    except (ConfigError, InvalidRequestError):  # the latter: a chat template that does not parse, in every chat
        return "refused"
    except Exception as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
        return f"{type(error).__name__}: {str(error)[:200]} at {where}"
    return "loaded"


def _write_target(folder: Path) -> None:
    write_toy(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}')


def _load_target(folder: Path) -> None:
    config = EngineConfig(model=str(folder), **SPEED)
    check_model_files(config)
    load_model(folder, config, RankGroup(), torch.device("cpu"), progress=False)
    render_chat(load_tokenizer(folder), [{"role": "user", "content": "hi"}])


def _write_experts(folder: Path) -> None:
    write_gpt_oss(folder, num_layers=2)


def _write_shards(folder: Path) -> None:
    write_toy(folder)
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    save_file(dict(tensors[:5]), folder / "a.safetensors")
    torch.save(dict(tensors[5:]), folder / "b.bin")
    places = {name: "a.safetensors" for name, _ in tensors[:5]} | {name: "b.bin" for name, _ in tensors[5:]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _load_gguf(folder: Path) -> None:
    converted = resolve_model(str(folder / "model.gguf"), None, "auto", progress=False)
    _load_target(converted)
    shutil.rmtree(converted)


def _write_gguf(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_gguf(folder / "model.gguf", extra=lambda writer: writer.add_chat_template(template))


def _beside_a_target(write: Callable[[Path, Path], object], algorithm: str) -> tuple[Any, Any]:
    """(write, load) of a drafter. Its target, in the folder `target`, is not changed."""

    def write_both(folder: Path) -> None:
        (folder / "target").mkdir()
        write(folder / "draft", write_toy(folder / "target"))

    def load(folder: Path) -> None:
        options = {"algorithm": algorithm, "draft_model_path": str(folder / "draft")}
        config = EngineConfig.model_validate({"model": str(folder / "target"), "speculative": options, **SPEED})
        check_model_files(config)
        with LLM(config):
            pass

    return write_both, load


def _write_draft_model(folder: Path, _target: Path) -> None:
    folder.mkdir()
    write_toy(folder, seed=1)


SUBJECTS = [
    Subject("target", _write_target, _load_target),
    Subject("GGUF", _write_gguf, _load_gguf),
    Subject("shards", _write_shards, _load_target),
    Subject("MXFP4 experts", _write_experts, _load_target),
    Subject("EAGLE-3 head", *_beside_a_target(lambda folder, target: write_random_head(folder, target, 3), "EAGLE3")),
    Subject("EAGLE-2 head", *_beside_a_target(lambda folder, target: write_random_head(folder, target, 2), "EAGLE")),
    Subject("MTP layers", *_beside_a_target(write_mimo_layers, "MTP")),
    Subject("draft model", *_beside_a_target(_write_draft_model, "STANDALONE")),
]
