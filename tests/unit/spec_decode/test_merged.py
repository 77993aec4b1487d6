"""Trees of a drafter merged with n-grams and predicted outputs. The drafter still reads every step."""

from collections.abc import Sequence
from random import Random

import pytest
import torch

from specray.config import SpeculativeConfig
from specray.spec_decode.draft_tree import NONE, DraftTree, TreeLists
from specray.spec_decode.drafter import Drafter, DraftFaultError
from specray.spec_decode.merged import MergedDrafter, with_ngrams
from specray.spec_decode.predicted_outputs import PredictedOutputs
from specray.spec_decode.propose_context import DraftRequest, ProposeContext
from specray.step import UNLIMITED, DraftFault, DraftLimit
from tests.support.drafters import Tokens, make_context, paths_of

HEAD = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="x", merged_draft_tokens=9)
REPEATED = [1, 2, 3, 4, 5, 6, 7, 8]  # a text that comes again and again


class RecordingDrafter:
    """Drafts a chain of two tokens 50 with these scores, and records what it reads and releases."""

    max_draft_tokens = 3
    aux_hidden_state_layers: tuple[int, ...] = (1, 2)
    reads_next_token = True

    def __init__(self, scores: tuple[float, float] | None = (0.6, 0.3), fault: DraftFault | None = None) -> None:
        self.drafted: list[list[int]] = []
        self.only_read: list[list[int]] = []
        self.released: list[int] = []
        self.is_broken = False
        self._scores, self._fault = scores, fault

    def propose(self, context: ProposeContext) -> DraftTree:
        self.drafted.append([request.slot for request in context.requests])
        self.only_read.append([request.slot for request in context.unfinished])
        if self._fault:
            raise DraftFaultError(self._fault)
        count = len(context.requests)
        tree = DraftTree.from_lists([TreeLists([root, 50, 50], [NONE, 0, 1]) for root in context.roots().tolist()])
        if self.is_broken:
            tree = tree._replace(num_nodes=torch.zeros(count, dtype=torch.int64))
        return tree if self._scores is None else tree._replace(scores=torch.tensor([[1.0, *self._scores]] * count))

    def release(self, slots: Sequence[int]) -> None:
        self.released += slots


def merged(model: Drafter, config: SpeculativeConfig = HEAD) -> Drafter:
    from pathlib import Path

    return with_ngrams(model, config, Path())


def propose(drafter: Drafter, *texts: list[int], limit: DraftLimit = UNLIMITED) -> DraftTree:
    return drafter.propose(make_context([Tokens(slot, text, draft_limit=limit) for slot, text in enumerate(texts)]))


