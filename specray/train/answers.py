"""Training data: the target answers prompts through our own engine, and its features are written down as it goes.

A folder of answers holds `answers.json` (what was asked, of which model) and shards. Every request has an index, its
prompt, temperature and noise follow from it, and a shard names the indexes it holds: so a run that was stopped goes on
where it was, and several processes share the work. Not here: what the shards look like (`shards`).
"""

import json
import os
import threading
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from specray.engine.request import EngineRequest
from specray.errors import ConfigError, EngineDeadError, SpecRayError
from specray.llm import LLM
from specray.models.files import resolve_model
from specray.models.registry import load_config
from specray.outputs import FinishReason, RequestOutput
from specray.sampling_params import SamplingParams
from specray.train.answer_options import AnswerOptions
from specray.train.prompts import PromptFile, chat_prompt, read_prompt_file, user_header
from specray.train.recorder import HiddenStateRecorder, Recording
from specray.train.shards import DESCRIPTION, TokenSequence, write_shard, written_indexes

TEMPERATURES = (0.0, 1.0, 0.7, 0.4)  # of a prompt's answers, in turn: only one of four would always be the same
SHARD_TOKENS = 65_536
_INDEX_BITS = 40
_LONGEST_TURN = 256  # tokens of a turn the target writes itself; a longer one is not used
_LONGEST_PROMPT = 768  # tokens; a longer prompt is not used


