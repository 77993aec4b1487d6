"""Prompt files and the header of a user turn."""

import json
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.models.tokenizer import load_tokenizer
from specray.train.prompts import chat_prompt, read_prompt_file, user_turn


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_rows_of_every_form_are_read(tmp_path: Path) -> None:
    rows = (
        {"turns": ["one", "later"], "license": "MIT"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two"}], "license": "MIT"},
        "",
        {"prompt": "three"},
    )
    file = read_prompt_file(write(tmp_path / "p.jsonl", *rows), max_bad_rows=0)
    assert file.texts == ["one", "two", "three"]
    assert file.licences == {"MIT": 2, "not stated": 1}
    described = file.describe()
    assert described["file"] == "p.jsonl"
    assert described["prompts"] == 3
    assert len(described["sha256"]) == 64


BAD = [
    "{",
    '"text"',
    "7",
    "[]",
    "{}",
    '{"turns": []}',
    '{"turns": [3]}',
    '{"prompt": "  "}',
    '{"messages": [{"role": "system", "content": "x"}]}',
]


@pytest.mark.parametrize("line", BAD)
def test_bad_row_is_skipped_and_reported(tmp_path: Path, line: str) -> None:
    file = read_prompt_file(write(tmp_path / "p.jsonl", {"prompt": "good"}, line), max_bad_rows=1)
    assert file.texts == ["good"]
    reason = "not JSON" if line == "{" else "no text in turns[0], a user's message or prompt"
    assert file.bad_rows == [f"line 2: {reason} (it is {line})"]


def test_too_many_bad_rows_are_refused_with_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "{", {"prompt": "good"}, "{", "{")
    with pytest.raises(ConfigError, match=r"more than 2 unusable rows \(line 1: .*line 3: .*line 4: .*--max-bad-rows"):
        read_prompt_file(path, max_bad_rows=2)


def test_empty_and_non_text_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no prompts"):
        read_prompt_file(write(tmp_path / "p.jsonl"), max_bad_rows=0)
    (tmp_path / "q.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompt_file(tmp_path / "q.jsonl", max_bad_rows=0)


def test_every_chat_prompt_begins_with_the_header(toy: Path) -> None:
    tokenizer = load_tokenizer(toy)
    header, ends = user_turn(tokenizer)
    assert tokenizer.decode(header) == "<|user|>"
    for text in ("hello", "a", "the end"):
        asked = chat_prompt(tokenizer, text)
        assert asked[: len(header)] == header
        assert tokenizer.decode(asked).startswith(f"<|user|>{text}{tokenizer.decode(ends)}")


def test_model_without_chat_template_gets_the_bare_text(stories: Path) -> None:
    tokenizer = load_tokenizer(stories)
    assert tokenizer.chat_template is None
    assert chat_prompt(tokenizer, "Once") == tokenizer.encode("Once")
    assert user_turn(tokenizer) == ([tokenizer.bos_token_id], [])


def test_line_breaks_of_other_kinds_are_part_of_a_prompt(tmp_path: Path) -> None:
    """JSON allows them in strings."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\r\n', encoding="utf-8", newline="")
    assert read_prompt_file(path, max_bad_rows=0).texts == ["a\u2028b\u0085c", "d"]
