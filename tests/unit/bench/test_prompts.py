from pathlib import Path

import pytest

from specray.bench.prompts import by_category, load_prompts
from specray.errors import ConfigError

SHARED = Path(__file__).parents[4] / "shared" / "data"


def test_built_in_prompts_are_chat_copy_and_code_with_two_turns() -> None:
    prompts = load_prompts()
    assert set(by_category(prompts)) == {"chat", "copy", "code"}
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(len(prompt.turns) == 2 for prompt in prompts)


def test_a_limit_takes_from_each_category_in_turn() -> None:
    assert [prompt.category for prompt in load_prompts(limit=5)] == ["chat", "copy", "code", "chat", "copy"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the evaluation sets are not beside this checkout")
@pytest.mark.parametrize("name", ["eval_mt_bench.jsonl", "eval_spec_bench_subset.jsonl", "train_prompts.jsonl"])
def test_evaluation_sets_load(name: str) -> None:
    assert load_prompts(SHARED / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"id": 1, "turns": []}', "line 2: turns"),
        ('{"id": 1, "turns": [""]}', "line 2: turns.0"),
        ('{"id": 1}', "line 2: turns"),
        ('{"id": 1, "prompt": 7}', "line 2: turns.0"),
        ('{"id": 1, "messages": [{"role": "system", "content": "x"}]}', "line 2: turns"),
        ("[]", "line 2: the line"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"id": 0, "turns": ["fine"]}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        load_prompts(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        load_prompts(path)
