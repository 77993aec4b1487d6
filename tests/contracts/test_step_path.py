"""A decode step can be read in one sitting: few lines of this package are in the files that it enters.

Whole files count, however little of them a step runs. Kernels, layers and models are read apart. The limits are those
of today: lower them with every change that shortens the path.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from specray.config import SpeculativeConfig
from specray.engine.engine_request import EngineRequest
from specray.ops.cpu.library import kernels
from specray.sampling_params import SamplingParams
from tests.support.engine import make_llm
from tests.support.methods import METHODS

ROOT = Path(__file__).parents[2]
PRODUCT = (f"{ROOT}/specray/", f"{ROOT}/cluster/")
APART = tuple(f"{ROOT}/specray/{name}/" for name in ("layers", "models", "ops"))
LIMITS = {None: 1884, "EAGLE3": 2672}  # lines of a plain step, and of one with drafts
NUM_STEPS = 24  # some of them start a block, which caches the one before

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs the CPU kernels")


@pytest.mark.parametrize("method", LIMITS)
def test_the_files_that_a_decode_step_enters_have_few_lines(method: str | None, toy: Path, tmp_path: Path) -> None:
    speculative = SpeculativeConfig() if method is None else METHODS[method](toy, tmp_path)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=200, ignore_eos=True)
    with make_llm(toy, speculative=speculative, page_size=8) as llm:
        for name, prompt in {"a": [5, 6, 7], "b": [8, 9]}.items():
            llm.engine.add_request(EngineRequest(name, prompt, params))
        for _ in range(4):
            llm.engine.step()
        outputs = [llm.engine.step() for _ in range(2)]
        assert len(outputs[-1]) == 2
        sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in entered(llm.engine.step)}
        assert all(output.finish_reason is None for output in llm.engine.step())
    lines = "\n".join(f"{size:5} {path.relative_to(ROOT)}" for path, size in sorted(sizes.items(), key=lambda x: -x[1]))
    assert sum(sizes.values()) <= LIMITS[method], f"{sum(sizes.values())} lines in {len(sizes)} files:\n{lines}"


def entered(step: Callable[[], object]) -> set[Path]:
    """The files of the product, without APART, of which a function is called while steps run, all in this thread."""
    names: set[str] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG001
        names.add(frame.f_code.co_filename)

    sys.setprofile(record)
    try:
        for _ in range(NUM_STEPS):
            step()
    finally:
        sys.setprofile(None)
    return {Path(name) for name in names if name.startswith(PRODUCT) and not name.startswith(APART)}
