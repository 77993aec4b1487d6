"""The EAGLE drafter in engine runs, compared at each call with a reference that has no KV cache and no batching.

All trees and all draft KV are compared, so these tests detect wrong hidden states, wrong masks, and cached blocks with
wrong draft KV.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.ops.cpu.library import kernels
from specray.sampling_params import SamplingParams
from specray.spec_decode import DRAFTERS, Method
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, TargetView
from specray.spec_decode.eagle import EagleDrafter
from specray.spec_decode.parallel import ParallelDrafter
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import configured_shape
from specray.step import DraftLimit
from tests.support.checked_runs import CLOSE, PREFIX, PROMPTS, RUNS, assert_checked, is_grown_to, run, total
from tests.support.drafters import make_context
from tests.support.engine import make_llm
from tests.support.methods import Make, eagle, mtp, published_mtp
from tests.support.naive_eagle import NaiveDraft, NaiveParallel
from tests.support.toy import CONTEXT

HEADS: dict[str, Make] = {
    "EAGLE3": eagle(3, shape=(3, 3, 8), draft_vocab_size=40),
    "EAGLE3-full": eagle(3, shape=(4, 2, 9)),
    "EAGLE3-chain": eagle(3, shape=(4, 1, 5)),
    "EAGLE3-deep": eagle(3, shape=(6, 3, 6)),  # few nodes: levels that add none are left out
    "EAGLE3-sliding": eagle(3, shape=(3, 3, 8), window=7),
    "EAGLE3-sliding-below-depth": eagle(3, shape=(4, 2, 9), window=2),
    "EAGLE-sliding": eagle(2, shape=(3, 3, 8), window=5),
    "EAGLE": eagle(2, shape=(3, 3, 8)),
    "EAGLE-map": eagle(2, shape=(4, 2, 12), token_map=range(3, 60, 2)),
    "EAGLE-chain": eagle(2, shape=(4, 1, 5)),
    "EAGLE-flat": eagle(2, shape=(1, 6, 5)),
    "MTP": mtp(shape=(3, 3, 8)),
    "MTP-glm4_moe_lite": published_mtp("glm4_moe_lite", (3, 3, 8)),
}
PARALLEL: dict[str, Make] = {
    "PARALLEL": eagle(3, shape=(3, 3, 8), draft_vocab_size=40, is_parallel=True),
    "PARALLEL-sliding": eagle(3, shape=(4, 2, 9), window=3, is_parallel=True),
    "PARALLEL-chain": eagle(3, shape=(4, 1, 5), is_parallel=True),
}


class CheckedDrafter:
    """A drafter whose calls are compared with the reference."""

    reads_next_token = True

    def __init__(self, drafter: EagleDrafter | ParallelDrafter, shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens, self.aux_hidden_state_layers = drafter.max_draft_tokens, drafter.aux_hidden_state_layers
        self.num_checked = self.num_close_calls = 0
        self._drafter, self._shape, self._target = drafter, shape, target

    def propose(self, context: ProposeContext) -> DraftTree:
        proposed = self._drafter.propose(context)
        assert len(proposed.num_nodes) == len(context.requests)
        with torch.inference_mode():
            for request, tree in zip(context.requests, proposed.to_lists(), strict=True):
                expected = self._naive(context, request)
                torch.testing.assert_close(self._kv(context, request), expected.kv, atol=1e-4, rtol=1e-3)
                self.num_checked += 1
                is_same = is_grown_to(tree, expected.tree, context, self._shape.num_steps)
                self.num_close_calls += not is_same
                assert is_same or expected.has_near_tie(CLOSE), request
        return proposed

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)

    def _naive(self, context: ProposeContext, request: DraftRequest) -> NaiveDraft:
        assert self._target.model is not None
        last = self._target.context_length - 1
        naive = NaiveParallel if isinstance(self._drafter, ParallelDrafter) else NaiveDraft
        return naive(context, request, self._target.model, self._drafter._head, self._shape, last)

    def _kv(self, context: ProposeContext, request: DraftRequest) -> torch.Tensor:
        kv_slots = context.table.kv_slots[request.slot, : request.end].long()
        return self._drafter._kv.attention.pool[0, kv_slots]  # type: ignore[attr-defined]


Start = Callable[..., tuple[LLM, CheckedDrafter]]


@pytest.fixture
def start(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function (name in HEADS, engine options) -> (engine, its checked drafter)."""
    drafters: list[CheckedDrafter] = []

    def checked(method: Method) -> Method:
        def make(config: SpeculativeConfig, target: TargetView) -> Drafter:
            drafter = method.make(config, target)
            assert isinstance(drafter, EagleDrafter | ParallelDrafter)
            drafters.append(CheckedDrafter(drafter, configured_shape(config, target.architecture), target))
            return drafters[-1]

        return method._replace(make=make)

    for name in ("EAGLE3", "EAGLE", "MTP", "PARALLEL"):
        monkeypatch.setitem(DRAFTERS, name, checked(DRAFTERS[name]))

    def start(head: str, **options: Any) -> tuple[LLM, CheckedDrafter]:
        llm = make_llm(toy, speculative=(HEADS | PARALLEL)[head](toy, tmp_path), **options)
        return llm, drafters[-1]

    return start


