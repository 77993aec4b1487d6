"""Every drafting method passes the conformance tests that `specray.testing` offers to drafters of users."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from specray.config import SpeculativeConfig
from specray.llm import LLM
from specray.spec_decode import DRAFTERS
from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.spec_decode.drafter import ProposeContext, TargetView
from specray.testing import CHECKS, Check, trees_are_valid
from tests.support.engine import make_llm
from tests.support.methods import METHODS

HERE = "tests.lossless.test_conformance"


class CopiesTheLastToken:
    """A drafter of a user: the last token again, three times."""

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_next_token = False
    max_draft_tokens = 3

    def __init__(self, config: SpeculativeConfig, target: TargetView) -> None:
        self.received = config, target

    def propose(self, context: ProposeContext) -> DraftTree:
        chain = [-1, 0, 1, 2]
        return DraftTree.from_lists([TreeLists([root] * 4, chain) for root in context.roots().tolist()])

    def release(self, slots: Sequence[int]) -> None:
        pass


class DraftsTooMuch(CopiesTheLastToken):
    max_draft_tokens = 2


class ForgetsTheRoot(CopiesTheLastToken):
    def propose(self, context: ProposeContext) -> DraftTree:
        tree = super().propose(context)
        return DraftTree(tree.tokens + 1, tree.parents, tree.num_nodes, tree.max_depth)


class DraftsForOne(CopiesTheLastToken):
    def propose(self, context: ProposeContext) -> DraftTree:
        return DraftTree.from_lists([TreeLists([root], [-1]) for root in context.roots().tolist()][:1])


@pytest.fixture(scope="module")
def llm(toy: Path) -> Iterator[LLM]:
    with make_llm(toy) as llm:
        yield llm


@pytest.mark.parametrize("method", [*DRAFTERS, "MTP-stack", "EAGLE3-ngram"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_our_methods(check: Check, method: str, llm: LLM, toy: Path, tmp_path: Path) -> None:
    check(llm, METHODS[method](toy, tmp_path))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_drafter_named_by_import_path(check: Check, llm: LLM) -> None:
    check(llm, SpeculativeConfig(algorithm=f"{HERE}:CopiesTheLastToken"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DraftsTooMuch", "3 drafts, but max_draft_tokens is 2"),
        ("ForgetsTheRoot", "root is not the request's last token"),
        ("DraftsForOne", "1 trees for 3 requests"),
    ],
)
def test_a_drafter_that_breaks_a_rule_fails(name: str, message: str, llm: LLM) -> None:
    with pytest.raises(AssertionError, match=message):
        trees_are_valid(llm, SpeculativeConfig(algorithm=f"{HERE}:{name}"))
