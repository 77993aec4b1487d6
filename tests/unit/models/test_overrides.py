"""A model's folder with keys of config.json or the chat template replaced."""

import json
from pathlib import Path
from typing import Any

import pytest

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.llm import LLM
from specray.models.files import target_folder
from specray.models.overrides import overridden_folder
from specray.models.tokenizer import chat_template, load_tokenizer
from specray.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECRAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_without_overrides_is_its_own_folder(stories: Path) -> None:
    assert overridden_folder(stories, {}, None) == stories


def test_keys_of_the_configuration_are_replaced(stories: Path) -> None:
    before = (stories / "config.json").read_bytes()
    folder = overridden_folder(stories, {"rope_theta": 500.0}, None)
    assert json.loads((folder / "config.json").read_text()) == json.loads(before) | {"rope_theta": 500.0}
    assert (stories / "config.json").read_bytes() == before
    assert (folder / "tokenizer.json").resolve() == (stories / "tokenizer.json").resolve()
    assert overridden_folder(stories, {"rope_theta": 500.0}, None) == folder
    assert overridden_folder(stories, {"rope_theta": 501.0}, None) != folder


@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        ({"rope_theta": 7.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5.0},
        ),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 5.0}),
        ({"rope_parameters": {"rope_theta": 9.0}}, {"rope_theta": 9.0}),
        ({"eos_token_id": 1}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}),
    ],
)
def test_keys_of_older_checkpoints_replace_those_of_newer_ones(
    overrides: dict[str, Any], rope: dict[str, Any], tmp_path: Path
) -> None:
    old = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(old))
    folder = overridden_folder(tmp_path / "model", overrides, None)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == rope


def test_a_key_that_the_model_does_not_have_is_an_error(stories: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"hf_overrides.rop_theta is no key of a llama model; did you mean rope_theta\?"
    ):
        overridden_folder(stories, {"rop_theta": 2.0}, None)


def test_the_model_computes_with_the_replaced_keys(stories: Path) -> None:
    texts = []
    for overrides in ({}, {"rope_theta": 2.0}):
        with LLM(model=str(stories), device="cpu", max_total_tokens=512, hf_overrides=overrides) as llm:
            params = SamplingParams(max_tokens=24, temperature=0.0)
            texts.append(llm.generate(["Once upon a time"], params)[0].choices[0].text)
    assert texts[0] != texts[1]


def test_a_chat_template_is_read_from_a_file(stories: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    config = EngineConfig(model=str(stories), chat_template=str(template))
    assert chat_template(load_tokenizer(target_folder(config, progress=False))) == template.read_text()


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read: No such file"), (b"", "has 0 characters"), (b"\xff", "not UTF-8")]
)
def test_an_unusable_template_is_an_error(content: bytes | None, message: str, stories: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        overridden_folder(stories, {}, str(template))
