"""A greedy step reads tensors on the host twice: the outcome of verification, and the sizes of the next draft trees."""

from pathlib import Path

import pytest

from specray.engine.engine import Engine
from specray.outputs import RequestOutput
from specray.sampling_params import SamplingParams
from tests.support.engine import make_llm
from tests.support.host_reads import HostReads
from tests.support.methods import METHODS

VERIFY, DRAFT = "worker/step_output.py", "spec_decode/pending_trees.py"
NUM_PROMPT_STEPS = 2  # the prefill, and the step that makes the first drafts


def reads_of_steps(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str | None, batch_size: int, **sampling: float
) -> list[list[str]]:
    """The modules that read tensors, for each step of decoding."""
    steps: list[list[str]] = []
    step = Engine.step

    def counted(engine: Engine) -> list[RequestOutput]:
        with HostReads() as reads:
            outputs = step(engine)
        steps.append([place.partition(":")[0] for place in reads.places])
        return outputs

    monkeypatch.setattr(Engine, "step", counted)
    options = {} if method is None else {"speculative": METHODS[method](toy, tmp_path)}
    params = SamplingParams(seed=3, max_tokens=16, ignore_eos=True, **sampling)
    # One plan in flight: with two, the next step's drafts are read in the step before.
    with make_llm(toy, disable_overlap_schedule=True, **options) as llm:
        llm.generate([[5, 6, 7 + row] for row in range(batch_size)], params)
    return [step for step in steps[NUM_PROMPT_STEPS:] if step]  # the last step only frees slots


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "method",
    ["EAGLE3", "EAGLE3-chain", "EAGLE3-wide", "EAGLE-deep", "EAGLE-map", "STANDALONE-tree", "MTP", "MTP-stack"],
)
def test_a_step_reads_once_for_verification_and_once_for_drafts(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, batch_size: int, temperature: float
) -> None:
    steps = reads_of_steps(toy, tmp_path, monkeypatch, method, batch_size, temperature=temperature)
    assert len(steps) >= 3
    assert {tuple(step) for step in steps} == {(DRAFT, VERIFY)}


@pytest.mark.parametrize("batch_size", [1, 5])
def test_plain_decoding_reads_once_per_step(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    steps = reads_of_steps(toy, tmp_path, monkeypatch, None, batch_size, temperature=0.0)
    assert len(steps) >= 10
    assert {tuple(step) for step in steps} == {(VERIFY,)}


def test_verification_by_depth_reads_at_each_depth(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties depend on the path."""
    steps = reads_of_steps(toy, tmp_path, monkeypatch, "EAGLE3", 1, temperature=1.0, presence_penalty=0.5)
    assert all("spec_decode/depth_walk.py" in step for step in steps), steps
