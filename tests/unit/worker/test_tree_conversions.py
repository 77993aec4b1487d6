"""Draft trees stay tensors from the drafter to the verifier; a drafter in another process converts them once."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specray.outputs import Generation
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import DraftTree
from specray.worker.remote_drafter import received_trees, source
from specray.worker.remote_drafter.wire import DraftReply
from tests.support.colocated import Colocated
from tests.support.engine import make_llm
from tests.support.methods import METHODS

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
WITH_A_MODEL = ["EAGLE3", "EAGLE3-chain", "EAGLE-deep", "STANDALONE-tree", "MTP", "MTP-stack"]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often trees were converted, by function; batches without a tree are not counted."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, has_trees: Callable[..., object]) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            counts[name] += bool(has_trees(*arguments))
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, counted)

    count(DraftTree, "from_lists", lambda trees, *_: trees)
    count(DraftTree, "to_lists", lambda tree: len(tree.num_nodes))
    count(DraftReply, "of", lambda _number, _seconds, tree, *_: len(tree.num_nodes))
    count(received_trees, "packed", lambda trees, _device: any(len(tree.tokens) > 1 for tree in trees))
    return counts


@pytest.mark.parametrize("method", WITH_A_MODEL)
def test_an_inline_drafter_converts_no_tree(method: str, toy: Path, tmp_path: Path, conversions: Counter[str]) -> None:
    with make_llm(toy, speculative=METHODS[method](toy, tmp_path)) as llm:
        assert num_verified(llm.generate([[5, 6, 7], [5, 6, 8]], PARAMS)) > 10
    assert not +conversions


def test_a_remote_drafter_converts_each_tree_once(
    toy: Path, tmp_path: Path, conversions: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEAST_WAIT_S", "FIRST_WAIT_S", "FROZEN_S"):
        monkeypatch.setattr(source, name, 60.0)
    with make_llm(toy, speculative=METHODS["EAGLE3"](toy, tmp_path)) as llm:
        remote = Colocated(llm, tmp_path)
        remote.start()
        assert num_verified(llm.generate([[5, 6, 7], [5, 6, 8]], PARAMS)) > 10
        remote.close()
    # To lists in the drafter's process, from lists in the target's.
    assert set(+conversions) == {"of", "to_lists", "packed"}
    assert conversions["of"] == conversions["to_lists"]
    assert conversions["of"] - conversions["packed"] in (0, 1)  # nobody reads the last reply


def num_verified(generations: Sequence[Generation]) -> int:
    return sum(generation.choices[0].usage.num_draft_tokens for generation in generations)
