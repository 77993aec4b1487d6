"""Generating answers: every request once, with the same output after interruptions and with several processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specray.errors import ConfigError
from specray.train.answer_options import AnswerOptions
from specray.train.answers import aux_hidden_state_layers, make_answers, only_one_at
from specray.train.batches import AnswerFolder
from specray.train.hidden_states import HiddenStateComputer
from specray.train.shards import Shard, list_shards, written_indexes
from tests.support.processes import has_ended, wait_until
from tests.support.processes import read as read_text

ROOT = Path(__file__).parents[3]
Found = dict[int, tuple[list[int], int, torch.Tensor]]


@pytest.fixture(scope="module")
def options(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> AnswerOptions:
    prompts = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("Once upon a time", "Lily", "The dog")))
    return AnswerOptions(Path(), str(stories), (prompts,), 2, 3, 12, 4, 1, 0, "float32", 0, stores_hidden_states=True)


def read(folder: Path) -> Found:
    found: Found = {}
    for name in list_shards(folder):
        shard = Shard(folder / name, 4 * 64)
        for i, index in enumerate(load_file(folder / name)["indexes"].tolist()):
            answer = shard[i]
            assert answer.aux_hidden_states is not None
            found[index] = (answer.token_ids.tolist(), answer.prompt_length, answer.aux_hidden_states.float())
    return found


def assert_same(seen: Found, expected: Found) -> None:
    assert seen.keys() == expected.keys()
    for index, (token_ids, prompt_length, aux_hidden_states) in expected.items():
        assert seen[index][:2] == (token_ids, prompt_length)
        assert torch.allclose(seen[index][2], aux_hidden_states, atol=0.05, rtol=0.02)  # bfloat16 on disk


@pytest.fixture(scope="module")
def complete(options: AnswerOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_answers(replace(options, folder=tmp_path_factory.mktemp("answers")), progress=False)


def test_every_prompt_is_answered_once_per_sample(complete: Path) -> None:
    found = read(complete)
    assert found.keys() == set(range(9))
    assert written_indexes(complete) == found.keys()
    for token_ids, prompt_length, aux_hidden_states in found.values():
        assert prompt_length < len(token_ids)
        assert aux_hidden_states.shape == (len(token_ids), 4 * 64)
        assert not aux_hidden_states[-1].any()
        assert aux_hidden_states[:-1].abs().sum(-1).all()


def test_resumed_run_gives_the_same_answers(options: AnswerOptions, complete: Path, tmp_path: Path) -> None:
    folder = make_answers(replace(options, folder=tmp_path, self_prompts=0), progress=False)
    assert written_indexes(folder) == set(range(6))
    make_answers(replace(options, folder=tmp_path), progress=False)
    assert_same(read(folder), read(complete))
    shards = list_shards(folder)
    make_answers(replace(options, folder=tmp_path), progress=False)
    assert list_shards(folder)[: len(shards)] == shards


def test_hidden_states_computed_later_are_those_that_would_be_stored(
    options: AnswerOptions, complete: Path, tmp_path: Path
) -> None:
    folder = AnswerFolder(make_answers(replace(options, folder=tmp_path, stores_hidden_states=False), progress=False))
    assert not folder.stores_hidden_states
    compute = HiddenStateComputer(str(options.model), "float32", folder.aux_hidden_state_layers, max_length=64)
    expected = read(complete)
    indexes = [index for name in folder.names() for index in load_file(tmp_path / name)["indexes"].tolist()]
    answers = [folder[name][i] for name in folder.names() for i in range(len(folder[name]))]
    computed = compute(answers)
    assert sorted(indexes) == sorted(expected)
    for index, answer, states in zip(indexes, answers, computed, strict=True):
        token_ids, prompt_length, stored = expected[index]
        assert (answer.token_ids.tolist(), answer.prompt_length) == (token_ids, prompt_length)
        assert torch.allclose(states.float(), stored, atol=0.05, rtol=0.02)  # bfloat16 on disk
        assert not states[-1].any()
    again = compute(answers[::-1])
    assert all(torch.equal(one, other) for one, other in zip(again[::-1], computed, strict=True))


@pytest.mark.slow
def test_two_processes_give_the_same_answers(options: AnswerOptions, complete: Path, tmp_path: Path) -> None:
    folder = make_answers(replace(options, folder=tmp_path, generators=2), progress=False)
    assert len(list_shards(folder)) == 2
    assert_same(read(folder), read(complete))


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_behind(options: AnswerOptions, tmp_path: Path) -> None:
    """Child processes once kept generating for half an hour after their run was killed."""
    run = subprocess.Popen(long_run(options, tmp_path), cwd=ROOT)
    generators: list[int] = []
    try:
        wait_until(lambda: len(generators_of(run.pid)) == 2, seconds=300)
        generators = generators_of(run.pid)
        run.kill()
        wait_until(lambda: all(map(has_ended, generators)))
    finally:
        run.kill()
        for pid in generators:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_sigterm_to_a_run_of_several_processes_writes_what_is_finished(options: AnswerOptions, tmp_path: Path) -> None:
    """As `kill` and `docker stop` send it, to the first process alone."""
    run = subprocess.Popen(long_run(options, tmp_path), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(generators_of(run.pid)) == 2, seconds=300)
        assert run.stderr is not None
        for line in run.stderr:  # progress bars end with carriage returns, which are line ends in text mode
            if "request" in line and " 0/" not in line:
                break
        run.terminate()
        assert run.wait(60) == 130
    finally:
        run.kill()
    assert written_indexes(tmp_path)


@pytest.mark.slow
def test_ctrl_c_while_generators_start_ends_quietly(options: AnswerOptions, tmp_path: Path) -> None:
    """A terminal sends it to all processes; children that were importing once printed tracebacks."""
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of shells ignore it
    command = long_run(options, tmp_path)
    run = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed
    )
    try:
        wait_until(lambda: len(generators_of(run.pid)) == 2, seconds=300)
        time.sleep(0.3)
        os.killpg(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 130
    assert errors.endswith("interrupted\n")
    assert "Traceback" not in errors


def long_run(options: AnswerOptions, folder: Path) -> list[str]:
    """A command that generates short answers in two processes for a minute at least."""
    command = [sys.executable, "-m", "specray.cli.main", "train", "token-map", "--size", "64"]
    command += ["--out", str(folder / "map"), "--model", options.model, "--prompts", str(options.prompts[0])]
    return [*command, "--samples", "20000", "--answer-tokens", "12", "--answers", str(folder), "--generators", "2"]


def generators_of(pid: int) -> list[int]:
    """Child processes that generate answers."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if "spawn_main" in read_text(Path(f"/proc/{child}/cmdline"))]


