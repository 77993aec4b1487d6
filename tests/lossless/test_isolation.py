"""A request with NaN hidden states does not affect other requests, nor later ones in the same blocks."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.engine.engine_request import EngineRequest
from specray.outputs import FinishReason, RequestOutput
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import TreeLists
from tests.support.drafters import ScriptedDrafter, draw_random
from tests.support.engine import generate, make_llm
from tests.support.methods import METHODS
from tests.support.toy import write_toy

POISON = 63  # its embedding is NaN
PROMPTS = [[0, 9, 8, 7, 6], [0, 20, 21], [0, *range(10, 50)], [5]]
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=30, ignore_eos=True, logit_bias={POISON: -100.0})


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_toy(tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("name", ["none", "random", "EAGLE-map"])
def test_a_request_with_nan_fails_alone(chunk: int, name: str, poisoned: Path, tmp_path: Path) -> None:
    expected = [choice.token_ids for choice in generate(poisoned, PROMPTS, PARAMS, page_size=4)]
    drafting: dict[str, Any] = {
        "none": {},
        "random": {"drafter": ScriptedDrafter(draw_without_poison)},
        "EAGLE-map": {
            "speculative": METHODS["EAGLE-map"](poisoned, tmp_path)
        },  # its map does not have the poisoned token
    }[name]
    with make_llm(poisoned, **drafting, page_size=4, chunked_prefill_size=chunk, max_total_tokens=256) as llm:
        for round_ in range(3):  # later rounds read blocks that held NaN before
            requests = {f"{round_}-{i}": p for i, p in enumerate(PROMPTS)}
            bad = {f"bad-{round_}-{i}": [0, *range(4, 4 + 5 * i), POISON, 9, 9] for i in range(3)}
            for request_id, prompt in (bad | requests).items():
                llm.engine.add_request(EngineRequest(request_id, prompt, PARAMS))
            outputs: list[RequestOutput] = []
            while llm.engine.has_work:
                outputs += llm.engine.step()
            ends = {o.request_id: o for o in outputs if o.finish_reason}
            assert {ends[request_id].finish_reason for request_id in bad} == {FinishReason.ERROR}
            texts = [[t for o in outputs if o.request_id == r for t in o.token_ids] for r in requests]
            assert texts == expected


def draw_without_poison(root: int, future: list[int], random: Random) -> TreeLists:
    tree = draw_random(root, future, random)
    return TreeLists([token % POISON for token in tree.tokens], tree.parents)
