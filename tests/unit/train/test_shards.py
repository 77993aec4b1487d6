import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.errors import ConfigError
from specray.train.batches import AnswerFolder, BatchStream, Progress
from specray.train.shards import Shard, TokenSequence, list_shards, read_description, write_shard, written_indexes
from tests.support.training_data import HIDDEN, a_sequence, write_answers

COLUMNS = 4 * HIDDEN


def sequences(count: int, seed: int = 0) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(seed)
    return [a_sequence(generator, index) for index in range(count)]


def test_shard_round_trip(tmp_path: Path) -> None:
    written = sequences(5)
    shard = Shard(write_shard(tmp_path, written), COLUMNS)
    assert len(shard) == 5
    assert shard.num_tokens == sum(len(row.token_ids) for row in written)
    for index, row in enumerate(written):
        answer = shard[index]
        assert answer.token_ids.tolist() == list(row.token_ids)
        assert answer.prompt_length == row.prompt_length
        assert torch.equal(answer.aux_hidden_states, row.aux_hidden_states)


def test_each_process_writes_its_own_shards_and_all_indexes_are_found(tmp_path: Path) -> None:
    rows = sequences(6)
    for part in (0, 1, 1):
        write_shard(tmp_path, [rows.pop(), rows.pop()], part)
    assert list_shards(tmp_path) == [f"shard-{name}.safetensors" for name in ("00-00000", "01-00000", "01-00001")]
    assert written_indexes(tmp_path) == set(range(6))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_error_for_a_damaged_shard_names_it(tmp_path: Path) -> None:
    path = write_shard(tmp_path, sequences(2))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=f"{path.name} is not a readable shard"):
        Shard(path, COLUMNS)


def test_aux_hidden_states_of_another_width_are_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, sequences(2))
    with pytest.raises(ConfigError, match=r"aux_hidden_states has shape \(\d+, 128\), .* imply \(\d+, 96\)"):
        Shard(path, 3 * HIDDEN)


def test_inconsistent_lengths_are_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, sequences(2))
    tensors = load_file(path)
    save_file({**tensors, "lengths": tensors["lengths"] + 1}, path)
    with pytest.raises(ConfigError, match="token_ids has shape"):
        Shard(path, COLUMNS)


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read"), ("{", "cannot be read"), ("{}", "model is")])
def test_missing_or_malformed_description_is_refused(content: str | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "answers.json").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        read_description(tmp_path)


def test_held_out_sequences_depend_only_on_the_prompt(tmp_path: Path) -> None:
    """Prompts of files have several answers each, of which none may be trained on if another one is held out."""

    def answer(prompt: int, sample: int) -> TokenSequence:
        token_ids = [*range(prompt, prompt + 20), *range(sample, sample + 60)]
        return TokenSequence(token_ids, 20, torch.zeros(80, COLUMNS), 10 * prompt + sample)

    rows = [answer(prompt, sample) for prompt in range(200) for sample in range(10)]
    shard = Shard(write_shard(tmp_path, rows), COLUMNS, num_asked=2000)
    held_out = [[shard.is_held_out(10 * prompt + sample) for sample in range(10)] for prompt in range(200)]
    assert all(len(set(samples)) == 1 for samples in held_out)
    assert 0 < sum(samples[0] for samples in held_out) < 20


def test_prompts_that_the_target_wrote_are_told_apart_by_what_follows_their_header(tmp_path: Path) -> None:
    rows = [TokenSequence([1, 2, *range(i, i + 60)], 2, torch.zeros(62, COLUMNS), i) for i in range(300)]
    shard = Shard(write_shard(tmp_path, rows), COLUMNS, num_asked=0)
    assert 0 < sum(map(shard.is_held_out, range(300))) < 30


def test_about_two_percent_are_held_out_of_batches(tmp_path: Path) -> None:
    folder = AnswerFolder(write_answers(tmp_path, sequences=1000))
    (name,) = folder.names()
    held_out = {index for index in range(1000) if folder[name].is_held_out(index)}
    assert 5 <= len(held_out) <= 45
    stream = BatchStream(folder, Progress(), 0, 512, 100)
    seen: list[int] = []
    while True:
        batch = next(stream)
        if stream.progress.round == 2:
            break
        seen += [len(answer.token_ids) for answer in batch]
    trained = [folder[name].lengths[index] for index in range(1000) if index not in held_out]
    assert sorted(seen) == sorted(trained)


def test_new_shards_come_before_old_ones_repeat(tmp_path: Path) -> None:
    path = write_answers(tmp_path, shards=2)
    stream = BatchStream(AnswerFolder(path), Progress(), 0, 256, 100)
    while stream.progress.round < 1 or stream.progress.batch < 3:
        next(stream)
    write_answers(tmp_path, shards=1, seed=1)
    while stream.progress.round < 2:
        next(stream)
    assert stream.progress.names == ["shard-00-00002.safetensors"]
    while stream.progress.round < 3:
        next(stream)
    assert len(stream.progress.names) == 3


def test_batch_size_is_limited_and_order_depends_on_the_seed(tmp_path: Path) -> None:
    folder = AnswerFolder(write_answers(tmp_path))
    streams = [BatchStream(folder, Progress(), seed, 256, 100) for seed in (0, 0, 1)]
    batches = [[next(stream) for _ in range(6)] for stream in streams]
    first, again, other = ([[answer.token_ids.tolist() for answer in batch] for batch in part] for part in batches)
    assert first == again
    assert first != other
    assert all(len(batch) * max(map(len, batch)) <= 256 for batch in first)


def test_error_for_a_folder_without_shards_says_what_to_do(tmp_path: Path) -> None:
    description = {"model": "x", "aux_hidden_state_layers": [0, 1], "hidden_size": 4, "num_layers": 1}
    (tmp_path / "answers.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match="it has no shards yet; make answers with --prompts"):
        AnswerFolder(tmp_path).names()


def test_sequences_without_a_usable_answer_are_an_error_and_not_an_endless_search(tmp_path: Path) -> None:
    """Their prompts are longer than the training length."""
    path = write_answers(tmp_path, shards=9, sequences=3)
    with pytest.raises(ConfigError, match=r"within the first 5 tokens.*--max-length"):
        next(BatchStream(AnswerFolder(path), Progress(), 0, 256, max_length=5))


def test_a_new_shard_without_a_usable_answer_does_not_end_a_run(tmp_path: Path) -> None:
    path = write_answers(tmp_path)
    stream = BatchStream(AnswerFolder(path), Progress(), 0, 256, max_length=100)
    for _ in range(20):
        next(stream)
    write_shard(path, [TokenSequence([5, 6], 1, torch.zeros(2, 4 * HIDDEN), 99)])
    for _ in range(20):
        next(stream)