def paths(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    return paths_of(tree.to_lists()[row])


def test_the_tree_has_the_paths_of_the_drafter_and_of_the_n_grams() -> None:
    tree = propose(merged(RecordingDrafter()), [1, 2, 7, 8, 0, 1, 2], [4])
    assert {(50,), (50, 50), (7,), (7, 8), (7, 8, 0)} <= set(paths(tree))
    assert paths(tree, 1) == [(50,), (50, 50)]
    assert tree.scores is not None
    assert tree.scores[1].tolist()[:3] == pytest.approx([1.0, 0.65, 0.65 * 0.55], abs=0.15)


def test_trees_keep_to_the_sizes_and_the_inputs_are_those_of_the_drafter() -> None:
    drafter = merged(RecordingDrafter())
    assert (drafter.max_draft_tokens, drafter.aux_hidden_state_layers, drafter.reads_next_token) == (8, (1, 2), True)
    assert len(paths(propose(drafter, [1] * 20))) == 8
    assert len(paths(propose(drafter, [1] * 21, limit=DraftLimit(5, 5)))) == 5
    assert max(map(len, paths(propose(drafter, [1] * 22, limit=DraftLimit(5, 2))))) == 2


def test_the_drafter_reads_but_does_not_draft_what_n_grams_are_sure_of() -> None:
    model = RecordingDrafter()
    drafter, text = merged(model), list(REPEATED)
    for token in REPEATED * 4:
        propose(drafter, text)
        text.append(token)
    assert (model.drafted[0], model.only_read[0]) == ([0], [])
    assert (model.drafted[-1], model.only_read[-1]) == ([], [0])
    tree = propose(drafter, text, [30])  # beside a request that needs drafts, for all
    assert model.drafted[-1] == [0, 1]
    assert paths(tree)[0] == (1,)


def test_a_drafter_that_brought_nothing_is_tried_again() -> None:
    model = RecordingDrafter()
    drafter = merged(model)
    assert isinstance(drafter, MergedDrafter)
    drafter._usual_gain = 0.0
    assert paths(propose(drafter, [100])) == [(50,), (50, 50)], "nothing else drafts for it"
    drafter._usual_gain = 0.0
    for _ in range(200):
        propose(drafter, [1, 2, 3, 4, 1, 2])
        assert model.drafted[-1] == []
    assert drafter._usual_gain > 0.3


def test_a_source_that_is_wrong_loses_its_place() -> None:
    """The n-grams say 7 after 1 2, but other tokens follow: the drafter's tokens come first then."""
    drafter, text = merged(RecordingDrafter()), [1, 2, 7, 8]
    for number in range(12):
        text += [1, 2]
        first = paths(propose(drafter, text))[0]
        text += [50, 50, 60 + number]
        assert number < 11 or first == (50,), first


def test_scores_become_what_is_accepted() -> None:
    """Whatever the drafter says."""
    drafter, text, random = merged(RecordingDrafter(scores=(0.9, 0.1))), [3], Random(0)
    for number in range(400):
        tree = propose(drafter, text)
        text += [50, 70 + number] if random.random() < 0.25 else [500 + number]
    assert tree.scores is not None
    assert tree.scores[0].tolist()[1] == pytest.approx(0.25, abs=0.1)


def test_a_fault_of_the_drafter_is_raised_and_numbers_that_are_not_finite_are_passed_on() -> None:
    with pytest.raises(DraftFaultError, match="nan"):
        propose(merged(RecordingDrafter(fault=DraftFault.NOT_A_NUMBER)), [1, 2, 3, 1, 2])
    model = RecordingDrafter()
    model.is_broken = True
    assert propose(merged(model), [1, 2, 3, 1, 2], [4]).num_nodes.tolist() == [0, 0]


def test_all_requests_are_read_and_released() -> None:
    model = RecordingDrafter()
    drafter = merged(model)
    drafter.propose(make_context([Tokens(0, [1, 2, 3, 1, 2])], [Tokens(1, [1])]))
    drafter.release([0, 1])
    assert (model.drafted, model.only_read, model.released) == ([[0]], [[1]], [0, 1])
    assert (5,) in paths(propose(drafter, [9, 3, 1, 2])) or (3,) in paths(propose(drafter, [9, 1, 2]))


def test_a_drafter_without_scores_is_calibrated_by_depth() -> None:
    tree = propose(merged(RecordingDrafter(scores=None)), [4])
    assert tree.scores is not None
    assert tree.scores[0].tolist() == pytest.approx([1.0, 0.6, 0.36])


def test_without_the_option_the_drafter_is_not_wrapped() -> None:
    from pathlib import Path

    model: Drafter = RecordingDrafter()
    assert with_ngrams(model, HEAD.model_copy(update={"merged_draft_tokens": None}), Path()) is model


def predicted(text: list[int], prediction: list[int]) -> ProposeContext:
    context = make_context([Tokens(0, text, num_prompt_tokens=1)])
    context.table.states[0].predicted_token_ids = prediction
    return context


def test_a_predicted_output_is_merged_and_the_drafter_waits_while_it_holds() -> None:
    model = RecordingDrafter()
    drafter = PredictedOutputs(model)
    assert paths(drafter.propose(predicted([1], [11, 12, 13, 14, 15, 16])))[0] == (11,)
    assert paths(drafter.propose(predicted([1, 11, 12], [11, 12, 13, 14, 15, 16])))[:2] == [(13,), (13, 14)]
    assert model.drafted[-1] == []
    assert paths(drafter.propose(predicted([1, 11, 12, 40], [11, 12, 13, 14, 15, 16]))) == [(50,), (50, 50)]
    assert model.drafted[-1] == [0]


def test_requests_without_a_prediction_keep_the_drafters_own_tree() -> None:
    model = RecordingDrafter()
    tree = propose(PredictedOutputs(model), [1, 2, 1, 2])
    assert tree.scores is not None
    assert tree.scores.tolist() == [[1.0, pytest.approx(0.6), pytest.approx(0.3)]]


def test_a_replayed_slot_starts_anew() -> None:
    """A slot that is used again has none of the calibration of the request before."""
    model = RecordingDrafter()
    drafter, text = merged(model), list(REPEATED)
    for token in REPEATED * 4:
        propose(drafter, text)
        text.append(token)
    drafter.release([0])
    context = make_context([Tokens(0, [70, 71])])
    assert context.requests == [DraftRequest(0, 0, 1, context.requests[0].draft_limit)]
    assert paths(drafter.propose(context)) == [(50,), (50, 50)]
