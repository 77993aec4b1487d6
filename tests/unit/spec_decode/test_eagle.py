"""The EAGLE drafter inside real runs, call by call, against a reference that keeps no cache and shares no batch.

Every tree and every draft KV of every row is compared, so any wrong input of the drafter shows here: hidden states of
other tokens, a cached block with another draft state, a mask that sees a neighbour's branch.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import SpeculativeConfig
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from specray.spec_decode import DRAFTERS, Method
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, DraftRequest, ProposeContext, TargetView
from specray.spec_decode.eagle import EagleDrafter
from specray.spec_decode.tree_shape import TreeShape
from specray.step import DraftLimit
from tests.support.checked_runs import CLOSE, PREFIX, PROMPTS, RUNS, assert_checked, is_grown_to, run, total
from tests.support.drafters import make_context
from tests.support.engine import make_llm
from tests.support.methods import Make, eagle, mtp
from tests.support.naive_eagle import NaiveDraft
from tests.support.toy import CONTEXT

HEADS: dict[str, Make] = {
    "EAGLE3": eagle(3, shape=(3, 3, 8), draft_vocab_size=40),
    "EAGLE3-full": eagle(3, shape=(4, 2, 9)),
    "EAGLE3-chain": eagle(3, shape=(4, 1, 5)),
    "EAGLE": eagle(2, shape=(3, 3, 8)),
    "EAGLE-map": eagle(2, shape=(4, 2, 12), token_map=range(3, 60, 2)),
    "EAGLE-chain": eagle(2, shape=(4, 1, 5)),
    "EAGLE-flat": eagle(2, shape=(1, 6, 5)),
    "MTP": mtp(shape=(3, 3, 8)),
}


class CheckedDrafter:
    """The drafter; each of its calls is compared with the reference."""

    reads_next_token = True

    def __init__(self, drafter: EagleDrafter, shape: TreeShape, target: TargetView) -> None:
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
                assert is_same or expected.is_close_call(CLOSE), request
        return proposed

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)

    def _naive(self, context: ProposeContext, request: DraftRequest) -> NaiveDraft:
        assert self._target.model is not None
        last = self._target.context_length - 1
        return NaiveDraft(context, request, self._target.model, self._drafter._head, self._shape, last)

    def _kv(self, context: ProposeContext, request: DraftRequest) -> torch.Tensor:
        kv_slots = context.table.kv_slots[request.slot, : request.end].long()
        return self._drafter._attention._pool[0, kv_slots]  # type: ignore[attr-defined]


Start = Callable[..., tuple[LLM, CheckedDrafter]]


@pytest.fixture
def start(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """(an engine whose drafter is checked, the checked drafter) of a head's name and the engine's options."""
    made: list[CheckedDrafter] = []

    def checked(method: Method) -> Method:
        def make(config: SpeculativeConfig, target: TargetView) -> Drafter:
            drafter = method.make(config, target)
            assert isinstance(drafter, EagleDrafter)
            made.append(CheckedDrafter(drafter, TreeShape.of(config, target.architecture), target))
            return made[-1]

        return method._replace(make=make)

    for name in ("EAGLE3", "EAGLE", "MTP"):
        monkeypatch.setitem(DRAFTERS, name, checked(DRAFTERS[name]))

    def start(head: str, **options: Any) -> tuple[LLM, CheckedDrafter]:
        llm = make_llm(toy, speculative=HEADS[head](toy, tmp_path), **options)
        return llm, made[-1]

    return start


@pytest.mark.parametrize("head", HEADS)
def test_cold_and_warm_every_tree_is_the_naive_one(head: str, start: Start) -> None:
    llm, drafter = start(head, page_size=4)
    with llm:
        cold = run(llm)
        warm = run(llm)
    assert [choice.token_ids for choice in warm] == [choice.token_ids for choice in cold]
    assert total(warm, "num_cached_tokens") >= 40
    assert total(warm, "num_accepted") > 0
    assert_checked(drafter, at_least=40)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("head", ["EAGLE3", "EAGLE"])
def test_pages_chunks_and_preemption_change_no_tree(head: str, name: str, start: Start) -> None:
    llm, drafter = start(head, **RUNS[name])
    with llm:
        choices = run(llm) + run(llm, PROMPTS[::-1])
    assert (total(choices, "num_preemptions") > 0) == (name == "preemption")
    assert_checked(drafter, at_least=40)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_cached_prefix_before_another_token_is_not_the_same_draft_state(page_size: int, start: Start) -> None:
    """The draft KV of a block's last token was made with the token after it."""
    llm, drafter = start("EAGLE3", page_size=page_size)
    with llm:
        [first, again, other] = [run(llm, [[*PREFIX, token, 20]], max_tokens=3)[0] for token in (40, 40, 50)]
    assert total([first], "num_cached_tokens") == 0
    assert total([again], "num_cached_tokens") == 17 // page_size * page_size
    assert total([other], "num_cached_tokens") == 15 // page_size * page_size
    assert_checked(drafter, at_least=6)


@pytest.mark.parametrize("head", ["EAGLE3", "EAGLE"])
def test_trees_at_the_end_of_the_context(head: str, start: Start) -> None:
    """Nodes past the last position have nowhere to go, and never come to be verified."""
    llm, drafter = start(head, page_size=16)
    with llm:
        [choice] = run(llm, [[*[7] * (CONTEXT - 6), 5]], max_tokens=5)
    assert len(choice.token_ids) == 5
    assert_checked(drafter, at_least=3)


@pytest.mark.parametrize("head", ["EAGLE3-chain", "EAGLE-chain"])
def test_noise_that_outweighs_all_logits_is_drafted_to_the_end(head: str, start: Start) -> None:
    """It is the noise the target samples with, so nearly every draft is right, however bad the head."""
    llm, drafter = start(head, page_size=4)
    with llm:
        choices = run(llm, PROMPTS[:3], max_tokens=41, temperatures=[100.0] * 3)
    assert total(choices, "num_accepted") > 2 * total(choices, "num_verify_steps")
    assert_checked(drafter, at_least=20)


def test_nothing_to_read_is_nothing_to_draft(start: Start) -> None:
    llm, drafter = start("EAGLE3")
    with llm:
        assert drafter.propose(make_context([])).to_lists() == []


def test_levels_that_would_not_be_verified_are_not_computed(start: Start) -> None:
    llm, drafter = start("EAGLE3", page_size=4)
    grower = drafter._drafter._grower
    levels: list[int] = []
    forward_level = grower._forward_level

    def counted(*args: Any) -> torch.Tensor:
        levels.append(args[-1])
        return forward_level(*args)

    grower._forward_level = counted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with llm:
        for num_steps, deepest in ((1, 0), (2, 1), (9, 2)):
            llm.generate(PROMPTS[:2], params, draft_limits=[DraftLimit(7, 1), DraftLimit(7, num_steps)])
            assert max(levels, default=0) == deepest
