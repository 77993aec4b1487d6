"""Decode steps in CUDA graphs against plain decoding without: on a CPU with the stand-in for graphs, on a GPU for real.

`tests/lossless/test_graphs.py` and `tests/gpu/test_graphs.py` call the same.
"""

from pathlib import Path
from typing import Any

from specray.outputs import Completion
from specray.sampling_params import SamplingParams
from specray.step import UNLIMITED, DraftLimit
from specray.testing.conformance import PROMPTS, SAMPLED, require_equal
from tests.support.engine import generate, make_llm
from tests.support.methods import METHODS

DRAFTS = ["EAGLE3", "EAGLE3-chain", "EAGLE-map", "MTP", "MTP-stack", "STANDALONE", "STANDALONE-tree", "PARALLEL"]
NAMES = [None, *DRAFTS, "NGRAM", "SEVERAL"]
# Greedy and sampled requests with whole trees, unequal ones and none. The last ones run by two and alone at the end.
LENGTHS = [4, 4, 6, 12, 20]
LIMITS = [[UNLIMITED] * 5, [DraftLimit(5, 9)] * 3 + [DraftLimit(1, 9)] * 2, [DraftLimit(0, 0)] * 5]
PARAMS = [
    [SamplingParams(temperature=heat, top_p=0.9, seed=i, max_tokens=m, ignore_eos=True) for i, m in enumerate(LENGTHS)]
    for heat in (0.0, 0.8)
]


def plain_output(target: Path, **engine: Any) -> list[list[Completion]]:
    """Without graphs and drafts, one request at a time: outputs for SAMPLED, then for PARAMS."""
    engine |= {"max_running_requests": 1, "disable_cuda_graph": True}
    return [generate(target, PROMPTS[: len(params)], params, **engine) for params in (SAMPLED, *PARAMS)]


def require_plain_output(
    name: str | None,
    target: Path,
    folder: Path,
    plain: list[list[Completion]],
    has_every_option: bool = True,
    **engine: Any,
) -> None:
    """The output with graphs and the drafts of METHODS' `name`, in every bucket; `folder` is for drafters' files.

    `has_every_option` also samples in every way, which takes as long as all buckets.
    """
    options = engine if name is None else {"speculative": METHODS[name](target, folder), **engine}
    with make_llm(target, max_running_requests=3, **options) as llm:
        if has_every_option:
            require_equal([each.choices[0] for each in llm.generate(PROMPTS, SAMPLED)], plain[0])
        for limits in LIMITS[:1] if name is None else LIMITS:
            for params, expected in zip(PARAMS, plain[1:], strict=True):
                seen = llm.generate(PROMPTS[: len(params)], params, draft_limits=limits)
                require_equal([each.choices[0] for each in seen], expected)