def make_answers(options: AnswerOptions, progress: bool = True) -> Path:
    """Fill the folder with all answers the options ask for; returns it. Processes that are killed lose little."""
    options.folder.mkdir(parents=True, exist_ok=True)
    files = [read_prompt_file(path, options.max_bad_rows) for path in options.prompts]
    for file in files:
        for bad in file.bad_rows:
            print(f"{file.path}, {bad}: skipped")
    if not any(file.texts for file in files) and not options.self_prompts:
        raise ConfigError("there is nothing to ask: give --prompts FILE or --self-prompts N")
    _write_description(options, files)
    if options.generators == 1:
        _generate(options, 0, progress)
        return options.folder
    context = get_context("spawn")
    workers = [context.Process(target=_generate, args=(options, part, progress)) for part in range(options.generators)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            worker.terminate()
    if failed := [worker.exitcode for worker in workers if worker.exitcode]:
        raise SpecRayError(f"a process that makes answers ended with status {failed[0]}; run the same command again")
    return options.folder


def aux_hidden_state_layers(num_layers: int) -> list[int]:
    """Layers whose entering state is written down: EAGLE-3's three, and the final one (EAGLE-1/2, and the teacher)."""
    if num_layers < 4:
        raise ConfigError(f"a target with {num_layers} layers has no low, middle and high ones; 4 are needed")
    return [2, num_layers // 2, num_layers - 3, num_layers]


def _write_description(options: AnswerOptions, files: list[PromptFile]) -> None:
    folder = resolve_model(options.model, None, "auto", progress=False)
    config = load_config(folder)
    description = {
        "model": options.model,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "feature_layers": aux_hidden_state_layers(config.num_hidden_layers),
        "prompt_files": [file.describe() for file in files],
        "samples": options.samples,
        "self_prompts": options.self_prompts,
        "temperatures": list(TEMPERATURES),
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "dtype": options.dtype,
    }
    path = options.folder / DESCRIPTION
    if path.exists():
        _check_same(json.loads(path.read_text(encoding="utf-8")), description, path)
    path.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _check_same(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """More self-written prompts may be asked for later; anything else would mix two runs."""
    for key in new:
        if key != "self_prompts" and old.get(key) != new[key]:
            raise ConfigError(
                f"{path} was made with {key}={old.get(key)!r}, and now {key}={new[key]!r} is asked for; "
                "use another folder, or the same options"
            )


def _generate(options: AnswerOptions, part: int, progress: bool) -> None:
    """One process's share: every `generators`-th request that no shard holds yet."""
    if (parent := parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _Generator(options, part).run(progress)


def _end_with(parent: BaseProcess) -> None:
    """A run that is killed must not leave its children computing for nobody."""
    parent.join()
    os._exit(1)


def _temperature(number: int) -> float:
    return TEMPERATURES[number % len(TEMPERATURES)]


@dataclass(slots=True)
class _Job:
    """One prompt on its way to a recorded sequence."""

    index: int
    num_prompt: int  # tokens the target did not write itself
    token_ids: list[int]
    temperature: float
    writes_prompt: bool  # the target is still writing the user's turn


class _Generator:
    """One process: an engine, the jobs under way, and what is not written to a shard yet."""

    def __init__(self, options: AnswerOptions, part: int) -> None:
        self._options = options
        self._part = part
        self._sequences: list[TokenSequence] = []
        self._running: dict[str, _Job] = {}
        self._answers: dict[str, list[int]] = {}
        self._finished: dict[int, _Job] = {}  # by seed; recorded when their slot is freed
        config = load_config(resolve_model(options.model, None, "auto", progress=False))
        room = min(config.max_position_embeddings, _LONGEST_PROMPT + options.max_tokens)
        self._longest_prompt = room - options.max_tokens
        self._llm = LLM(
            model=options.model,
            dtype=options.dtype,
            disable_radix_cache=True,
            num_threads=max(1, len(os.sched_getaffinity(0)) // options.generators),
            max_running_requests=options.concurrency,
            max_total_tokens=options.concurrency * (room + 16),
            drafter=HiddenStateRecorder(aux_hidden_state_layers(config.num_hidden_layers), self._take),
        )
        self._header = user_header(self._llm.tokenizer) if options.self_prompts else []
        self._texts = [text for path in options.prompts for text in read_prompt_file(path, options.max_bad_rows).texts]

    def run(self, progress: bool) -> None:
        indexes = self._indexes()
        waiting = iter(indexes)
        engine = self._llm.engine
        with tqdm(total=len(indexes), desc="answers", unit="request", position=self._part, disable=not progress) as bar:
            while True:
                while len(self._running) < self._options.concurrency and (index := next(waiting, None)) is not None:
                    bar.update(not self._ask(self._first_job(index)))
                if not engine.has_work:
                    break
                for output in engine.step():
                    bar.update(self._note(output))
                if sum(len(sequence.token_ids) for sequence in self._sequences) >= SHARD_TOKENS:
                    self._flush()
        self._flush()

    def _indexes(self) -> list[int]:
        """This part's requests that are still to do, in an order that mixes all kinds."""
        total = len(self._texts) * self._options.samples + self._options.self_prompts
        order = list(range(total))
        Random(self._options.seed).shuffle(order)
        done = written_indexes(self._options.folder)
        return [index for index in order[self._part :: self._options.generators] if index not in done]

    def _first_job(self, index: int) -> _Job:
        if index < len(self._texts) * self._options.samples:
            sample, number = divmod(index, len(self._texts))
            prompt = chat_prompt(self._llm.tokenizer, self._texts[number])
            return _Job(index, len(prompt), prompt, _temperature(sample), writes_prompt=False)
        return _Job(index, len(self._header), self._header, _temperature(index), writes_prompt=True)

    def _ask(self, job: _Job) -> bool:
        """Queue a job; False if its prompt is too long for the data."""
        if len(job.token_ids) > self._longest_prompt:
            return False
        request_id = f"{job.index}-{job.writes_prompt}"
        params = SamplingParams(
            max_tokens=_LONGEST_TURN if job.writes_prompt else self._options.max_tokens,
            temperature=1.0 if job.writes_prompt else job.temperature,
            top_p=0.9 if job.writes_prompt else 1.0,  # a question from the tail of the law is no question
            seed=self._seed(job),
        )
        self._llm.engine.add_request(EngineRequest(request_id, job.token_ids, params))
        self._running[request_id], self._answers[request_id] = job, []
        return True

    def _note(self, output: RequestOutput) -> bool:
        """Enter a step's news of one request; True if its index is done with."""
        if output.finish_reason is FinishReason.ERROR:
            raise EngineDeadError(f"{output.request_id}: {output.error}")
        self._answers[output.request_id] += output.token_ids
        if output.finish_reason is None:
            return False
        job, answer = self._running.pop(output.request_id), self._answers.pop(output.request_id)
        if not job.writes_prompt:
            self._finished[self._seed(job)] = job
            return True
        text = str(self._llm.tokenizer.decode(answer, skip_special_tokens=True)).strip()
        if output.finish_reason is not FinishReason.STOP or not text:
            return True  # a turn without an end is no prompt
        asked = chat_prompt(self._llm.tokenizer, text)
        return not self._ask(_Job(job.index, job.num_prompt, asked, job.temperature, writes_prompt=False))

    def _seed(self, job: _Job) -> int:
        return (2 * self._options.seed + job.writes_prompt) << _INDEX_BITS | job.index

    def _take(self, recording: Recording) -> None:
        if job := self._finished.pop(recording.seed, None):
            sequence = TokenSequence(recording.token_ids, job.num_prompt, recording.aux_hidden_states, job.index)
            self._sequences.append(sequence)

    def _flush(self) -> None:
        if self._sequences:
            write_shard(self._options.folder, self._sequences, self._part)
            self._sequences = []
