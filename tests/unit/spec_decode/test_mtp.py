"""Several MTP layers in engine runs, compared with layers that read the whole text again for each node."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.models.heads.mtp import MtpStack
from specray.ops.layer_attention import LayerAttention
from specray.sampling_params import SamplingParams
from specray.spec_decode import DRAFTERS, check_speculative
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, TargetView
from specray.spec_decode.eagle import EagleDrafter
from specray.spec_decode.mtp import StackDrafter, stack_shape
from specray.spec_decode.propose_context import ProposeContext
from specray.spec_decode.tree_shape import TreeShape
from specray.spec_decode.tree_sizes import configured_shape
from tests.support.checked_runs import CLOSE, RUNS, is_grown_to, run, total
from tests.support.engine import generate, make_llm
from tests.support.heads import write_random_head
from tests.support.methods import mtp, published_mtp
from tests.support.mtp import write_deepseek
from tests.support.naive_eagle import NaiveDraft, attend_to_the_past
from tests.support.naive_eagle import Path as NodePath

STACKS = {
    "tree": mtp(3, (3, 3, 8)),
    "chain": mtp(3, (3, 1, 4)),
    "fewer-steps": mtp(3, (2, 2, 5)),
    "windows": published_mtp("mimo_v2_flash", (3, 2, 7)),
}


class NaiveStack(NaiveDraft):
    """Layer k reads the tokens from k + 1 on and the states of layer k - 1, at positions from 0 on, as in training."""

    def _output(self, path: NodePath) -> torch.Tensor:
        """[1, hidden]: the output that predicts the token after `path`."""
        stack, end = self._head, self._end
        assert isinstance(stack, MtpStack)
        self._last_kv = torch.empty(0)
        tokens, states = torch.tensor([*self._text, *path]), self._states
        for layer in range(len(path) + 1):
            embeds = stack._embedding(tokens[layer + 1 : layer + 1 + end])
            how = stack.layer_attention[layer] if stack.layer_attention else LayerAttention()
            attend = partial(attend_to_the_past, how=how)
            states = stack._layers[layer](embeds, states, torch.arange(end), attend)
        return states[-1:]


class CheckedStack:
    """A drafter whose trees are compared with the reference."""

    reads_next_token = True

    def __init__(self, drafter: StackDrafter, shape: TreeShape, target: TargetView) -> None:
        self.max_draft_tokens, self.aux_hidden_state_layers = drafter.max_draft_tokens, drafter.aux_hidden_state_layers
        self.num_checked = 0
        self._drafter, self._shape, self._target = drafter, shape, target

    def propose(self, context: ProposeContext) -> DraftTree:
        proposed = self._drafter.propose(context)
        with torch.inference_mode():
            for request, tree in zip(context.requests, proposed.to_lists(), strict=True):
                if request.end < self._drafter._stack.num_layers:
                    continue  # too short for all layers to have an input
                model, stack = self._target.model, self._drafter._stack
                expected = NaiveStack(context, request, model, stack, self._shape, 10**9)  # type: ignore[arg-type]
                is_same = is_grown_to(tree, expected.tree, context, self._shape.num_steps)
                assert is_same or expected.has_near_tie(CLOSE), request
                self.num_checked += 1
        return proposed

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)


@pytest.mark.parametrize(
    ("name", "options"),
    [*(("tree", name) for name in RUNS), ("chain", "pages-of-1"), ("fewer-steps", "chunks"), ("windows", "chunks")],
)
def test_trees_equal_the_reference(
    name: str, options: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters: list[CheckedStack] = []
    method = DRAFTERS["MTP"]

    def make(config: SpeculativeConfig, target: TargetView) -> Drafter:
        drafter = method.make(config, target)
        assert isinstance(drafter, StackDrafter)
        drafters.append(CheckedStack(drafter, configured_shape(config, ""), target))
        return drafters[-1]

    monkeypatch.setitem(DRAFTERS, "MTP", method._replace(make=make))
    with make_llm(toy, speculative=STACKS[name](toy, tmp_path), **RUNS[options]) as llm:
        for _ in range(2):  # the second time with cached prefixes
            choices = run(llm)
    assert drafters[0].num_checked > 20
    assert total(choices, "num_accepted") > 0


@pytest.mark.parametrize("algorithm", ["MTP", "EAGLE", "NEXTN"])
def test_without_a_draft_path_the_targets_own_mtp_layers_draft(algorithm: str, tmp_path: Path) -> None:
    write_deepseek(tmp_path, num_layers=1)
    prompts = [[0, *range(4, 30)], [5, 6]]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    plain = [choice.token_ids for choice in generate(tmp_path, prompts, params)]
    speculative = SpeculativeConfig(algorithm=algorithm)
    with make_llm(tmp_path, speculative=speculative) as llm:
        assert isinstance(llm._executor.worker.drafts.drafter.drafter, EagleDrafter)  # type: ignore[attr-defined]
        assert [g.choices[0].token_ids for g in llm.generate(prompts, params)] == plain


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_an_eagle_head_is_loaded_under_both_names(algorithm: str, toy: Path, tmp_path: Path) -> None:
    head = write_random_head(tmp_path / "head", toy, 2)
    with make_llm(toy, speculative=SpeculativeConfig(algorithm=algorithm, draft_model_path=str(head))) as llm:
        assert llm.engine.capacity.max_draft_tokens == 7


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("MTP", "holds no MTP layers"), ("EAGLE", "draft_model_path is null and the target")]
)
def test_a_target_without_mtp_layers_is_refused(algorithm: str, expected: str, toy: Path) -> None:
    speculative = SpeculativeConfig(algorithm=algorithm)
    check_speculative(speculative)
    with pytest.raises(ConfigError, match=f"{expected}.*draft_model_path"):
        make_llm(toy, speculative=speculative)


def test_num_steps_is_limited_to_the_number_of_layers() -> None:
    steps: dict[str, Any] = {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    with pytest.raises(ConfigError, match=r"num_steps=3 is more than the checkpoint's 2 MTP layers.*num_steps <= 2"):
        stack_shape(SpeculativeConfig(algorithm="MTP", **steps), "", 2)
    assert stack_shape(SpeculativeConfig(algorithm="MTP", **steps), "", 3) == TreeShape(3, 1, 4)
    assert stack_shape(SpeculativeConfig(algorithm="MTP"), "", 2) == TreeShape(2, 1, 3)
    assert stack_shape(SpeculativeConfig(algorithm="MTP"), "LlamaForCausalLM", 2) == TreeShape(2, 4, 8)
