"""Small heads with the config.json of published ones draft what a float64 reference of target and head drafts.

The reference is numpy code written from the definitions in SafeAILab/EAGLE, SpecForge and speculators. It computes each
node of a tree from the whole text, without a cache.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specray.config import SpeculativeConfig
from specray.models.heads.eagle_files import HeadConfig
from specray.spec_decode import DRAFTERS
from specray.spec_decode.draft_rows import DraftRows
from specray.spec_decode.draft_tree import DraftTree
from specray.spec_decode.drafter import Drafter, TargetView
from specray.spec_decode.eagle import EagleDrafter
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.spec_decode.tree_shape import TreeShape
from tests.support.checked_runs import CLOSE, PREFIX, assert_checked, is_grown_to, run
from tests.support.eagle_toy import ToyHead, target_matrices
from tests.support.engine import make_llm
from tests.support.naive_eagle import NaiveTree
from tests.support.naive_eagle import Path as TreePath
from tests.support.public_heads import NUM_LAYERS, PUBLISHED, small_head
from tests.support.toy import oracle_states, write_toy

SHAPE = TreeShape(num_steps=3, topk=2, num_draft_tokens=6)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("target"), num_layers=NUM_LAYERS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_name_the_layers_that_the_head_reads(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    config = HeadConfig.read(tmp_path)
    if published.version == 3:
        assert config.aux_hidden_state_layers(tmp_path, published.num_layers) == published.entering


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_and_trees_equal_those_of_the_reference(
    name: str, tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = small_head(name)
    algorithm = "EAGLE3" if head.layout.version == 3 else "EAGLE"
    drafters: list[CheckedDrafter] = []
    method = DRAFTERS[algorithm]

    def make(config: SpeculativeConfig, target: TargetView) -> Drafter:
        drafter = method.make(config, target)
        assert isinstance(drafter, EagleDrafter)
        drafters.append(CheckedDrafter(drafter, Reference(head, PUBLISHED[name].small_layers, target_folder)))
        return drafters[0]

    monkeypatch.setitem(DRAFTERS, algorithm, method._replace(make=make))
    speculative = SpeculativeConfig(
        algorithm=algorithm,
        draft_model_path=str(head.write(tmp_path / "head")),
        num_steps=SHAPE.num_steps,
        eagle_topk=SHAPE.topk,
        num_draft_tokens=SHAPE.num_draft_tokens,
    )
    with make_llm(target_folder, speculative=speculative, page_size=4) as llm:
        run(llm, [[*PREFIX, 40], [*PREFIX[:9], 33]], max_tokens=10)
    assert_checked(drafters[0], at_least=5)


class Reference:
    """Target and head of one head's test."""

    def __init__(self, head: ToyHead, layers: Sequence[int], target_folder: Path) -> None:
        self._head, self._layers, self._target = head, layers, target_folder
        embedding, self.target_head = target_matrices(target_folder)
        self._embedding = head.weights.get("embed_tokens.weight", embedding)
        offsets = head.weights.get("d2t")
        self.ids = None if offsets is None else torch.from_numpy(offsets + np.arange(len(offsets))).long()

    def states(self, tokens: list[int]) -> np.ndarray:
        """The head's first states at all positions but the last."""
        entering = oracle_states(self._target, tokens[:-1])
        return self._head.fuse(np.concatenate([entering[layer] for layer in self._layers], 1))

    def output(self, tokens: list[int], states: np.ndarray) -> np.ndarray:
        """Output [H] for the last of `tokens`; states [T - 1, H] precede all tokens but the first."""
        output: np.ndarray = self._head.step(self._embedding[tokens[1:]], states)[-1]
        return output

    def recur(self, output: np.ndarray) -> np.ndarray:
        return self._head.recur(output[None])

    def logits(self, output: np.ndarray) -> Tensor:
        return torch.from_numpy(self._head.logits(output[None], self.target_head)[0]).float()


class ReferenceTree(NaiveTree):
    """The reference's tree of one request."""

    def __init__(self, context: ProposeContext, request: DraftRequest, reference: Reference) -> None:
        self._reference = reference
        self._tokens = context.token_ids(request)
        self._states = reference.states(self._tokens)
        self._outputs: dict[TreePath, np.ndarray] = {}
        super().__init__(context, request, SHAPE, reference.ids)

    def _logits(self, path: TreePath) -> Tensor:
        return self._reference.logits(self._output(path))

    def _output(self, path: TreePath) -> np.ndarray:
        if path not in self._outputs:
            drafted = [self._reference.recur(self._output(path[:length])) for length in range(len(path))]
            self._outputs[path] = self._reference.output(
                [*self._tokens, *path], np.concatenate((self._states, *drafted))
            )
        return self._outputs[path]


class CheckedDrafter:
    """A drafter whose trees, and the logits below their roots, are compared with the reference.

    The logits cannot be seen where one call of the kernels makes them and the trees: every other call is in parts.
    """

    reads_next_token = True

    def __init__(self, drafter: EagleDrafter, reference: Reference) -> None:
        self.max_draft_tokens, self.aux_hidden_state_layers = drafter.max_draft_tokens, drafter.aux_hidden_state_layers
        self.num_checked = self.num_close_calls = 0
        self._drafter, self._reference = drafter, reference
        self._logits: list[Tensor] = []
        self._in_one_call, self._num_calls = drafter._in_one_call, 0
        drafter._in_one_call = self._every_other_time  # type: ignore[method-assign]
        grow = drafter._grower.grow

        def recorded(rows: DraftRows, output: Tensor, positions: Tensor) -> DraftTree:
            self._logits.append(drafter._head.logits(output))
            return grow(rows, output, positions)

        drafter._grower.grow = recorded  # type: ignore[method-assign]

    def propose(self, context: ProposeContext) -> DraftTree:
        self._logits.clear()
        self._num_calls += 1
        proposed = self._drafter.propose(context)
        for row, (request, tree) in enumerate(zip(context.requests, proposed.to_lists(), strict=True)):
            expected = ReferenceTree(context, request, self._reference)
            logits = expected._logits(())
            if self._logits:
                assert (self._logits[0][row] - logits).abs().max() < 1e-4 * logits.abs().max()
            is_same = is_grown_to(tree, expected.tree, context, SHAPE.num_steps)
            self.num_checked += 1
            self.num_close_calls += not is_same
            assert is_same or expected.has_near_tie(CLOSE), request
        return proposed

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)

    def _every_other_time(self, context: ProposeContext) -> DraftTree | None:
        return self._in_one_call(context) if self._num_calls % 2 == 0 else None