def test_changed_options_for_the_same_folder_are_refused(options: AnswerOptions, complete: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens=12, and now max_tokens=13 is asked for"):
        make_answers(replace(options, folder=complete, max_tokens=13), progress=False)


def test_fewer_self_prompts_than_before_are_refused(options: AnswerOptions, complete: Path) -> None:
    with pytest.raises(ConfigError, match="--self-prompts 3, which can only be raised; 2 is less"):
        make_answers(replace(options, folder=complete, self_prompts=2), progress=False)


def test_answers_that_leave_no_room_for_a_prompt_are_refused_before_the_folder_has_options(
    options: AnswerOptions, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--answer-tokens 500 leaves 12 of the model's 512 tokens.*at most 448"):
        make_answers(replace(options, folder=tmp_path, max_tokens=500), progress=False)
    assert not (tmp_path / "answers.json").exists()


def test_no_prompts_are_refused(options: AnswerOptions, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no prompts"):
        make_answers(replace(options, folder=tmp_path, prompts=(), self_prompts=0), progress=False)


def test_shallow_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 layers"):
        aux_hidden_state_layers(2)
    assert aux_hidden_state_layers(30) == [2, 15, 27, 30]


class SoonInterrupted:
    """Interrupts after 40 steps."""

    def __init__(self) -> None:
        self._left = 40

    def __enter__(self) -> "SoonInterrupted":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to restore."""

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_what_is_finished_when_a_run_is_interrupted_is_written(
    options: AnswerOptions, complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("specray.train.answers.Interrupts", SoonInterrupted)
        with pytest.raises(KeyboardInterrupt):
            make_answers(replace(options, folder=tmp_path, concurrency=1, self_prompts=0), progress=False)
    assert 0 < len(written_indexes(tmp_path)) < len(written_indexes(complete))
    make_answers(replace(options, folder=tmp_path), progress=False)
    assert_same(read(tmp_path), read(complete))


def test_a_finished_folder_is_not_worked_on_again(
    options: AnswerOptions, complete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specray.train.answers._Generator", lambda *_: pytest.fail("an engine is loaded"))
    assert make_answers(replace(options, folder=complete), progress=False) == complete


def test_commands_that_generate_into_one_folder_take_turns(
    options: AnswerOptions, complete: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def is_waiting() -> bool:
        shown.append(capfd.readouterr().out)
        return "waiting for another command" in "".join(shown)

    thread = threading.Thread(target=make_answers, args=(replace(options, folder=complete), False))
    with only_one_at(complete):
        thread.start()
        wait_until(is_waiting)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()


def test_more_answers_than_an_engine_queues_have_their_hidden_states_computed(
    options: AnswerOptions, complete: Path
) -> None:
    folder = AnswerFolder(complete)
    compute = HiddenStateComputer(str(options.model), "float32", folder.aux_hidden_state_layers, max_length=64)
    answer = folder[folder.names()[0]][0]
    states = compute([answer] * 320)
    assert len(states) == 320
    assert all(each.shape == states[0].shape for each in states)


def test_prompts_without_an_answer_are_counted_with_the_reason_and_not_tried_again(
    options: AnswerOptions,
    stories: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "chat"
    shutil.copytree(stories, model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}User: {{ m.content }}\n{% endfor %}")
    asked = replace(options, folder=tmp_path / "answers", model=str(model), prompts=(), self_prompts=4)
    monkeypatch.setattr("specray.train.answers._LONGEST_TURN", 5)
    make_answers(asked, progress=False)
    expected = "4 prompts were skipped (4: the target did not end its turn within 5 tokens)"
    assert f"{asked.folder}: {expected}" in capsys.readouterr().out
    monkeypatch.setattr("specray.train.answers._Generator", lambda *_: pytest.fail("an engine is loaded"))
    make_answers(asked, progress=False)
    assert expected in capsys.readouterr().out
    with pytest.raises(ConfigError, match=re.escape(f"has no answers: {expected}")):
        AnswerFolder(asked.folder).names()


def test_files_of_answers_follow_the_umask(complete: Path) -> None:
    os.umask(umask := os.umask(0))
    assert {path.stat().st_mode & 0o777 for path in complete.iterdir()} == {0o666 & ~umask}


def test_a_refused_command_leaves_no_new_folder_behind(options: AnswerOptions, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    for wrong in (replace(options, prompts=(tmp_path / "typo.jsonl",)), replace(options, prompts=(bad,))):
        with pytest.raises((ConfigError, OSError)):
            make_answers(replace(wrong, folder=tmp_path / "new"), progress=False)
        assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    with pytest.raises(ConfigError):
        make_answers(replace(options, prompts=(bad,), folder=tmp_path / "new"), progress=False)
    assert (tmp_path / "new").is_dir(), "it was there before"
