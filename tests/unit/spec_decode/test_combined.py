"""N-gram drafts replace those of the model where the match is long enough. The model still reads every step."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.spec_decode import check_speculative
from specray.spec_decode.combined import CombinedDrafter, with_override
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import Drafter, DraftFaultError
from specray.spec_decode.propose_context import ProposeContext
from specray.step import DraftFault
from tests.support.drafters import Tokens, make_context


class RecordingDrafter:
    """Drafts a chain of two tokens 50, and records the slots that it reads and releases."""

    max_draft_tokens = 3
    aux_hidden_state_layers: tuple[int, ...] = (1, 2)
    reads_next_token = True

    def __init__(self, fault: DraftFault | None = None) -> None:
        self.slots: list[list[int]] = []
        self.released: list[int] = []
        self._fault = fault

    def propose(self, context: ProposeContext) -> DraftTree:
        self.slots.append([request.slot for request in context.requests + context.unfinished])
        if self._fault:
            raise DraftFaultError(self._fault)
        return DraftTree.from_lists([TreeLists([root, 50, 50], [NONE, 0, 1]) for root in context.roots().tolist()])

    def release(self, slots: Sequence[int]) -> None:
        self.released += slots


def combined(model: Drafter) -> Drafter:
    config = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="x", ngram_override_min_match=3)
    return with_override(model, config)


def propose(drafter: Drafter, *texts: list[int]) -> list[list[int]]:
    requests = [Tokens(slot, text) for slot, text in enumerate(texts)]
    return [tree.tokens for tree in drafter.propose(make_context(requests)).to_lists()]


MATCH_OF_2 = [1, 2, 7, 8, 0, 1, 2]
MATCH_OF_3 = [0, 1, 2, 7, 8, 0, 1, 2]


def test_a_long_match_overrides_the_model() -> None:
    assert propose(combined(RecordingDrafter()), MATCH_OF_2, MATCH_OF_3, [4]) == [
        [2, 50, 50],
        [2, 7, 8, 0],
        [4, 50, 50],
    ]


def test_a_match_without_likely_continuations_leaves_the_models_drafts() -> None:
    """With SUFFIX, all of them can be below ngram_min_token_prob."""
    drafter = combined(RecordingDrafter())
    assert isinstance(drafter, CombinedDrafter)
    nothing = SimpleNamespace(match_length=5, tree=TreeLists([2], [NONE]))
    drafter._ngrams.draft = lambda _: [nothing]  # type: ignore[assignment, method-assign, list-item, return-value]
    assert propose(drafter, MATCH_OF_3) == [[2, 50, 50]]


def test_n_gram_drafts_are_limited_to_the_models_maximum() -> None:
    drafter = combined(RecordingDrafter())
    assert drafter.max_draft_tokens == 3
    assert len(propose(drafter, [1] * 20)[0]) == 4


def test_the_inputs_are_those_of_the_model() -> None:
    drafter = combined(RecordingDrafter())
    assert (drafter.aux_hidden_state_layers, drafter.reads_next_token) == ((1, 2), True)


def test_the_model_reads_all_requests() -> None:
    model = RecordingDrafter()
    drafter = combined(model)
    drafter.propose(make_context([Tokens(0, MATCH_OF_3), Tokens(1, MATCH_OF_2)], [Tokens(2, [1])]))
    drafter.release([0, 1])
    assert (model.slots, model.released) == ([[0, 1, 2]], [0, 1])


def test_a_fault_of_the_model_is_raised() -> None:
    with pytest.raises(DraftFaultError, match="nan"):
        propose(combined(RecordingDrafter(DraftFault.NOT_A_NUMBER)), MATCH_OF_3)


def test_n_grams_include_outputs_of_ended_requests() -> None:
    drafter = combined(RecordingDrafter())
    propose(drafter, [0, 1, 2, 7, 8])
    drafter.release([0])
    assert propose(drafter, [3, 0, 1, 2]) == [[2, 7, 8]]


def test_without_the_option_the_drafter_is_not_wrapped() -> None:
    model: Drafter = RecordingDrafter()
    assert with_override(model, SpeculativeConfig(algorithm="EAGLE3", draft_model_path="x")) is model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ngram_override_min_match": 13}, ["ngram_override_min_match=13", "at most 12 tokens"]),
        ({"ngram_override_min_match": 4, "ngram_max_match_window_size": 18}, ["=18", "at least 19"]),
        ({"ngram_capacity": 5000}, ["ngram_capacity=5000", "no effect", "ngram_override_min_match"]),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_speculative(SpeculativeConfig(algorithm="EAGLE3", draft_model_path="x", **options))
    assert all(part in str(caught.value) for part in expected)


def test_ngram_options_are_valid_with_the_override() -> None:
    options: dict[str, Any] = {"ngram_override_min_match": 4, "ngram_capacity": 5000, "ngram_match_type": "PROB"}
    check_speculative(SpeculativeConfig(algorithm="EAGLE3", draft_model_path="x", **options))
