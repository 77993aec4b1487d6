"""Reading tensors from every file layout, and errors for damaged and malicious files."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specray.errors import ConfigError
from specray.models.weights import WeightReader

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def write_index(folder: Path, name: str, weight_map: Any) -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def one_safetensors(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")


def oddly_named_safetensors(folder: Path) -> None:
    save_file(TENSORS, folder / "weights.safetensors")


def sharded_safetensors(folder: Path) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"model-{name}.safetensors")
    write_index(folder, "model.safetensors.index.json", {name: f"model-{name}.safetensors" for name in TENSORS})


def one_bin(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")


def sharded_bin(folder: Path) -> None:
    for name, tensor in TENSORS.items():
        torch.save({name: tensor}, folder / f"part-{name}.bin")
    write_index(folder, "pytorch_model.bin.index.json", {name: f"part-{name}.bin" for name in TENSORS})


@pytest.mark.parametrize(
    "layout", [one_safetensors, oddly_named_safetensors, sharded_safetensors, one_bin, sharded_bin]
)
def test_every_layout_gives_the_same_tensors(layout: Any, tmp_path: Path) -> None:
    layout(tmp_path)
    with WeightReader(tmp_path) as reader:
        assert set(reader.names()) == set(TENSORS)
        read = {name: reader.get(name) for name in reader.names()}
    for name, tensor in TENSORS.items():  # also after the reader is closed
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_auto_prefers_safetensors_unless_load_format_names_another(tmp_path: Path) -> None:
    one_safetensors(tmp_path)
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert set(WeightReader(tmp_path).names()) == set(TENSORS)
    assert set(WeightReader(tmp_path, "gguf").names()) == set(TENSORS)
    assert set(WeightReader(tmp_path, "bin").names()) == {"other"}


def test_error_for_a_missing_tensor_names_the_files(tmp_path: Path) -> None:
    sharded_safetensors(tmp_path)
    with pytest.raises(ConfigError, match=r"'c' in model-a\.safetensors, model-b\.safetensors"):
        WeightReader(tmp_path).get("c")


def test_tensor_missing_from_its_indexed_file_is_an_error(tmp_path: Path) -> None:
    sharded_safetensors(tmp_path)
    write_index(tmp_path, "model.safetensors.index.json", {"a": "model-b.safetensors"})
    with pytest.raises(ConfigError, match=r"'a' into .*model-b\.safetensors"):
        WeightReader(tmp_path).get("a")


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "bin"])
def test_folder_without_weights_is_refused(load_format: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights"):
        WeightReader(tmp_path, load_format)


def test_an_index_whose_files_are_not_all_there_names_the_missing(tmp_path: Path) -> None:
    files = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    save_file({"a": torch.zeros(1)}, tmp_path / files[1])
    index = {"weight_map": {str(number): file for number, file in enumerate(files)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match=f"4 files of weights, of which 3 are not .*: {files[0]}, {files[2]}, {files[3]};"
    ):
        WeightReader(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "missing.safetensors"])
def test_index_cannot_name_files_outside_the_folder(file: str, tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    save_file(TENSORS, tmp_path / "outside.safetensors")
    write_index(inside, "model.safetensors.index.json", {"a": file})
    with pytest.raises(ConfigError, match="names 1 files of weights, of which 1 are not in"):
        WeightReader(inside)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_malformed_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match="not a readable index"):
        WeightReader(tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-4], lambda b: b"\xff" * 8 + b[8:], lambda _: b"", lambda b: b[:8] + b"x" + b[9:]]
)
def test_damaged_safetensors_are_refused(damage: Any, tmp_path: Path) -> None:
    one_safetensors(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match="not a readable safetensors"):
        WeightReader(tmp_path)


class Canary:
    """Writes a file if unpickling runs its code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_a_bin_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"a": TENSORS["a"], "x": Canary(tmp_path / "fired")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        WeightReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "fired")))
    with pytest.raises(ConfigError, match="safetensors"):
        WeightReader(tmp_path)
    assert not (tmp_path / "fired").exists()


def test_a_damaged_pickle_is_refused(tmp_path: Path) -> None:
    """It reads an entry of its memo that it has not written: a KeyError in torch."""
    torch.save({"a": TENSORS["a"]}, tmp_path / "whole.bin")
    with zipfile.ZipFile(tmp_path / "whole.bin") as whole, zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as file:
        for name in whole.namelist():
            file.writestr(name, b"\x80\x02h\xd4." if name.endswith("data.pkl") else whole.read(name))
    with pytest.raises(ConfigError, match="cannot be read as plain tensors"):
        WeightReader(tmp_path)


def test_entries_that_are_not_tensors_are_ignored(tmp_path: Path) -> None:
    torch.save({"a": TENSORS["a"], "step": 3}, tmp_path / "pytorch_model.bin")
    assert set(WeightReader(tmp_path).names()) == {"a"}


def test_a_leftover_index_beside_a_whole_file_is_ignored(tmp_path: Path) -> None:
    one_safetensors(tmp_path)
    for weight_map in ({"a": "model-00001-of-00002.safetensors"}, None):
        write_index(tmp_path, "model.safetensors.index.json", weight_map)
        assert set(WeightReader(tmp_path).names()) == set(TENSORS)
    save_file({"c": TENSORS["b"]}, tmp_path / "more.safetensors")
    files = dict.fromkeys(TENSORS, "model.safetensors") | {"c": "more.safetensors"}
    write_index(tmp_path, "model.safetensors.index.json", files)
    assert set(WeightReader(tmp_path).names()) == {*TENSORS, "c"}


@pytest.mark.parametrize("load_format", ["safetensors", "bin"])
def test_shards_without_an_index_are_read_if_all_are_there(load_format: str, tmp_path: Path) -> None:
    def save(number: int, tensors: dict[str, torch.Tensor]) -> Path:
        stem = "model" if load_format == "safetensors" else "pytorch_model"
        path = tmp_path / f"{stem}-{number:05}-of-00002.{load_format}"
        save_file(tensors, path) if load_format == "safetensors" else torch.save(tensors, path)
        return path

    save(1, {"a": TENSORS["a"]})
    second = save(2, {"b": TENSORS["b"]})
    with WeightReader(tmp_path, load_format) as reader:
        assert {name: reader.get(name).tolist() for name in reader.names()} == {
            n: t.tolist() for n, t in TENSORS.items()
        }
    save(2, TENSORS)
    with pytest.raises(ConfigError, match=r"the tensor a is in .*00001.*and in .*00002"):
        WeightReader(tmp_path, load_format)
    second.unlink()
    with pytest.raises(ConfigError, match=r"\(1 of 00002\), which are not one whole model; fetch"):
        WeightReader(tmp_path, load_format)


def test_several_files_without_numbers_or_index_are_refused(tmp_path: Path) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"2 files of weights .a.safetensors, b.safetensors. and no index"):
        WeightReader(tmp_path)
