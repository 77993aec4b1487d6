"""A drafter of two actors beside a target of two: the death of one costs drafts until both were replaced."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from cluster.config import AppConfig
from cluster.engine.executor import RayExecutor
from specray.engine.engine import Engine
from specray.engine.engine_request import EngineRequest
from specray.llm import LLM
from specray.models.tokenizer import load_tokenizer
from specray.sampling_params import SamplingParams
from specray.step import StepResult
from tests.support.heads import write_random_head
from tests.support.processes import own_processes, wait_until

PROMPT = [5, 6, 7, 8, 5, 6]
PARAMS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 3, "ignore_eos": True}
SMALL = {"max_total_tokens": 2048, "num_threads": 1, "dtype": "float32", "device": "cpu"}
REPLACEMENT_S = 60.0


class CountingExecutor(RayExecutor):
    """Counts the drafts that were verified."""

    num_drafts = 0

    def collect(self) -> StepResult:
        result = super().collect()
        self.num_drafts += sum(row.num_draft_tokens for row in result.rows)
        return result


def draft_actors() -> set[int]:
    """Processes of running draft actors, those of other tests' engines among them."""
    with contextlib.suppress(AssertionError):  # there are none
        return set(own_processes("ray::DraftActor"))
    return set()


def text_of(engine: Engine) -> list[int]:
    engine.add_request(EngineRequest("one", PROMPT, SamplingParams(**PARAMS)))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens += output.token_ids
    return tokens


def test_the_death_of_one_draft_actor_costs_drafts_only(ray_cluster: int, tiny_model: Path, tmp_path: Path) -> None:
    del ray_cluster  # it must run
    with LLM(model=str(tiny_model), **SMALL) as llm:
        [expected] = llm.generate([PROMPT], SamplingParams(**PARAMS))
    head = write_random_head(tmp_path / "head", tiny_model, 3, draft_vocab_size=256)
    options = {
        "tp_size": 2,
        "speculative": {"algorithm": "EAGLE3", "draft_model_path": str(head)},
        "server": {"rank_cpus": 0.1, "router_cpus": 0.1},
        "draft": {"cpus": 0.1},
    }
    others = draft_actors()
    config = AppConfig.model_validate({"model": str(tiny_model), **SMALL, **options})
    executor = CountingExecutor(config)
    try:
        engine = Engine(config.engine, executor, load_tokenizer(tiny_model).backend_tokenizer)

        def drafts() -> bool:
            before = executor.num_drafts
            assert text_of(engine) == expected.choices[0].token_ids
            return executor.num_drafts > before

        wait_until(drafts, REPLACEMENT_S)
        actors = sorted(draft_actors() - others)
        assert len(actors) == 2
        os.kill(actors[1], signal.SIGKILL)
        drafts()
        wait_until(lambda: drafts() and executor.drafter.state.num_restarts > 0, REPLACEMENT_S)
        assert len(draft_actors() - others - set(actors)) == 2
    finally:
        executor.stop()
