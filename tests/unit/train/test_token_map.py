import json
from pathlib import Path

import pytest
import torch

from specray.cli.main import main
from specray.errors import ConfigError
from specray.train.batches import AnswerFolder
from specray.train.shards import TokenSequence, write_shard
from specray.train.token_map import frequent_ids
from tests.support.toy import EOS, VOCAB_SIZE
from tests.support.training_data import HIDDEN, write_answers


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """One sequence: 9 is in the prompt only; then 7 three times, 5 twice, 6 once."""
    folder = write_answers(tmp_path, shards=0)
    written = [7, 5, 7, 6, 5, 7]
    write_shard(folder, [TokenSequence([9, 9, 9, 9, *written], 4, torch.zeros(10, 4 * HIDDEN), 0)])
    return folder


def test_ids_are_ordered_by_frequency_in_answers(answers: Path) -> None:
    assert frequent_ids(AnswerFolder(answers), 3, VOCAB_SIZE, []).tolist() == [7, 5, 6]


def test_forced_ids_replace_the_rarest(answers: Path) -> None:
    assert frequent_ids(AnswerFolder(answers), 3, VOCAB_SIZE, [EOS, 7]).tolist() == [7, 5, EOS]
    assert frequent_ids(AnswerFolder(answers), 3, VOCAB_SIZE, [6, EOS]).tolist() == [7, 6, EOS]


def test_more_ids_than_the_vocabulary_are_refused(answers: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit the target's 64"):
        frequent_ids(AnswerFolder(answers), VOCAB_SIZE + 1, VOCAB_SIZE, [])


@pytest.mark.parametrize("name", ["map.json", "map.pt"])
def test_token_map_command_includes_eos(name: str, answers: Path, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / name
    assert main(["train", "token-map", "--answers", str(answers), "--out", str(path), "--size", "4"]) == 0
    ids = json.loads(path.read_text()) if name.endswith("json") else torch.load(path, weights_only=True)
    assert ids[:3] == [7, 5, 6]
    assert ids[3] == EOS
