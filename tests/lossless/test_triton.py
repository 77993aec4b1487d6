"""The whole engine on the Triton kernels, in the interpreter: drafts do not change the output, and the CPU's agree."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from specray.sampling_params import SamplingParams
from tests.support.engine import generate, make_llm
from tests.support.fast_interpreter import patch_interpreter
from tests.support.graph_stand_in import GraphsAtOnce, RepeatedCall
from tests.support.methods import METHODS

ROOT = Path(__file__).parents[2]
NAMES = ["EAGLE3", "EAGLE-map"]  # `deterministic` decodes without drafts
IN_GRAPHS = [None, "EAGLE3", "EAGLE3-chain"]
PROMPTS = [[0, 9, 8, 7, 6, 5, 9, 8], [5]]
CHUNK = {"chunked_prefill_size": 8}  # which the warm-up reads, in the interpreter
PARAMS = [
    SamplingParams(seed=1, temperature=0.0, max_tokens=4),
    SamplingParams(seed=2, temperature=0.8, max_tokens=5, ignore_eos=True),
]


def outputs(toy: Path, folder: Path, names: list[str | None], **options: Any) -> dict[str, list[list[int]]]:
    """Token ids by method; null is plain decoding."""
    found = {}
    for name in names:
        method = {} if name is None else {"speculative": METHODS[name](toy, folder)}
        found[str(name)] = [choice.token_ids for choice in generate(toy, PROMPTS, PARAMS, **CHUNK, **options, **method)]
    return found


@pytest.fixture(scope="module")
def interpreted(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `main` finds in a process in which Triton's kernels replace those of the CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.lossless.test_triton", str(toy), str(tmp_path_factory.mktemp("heads"))],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "SPECRAY_KERNELS": "triton"},
        capture_output=True,
        text=True,
        timeout=900,  # it took 216 s beside the tests of a cluster on a Zen 3
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_output_does_not_depend_on_drafts_or_kernels(toy: Path, tmp_path: Path, interpreted: dict[str, Any]) -> None:
    expected = outputs(toy, tmp_path, [None])["None"]
    assert interpreted["float32"] == dict.fromkeys(map(str, NAMES), expected)


@pytest.mark.slow
def test_padded_steps_have_the_same_output(toy: Path, tmp_path: Path, interpreted: dict[str, Any]) -> None:
    """What graphs would record, run again at each replay: the kernels of padded steps among them."""
    expected = outputs(toy, tmp_path, [None])["None"]
    assert interpreted["in graphs"] == dict.fromkeys(map(str, IN_GRAPHS), expected)


@pytest.mark.slow
def test_deterministic_output_in_bfloat16_does_not_depend_on_drafts_or_the_batch(interpreted: dict[str, Any]) -> None:
    found = interpreted["deterministic"]
    assert found["has_one_text"]
    assert found["together"] == found["alone"]


def main(toy: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    patch_interpreter()
    found = {"float32": outputs(toy, folder, NAMES), "deterministic": deterministic(toy, folder)}
    with mock.patch("specray.worker.startup.make_graphs", side_effect=lambda *_: GraphsAtOnce(RepeatedCall)):
        found["in graphs"] = outputs(toy, folder, IN_GRAPHS, max_running_requests=2)
    print(json.dumps(found))


def deterministic(toy: Path, folder: Path) -> dict[str, Any]:
    """Tokens of each request alone, and of all in one batch with drafts."""
    from specray.ops.gpu.attention import TritonAttention

    options = {"dtype": "bfloat16", "deterministic": True}
    with make_llm(toy, **CHUNK, **options) as llm:
        attention = llm._executor.worker.backend.runner.attention
        assert isinstance(attention, TritonAttention), attention
        has_one_text = llm._executor.capacity.has_one_text
        requests = zip(PROMPTS, PARAMS, strict=True)
        alone = [llm.generate([prompt], params)[0].choices[0].token_ids for prompt, params in requests]
    [together] = outputs(toy, folder, ["EAGLE3"], **options).values()
    return {"has_one_text": has_one_text, "alone": alone, "together": together}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