@pytest.mark.parametrize("head", HEADS | PARALLEL)
def test_trees_equal_the_reference_with_and_without_a_cached_prefix(head: str, start: Start) -> None:
    llm, drafter = start(head, page_size=4)
    with llm:
        cold = run(llm)
        warm = run(llm)
    assert [choice.token_ids for choice in warm] == [choice.token_ids for choice in cold]
    assert total(warm, "num_cached_tokens") >= 40
    assert total(warm, "num_accepted") > 0
    assert_checked(drafter, at_least=40)


@pytest.mark.parametrize("head", HEADS | PARALLEL)
def test_trees_that_torch_grows_equal_the_reference(head: str, start: Start) -> None:
    """The kernels grow all levels in one call; elsewhere torch does, level by level."""
    llm, drafter = start(head, page_size=4)
    drafter._drafter._fused._kernels = None
    drafter._drafter._in_one_call = lambda _: None
    with llm:
        run(llm)
    assert_checked(drafter, at_least=20)


@pytest.mark.skipif(kernels() is None, reason="torch makes the trees")
def test_the_kernels_make_all_trees_of_masks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("specray.spec_decode.parallel.grow_tree")
    llm, drafter = start("PARALLEL", page_size=4)
    with llm:
        run(llm)
    assert_checked(drafter, at_least=20)


@pytest.mark.skipif(kernels() is None, reason="there is no kernel to leave out")
@pytest.mark.parametrize("head", ["EAGLE3", "EAGLE3-sliding", "EAGLE", "EAGLE-chain"])
def test_trees_equal_the_reference_if_draft_extend_is_a_call_of_its_own(head: str, start: Start) -> None:
    """As after a step that the drafter has missed."""
    llm, checked = start(head, page_size=4)
    assert isinstance(checked._drafter, EagleDrafter)
    assert checked._drafter._network is not None
    checked._drafter._in_one_call = lambda _: None  # type: ignore[method-assign]
    with llm:
        run(llm)
    assert_checked(checked, at_least=20)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("head", ["EAGLE3", "EAGLE3-sliding", "EAGLE", "PARALLEL"])
def test_trees_equal_the_reference_with_any_pages_chunks_and_preemption(head: str, name: str, start: Start) -> None:
    llm, drafter = start(head, **RUNS[name])
    with llm:
        choices = run(llm) + run(llm, PROMPTS[::-1])
    assert (total(choices, "num_preemptions") > 0) == (name == "preemption")
    assert_checked(drafter, at_least=40)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_cached_block_is_not_used_before_a_different_token(page_size: int, start: Start) -> None:
    """The draft KV of a block's last token depends on the next token."""
    llm, drafter = start("EAGLE3", page_size=page_size)
    with llm:
        [first, again, other] = [run(llm, [[*PREFIX, token, 20]], max_tokens=3)[0] for token in (40, 40, 50)]
    assert total([first], "num_cached_tokens") == 0
    assert total([again], "num_cached_tokens") == 17 // page_size * page_size
    assert total([other], "num_cached_tokens") == 15 // page_size * page_size
    assert_checked(drafter, at_least=6)


