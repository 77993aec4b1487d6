"""The whole engine on the Triton kernels, in the interpreter: drafts do not change the output, and torch agrees."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from specray.sampling_params import SamplingParams
from tests.support.engine import generate, make_llm
from tests.support.methods import METHODS

ROOT = Path(__file__).parents[2]
PROMPTS = [[0, 9, 8, 7, 6, 5, 9, 8], [5]]
PARAMS = [
    SamplingParams(seed=1, temperature=0.0, max_tokens=8),
    SamplingParams(seed=2, temperature=0.8, max_tokens=8, ignore_eos=True),
]


def outputs(toy: Path, folder: Path, names: list[str | None]) -> dict[str, list[list[int]]]:
    """Token ids by method; null is plain decoding."""
    found = {}
    for name in names:
        options = {} if name is None else {"speculative": METHODS[name](toy, folder)}
        found[str(name)] = [choice.token_ids for choice in generate(toy, PROMPTS, PARAMS, **options)]
    return found


@pytest.mark.slow
def test_output_does_not_depend_on_drafts_or_kernels(toy: Path, tmp_path: Path) -> None:
    names = [None, "EAGLE3", "EAGLE-map"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.lossless.test_triton", str(toy), str(tmp_path), json.dumps(names)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "SPECRAY_KERNELS": "triton"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = outputs(toy, tmp_path, [None])["None"]
    assert json.loads(done.stdout) == dict.fromkeys(map(str, names), expected)


def main(toy: Path, folder: Path, names: list[str | None]) -> None:
    import torch

    from specray.ops.gpu.attention import TritonAttention

    torch.set_num_threads(1)
    with make_llm(toy) as llm:
        attention = llm._executor.worker._runner.attention
        assert isinstance(attention, TritonAttention), attention
    print(json.dumps(outputs(toy, folder, names)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
