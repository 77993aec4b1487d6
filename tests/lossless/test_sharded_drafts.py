"""Every rank drafts with its part of the draft model: the text is that of one rank, and so are the trees."""

from pathlib import Path

import pytest

from specray.config import SpeculativeConfig
from specray.sampling_params import make_sampling_params
from tests.support.engine import generate
from tests.support.methods import METHODS
from tests.support.two_ranks import run_methods

PROMPTS = [[0, 9, 8, 7, 6, 5, 9, 8], [5], [0, *range(10, 40)], [0, 20, 21, 22, 20, 21]]
PARAMS = [
    {"seed": 1, "temperature": 0.0, "max_tokens": 24},
    {"seed": 2, "temperature": 1.0, "max_tokens": 24},
    {"seed": 3, "temperature": 0.7, "top_p": 0.9, "max_tokens": 24},
    {"seed": 4, "temperature": 0.0, "max_tokens": 24},
]
ON_TWO = ["EAGLE3", "EAGLE-chain", "EAGLE-map", "PARALLEL", "STANDALONE-tree", "MTP-stack", "MTP-mimo-v2", "SEVERAL"]
ON_FOUR = ["EAGLE3", "NEXTN", "STANDALONE-tree"]


@pytest.mark.parametrize(("size", "names"), [(2, ON_TWO), (4, ON_FOUR)], ids=["two", "four"])
def test_ranks_that_share_a_draft_model_generate_the_plain_text(
    size: int, names: list[str], toy: Path, tmp_path: Path
) -> None:
    """Nothing is broadcast, so trees that differed would end the run. Four ranks have two KV heads."""
    plain = generate(toy, PROMPTS, [make_sampling_params(**params) for params in PARAMS])
    methods = [METHODS[name](toy, _empty(tmp_path / name)) for name in names]
    alone, together = (run_methods(toy, each, methods, PROMPTS, PARAMS, page_size=4) for each in (1, size))
    for name, one, several in zip(names, alone, together, strict=True):
        assert [choice["token_ids"] for choice in several.choices] == [each.token_ids for each in plain], name
        assert 1.0 <= several.accept_length == pytest.approx(one.accept_length, rel=0.05), name
    assert max(each.accept_length for each in together) > 1.1


def test_rejection_verification_gathers_the_drafts_distributions(toy: Path, tmp_path: Path) -> None:
    """Two ranks draw what one does, from the same distributions."""
    method = METHODS["EAGLE-chain"](toy, tmp_path).model_copy(update={"verification": "rejection"})
    [alone], [together] = (run_methods(toy, size, [method], PROMPTS, PARAMS) for size in (1, 2))
    assert together.choices == alone.choices


def test_trees_of_a_drafter_that_another_project_wrote_are_rank_zeros(toy: Path) -> None:
    plain = generate(toy, PROMPTS, [make_sampling_params(**params) for params in PARAMS])
    method = SpeculativeConfig(algorithm="tests.support.drafters:UnequalDrafter")
    [together] = run_methods(toy, 2, [method], PROMPTS, PARAMS)
    assert [choice["token_ids"] for choice in together.choices] == [each.token_ids for each in plain]


def test_trees_of_unlike_processors_are_rank_zeros(toy: Path, tmp_path: Path) -> None:
    plain = generate(toy, PROMPTS, [make_sampling_params(**params) for params in PARAMS])
    method = METHODS["EAGLE3"](toy, tmp_path)
    [together] = run_methods(toy, 2, [method], PROMPTS, PARAMS, is_unlike=True)
    assert [choice["token_ids"] for choice in together.choices] == [each.token_ids for each in plain]
    assert together.accept_length > 1.0


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder
