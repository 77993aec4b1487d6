"""Every drafting method passes the checks that `specray.testing` offers for drafters, and broken drafters fail them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.spec_decode import DRAFTERS
from specray.spec_decode.draft_tree import NONE, DraftTree
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.propose_context import ProposeContext
from specray.testing import DRAFTER_CHECKS
from specray.testing.conformance import Check, check_own_process, check_trees, check_wrong_drafts
from tests.support.methods import METHODS


def config_of(toy: Path, speculative: SpeculativeConfig) -> EngineConfig:
    return EngineConfig(model=str(toy), device="cpu", num_threads=1, max_total_tokens=4096, speculative=speculative)


@pytest.mark.parametrize("check", DRAFTER_CHECKS)
@pytest.mark.parametrize("method", [*DRAFTERS, "MTP-stack", "EAGLE3-merged", "SEVERAL"])
def test_every_method_passes_the_checks(method: str, check: Check, toy: Path, tmp_path: Path) -> None:
    check(config_of(toy, METHODS[method](toy, tmp_path)))


class Repeat:
    """Drafts the last token two more times."""

    max_draft_tokens = 2
    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, config: SpeculativeConfig, target: TargetView) -> None:
        self.max_draft_tokens = min(self.max_draft_tokens, (config.num_draft_tokens or 3) - 1)
        self.model = target.model

    def propose(self, context: ProposeContext) -> DraftTree:
        return self.tree(context.roots()[:, None].repeat(1, 3))

    def tree(self, tokens: torch.Tensor) -> DraftTree:
        return DraftTree.chains(tokens)

    def release(self, slots: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("check", DRAFTER_CHECKS)
def test_a_drafter_named_by_its_import_path_passes_the_checks(check: Check, toy: Path) -> None:
    check(config_of(toy, SpeculativeConfig(algorithm=f"{__name__}:Repeat")))


class ChangesTheContext(Repeat):
    def propose(self, context: ProposeContext) -> DraftTree:
        context.table.token_ids[context.requests[0].slot if context.requests else 0, 0] += 1
        return super().propose(context)


class WrongRoot(Repeat):
    def tree(self, tokens: torch.Tensor) -> DraftTree:
        return DraftTree.chains((tokens + 1) % 64)


class TooLong(Repeat):
    max_draft_tokens = 1


class TooDeep(Repeat):
    def tree(self, tokens: torch.Tensor) -> DraftTree:
        tree = DraftTree.chains(tokens)
        return DraftTree(tree.tokens, tree.parents, tree.num_nodes, 1)


class NotInTheVocabulary(Repeat):
    def tree(self, tokens: torch.Tensor) -> DraftTree:
        return DraftTree.chains(torch.cat((tokens[:, :1], tokens[:, 1:] + 64), 1))


class ParentAfterChild(Repeat):
    def tree(self, tokens: torch.Tensor) -> DraftTree:
        parents = torch.tensor([NONE, 2, 0]).expand(len(tokens), -1)
        return DraftTree(tokens, parents, torch.full((len(tokens),), 3), 2)


class OneRow(Repeat):
    def tree(self, tokens: torch.Tensor) -> DraftTree:
        return DraftTree.chains(tokens[:1])


class Int32(Repeat):
    def tree(self, tokens: torch.Tensor) -> DraftTree:
        return DraftTree.chains(tokens.int())


class NoDrafts(Repeat):
    def tree(self, tokens: torch.Tensor) -> DraftTree:
        return DraftTree.roots(tokens[:, 0])


class NeedsTheModel(Repeat):
    def tree(self, tokens: torch.Tensor) -> DraftTree:
        assert self.model is not None, "no model"
        return DraftTree.chains(tokens)


@pytest.mark.parametrize(
    ("drafter", "check", "message"),
    [
        (ChangesTheContext, check_trees, "changed the token ids"),
        (WrongRoot, check_trees, "roots"),
        (TooLong, check_trees, "exceeds max_draft_tokens=1"),
        (TooDeep, check_trees, "depth 2 is below max_depth=1"),
        (NotInTheVocabulary, check_trees, "invalid"),
        (ParentAfterChild, check_trees, "invalid"),
        (OneRow, check_trees, "shapes"),
        (Int32, check_trees, "int32"),
        (NoDrafts, check_trees, "drafted no token"),
        (NeedsTheModel, check_own_process, "no model"),
    ],
)
def test_a_broken_drafter_fails_its_check(drafter: type, check: Check, message: str, toy: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        check(config_of(toy, SpeculativeConfig(algorithm=f"{__name__}:{drafter.__name__}")))


def test_a_verifier_that_accepts_wrong_drafts_fails_the_check(toy: Path) -> None:
    lossy = {"simulate_accept_length": 2.0, "simulate_output_is_meaningless": True}
    speculative = SpeculativeConfig(algorithm=f"{__name__}:Repeat", **lossy)
    with pytest.raises(AssertionError, match="plain decoding has"):
        check_wrong_drafts(config_of(toy, speculative))