@pytest.mark.parametrize("head", ["EAGLE3", "EAGLE", "PARALLEL"])
def test_trees_at_the_end_of_the_context(head: str, start: Start) -> None:
    """Nodes beyond the last position are never verified."""
    llm, drafter = start(head, page_size=16)
    with llm:
        [choice] = run(llm, [[*[7] * (CONTEXT - 6), 5]], max_tokens=5)
    assert len(choice.token_ids) == 5
    assert_checked(drafter, at_least=3)


@pytest.mark.parametrize("head", ["EAGLE3-chain", "EAGLE-chain", "PARALLEL-chain"])
def test_nearly_all_drafts_are_accepted_at_a_very_high_temperature(head: str, start: Start) -> None:
    """Noise then outweighs the logits, and drafter and target use the same noise."""
    llm, drafter = start(head, page_size=4)
    with llm:
        choices = run(llm, PROMPTS[:3], max_tokens=41, temperatures=[100.0] * 3)
    assert total(choices, "num_accepted") > 2 * total(choices, "num_verify_steps")
    assert_checked(drafter, at_least=20)


@pytest.mark.parametrize("is_parallel", [False, True], ids=["EAGLE3", "PARALLEL"])
def test_more_children_than_the_head_has_tokens_are_refused(is_parallel: bool, toy: Path, tmp_path: Path) -> None:
    speculative = eagle(3, shape=(2, 9, 12), draft_vocab_size=8, is_parallel=is_parallel)(toy, tmp_path)
    with pytest.raises(ConfigError, match=r"eagle_topk=9 is more than the drafter's 8 tokens; set it to at most 8"):
        make_llm(toy, speculative=speculative)


def test_no_requests_give_no_trees(start: Start) -> None:
    llm, drafter = start("EAGLE3")
    with llm:
        assert drafter.propose(make_context([])).to_lists() == []


def test_levels_beyond_every_limit_are_not_computed(start: Start) -> None:
    llm, drafter = start("EAGLE3", page_size=4)
    assert isinstance(drafter._drafter, EagleDrafter)
    grower, fused = drafter._drafter._grower, drafter._drafter._fused
    levels: list[int] = []

    def recorded(grow: Callable[..., DraftTree | None]) -> Callable[..., Any]:
        def record(*args: Any) -> DraftTree | None:
            tree = grow(*args)
            if tree is not None:
                levels.append(tree.max_depth)
            return tree

        return record

    grower.grow = recorded(grower.grow)  # type: ignore[method-assign]
    fused.extend_and_grow = recorded(fused.extend_and_grow)  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with llm:
        for num_steps, most in ((1, 1), (2, 2), (9, 3)):
            levels.clear()
            llm.generate(PROMPTS[:2], params, draft_limits=[DraftLimit(7, 1), DraftLimit(7, num_steps)])
            assert max(levels) == most


@pytest.mark.skipif(kernels() is None, reason="torch computes all levels")
def test_levels_that_would_add_no_node_are_left_out(start: Start) -> None:
    """The toy's distributions are flat, so that the best five nodes are hardly ever deep."""
    llm, drafter = start("EAGLE3-deep", page_size=4)
    assert isinstance(drafter._drafter, EagleDrafter)
    kv = drafter._drafter._kv
    assert kv.nodes is not None
    pool, scratch = kv.attention.pool, kv.nodes[0]  # type: ignore[attr-defined]
    pool[:, scratch] = 7.0
    with llm:
        run(llm, PROMPTS[:1], max_tokens=20, temperatures=[0.0])
        is_written = (pool[0, scratch] != 7.0).flatten(1).any(1).view(5, 3).all(1).tolist()
    assert is_written[0]
    assert not is_written[-1]
    assert_checked(drafter, at_least=10)
