"""`specray bench` and `specray tune` from the command line to their files, on the toy model and random heads."""

import json
from pathlib import Path

import pytest
import yaml

from specray.cli import main as cli
from specray.config import EngineConfig
from tests.support.heads import write_random_head


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "turns": ["ab " * (i + 1)]}) + "\n" for i in range(4)))
    return path


def common(toy: Path, prompts: Path) -> list[str]:
    return ["--model", str(toy), "--dtype", "float32", "--prompts", str(prompts), "--max-tokens", "8"]


def test_variants_with_heads_and_a_map_answer_like_plain(
    toy: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third, second = (write_random_head(tmp_path / f"Head{version}", toy, version) for version in (3, 2))
    token_map = tmp_path / "Map.json"
    token_map.write_text(json.dumps(list(range(2, 40))))
    variants = ["plain", f"eagle3@{third}:3-2-6", f"eagle2@{second}:3-1-4", f"eagle2@{second}+{token_map}:3-1-4"]
    out = tmp_path / "bench.json"
    arguments = ["bench", "--arms", ",".join(variants), "--temperature", "1", "--json", str(out), *common(toy, prompts)]
    assert cli.main(arguments) == 0
    measured = json.loads(out.read_text())["arms"]
    assert set(measured) == set(variants)
    assert all(figures["identical_to_plain"] == 1.0 for figures in measured.values())
    assert all(sum(measured[variant]["accept_histogram"]) > 0 for variant in variants[1:])
    assert "accepted at depth, given the depth above" in capsys.readouterr().out


def test_a_model_without_a_chat_template_continues_the_prompts(stories: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["bench", "--arms", "plain,ngram", "--turns", "2", "--json", str(out), *common(stories, prompts)]
    assert cli.main(arguments) == 0
    assert json.loads(out.read_text())["arms"]["ngram"]["identical_to_plain"] == 1.0


def test_tune_writes_a_block_that_a_configuration_takes(
    toy: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = write_random_head(tmp_path / "head", toy, 3)
    config = tmp_path / "config.yaml"
    speculative = {"algorithm": "EAGLE3", "draft_model_path": str(head), "draft_dtype": "float32"}
    speculative |= {"max_step_draft_tokens": 5}
    config.write_text(yaml.safe_dump({"speculative": speculative}))
    arguments = [
        "tune",
        "--config",
        str(config),
        "--candidates",
        "2-1-3,3-2-6",
        "--batch-sizes",
        "1,2",
        "--rounds",
        "2",
        "--limit",
        "2",
        "--out",
        str(tmp_path / "tune"),
        *common(toy, prompts),
    ]
    assert cli.main(arguments) == 0
    block = (tmp_path / "tune" / "speculative.yaml").read_text()
    tuned = EngineConfig.model_validate(yaml.safe_load(block)).speculative
    assert {**speculative, **tuned.model_dump(exclude_defaults=True)} == tuned.model_dump(exclude_defaults=True)
    assert (tuned.num_steps, tuned.eagle_topk, tuned.num_draft_tokens) in ((2, 1, 3), (3, 2, 6))
    # In float32 one seed gives one text on a CPU, where a server chooses the number of drafts.
    assert tuned.budget == "auto"
    candidates = json.loads((tmp_path / "tune" / "tune.json").read_text())["candidates"]
    assert [candidate["num_rounds"] for candidate in candidates] in ([2, 1], [2, 2])
    assert block in capsys.readouterr().out
