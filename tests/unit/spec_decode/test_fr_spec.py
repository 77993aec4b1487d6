"""Token maps in .pt and .json files, and errors for invalid files."""

import json
from pathlib import Path

import pytest
import torch

from specray.spec_decode.fr_spec import load_token_map

VOCAB_SIZE = 64


def write(folder: Path, content: object, name: str) -> Path:
    path = folder / name
    if path.suffix == ".pt":
        torch.save(content, path)
    else:
        path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["map.pt", "map.json"])
@pytest.mark.parametrize(
    ("ids", "eos", "expected"),
    [
        ([9, 2, 63], [2], [9, 2, 63]),
        ([9, 2, 63], [1], [9, 2, 63, 1]),
        ([9, 2, 63], [0, 2, 7], [9, 2, 63, 0, 7]),
        ([9], [], [9]),
    ],
)
def test_order_is_kept_and_end_tokens_are_added(
    name: str, ids: list[int], eos: list[int], expected: list[int], tmp_path: Path
) -> None:
    loaded = load_token_map(write(tmp_path, ids, name), VOCAB_SIZE, eos)
    assert (loaded.tolist(), loaded.dtype) == (expected, torch.int64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_map_may_be_a_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    path = write(tmp_path, torch.tensor([5, 3], dtype=dtype), "map.pt")
    assert load_token_map(path, VOCAB_SIZE, [1]).tolist() == [5, 3, 1]


def test_repeated_ids_are_removed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, [5, 3, 5, 5], "map.json")
    assert load_token_map(path, VOCAB_SIZE, [3]).tolist() == [5, 3]
    assert "repeats 2 ids" in caplog.text


@pytest.mark.parametrize("name", ["map.pt", "map.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([3, 64], r"1 entries such as 64; .*from 0 to 63"),
        ([3, -1], r"1 entries such as -1"),
        ([3, "4", None], r"2 entries such as '4'"),
        ([True], r"such as True"),
        ([1.0], r"such as 1.0"),
        ([], r"is empty"),
        ({"ids": [1]}, r"holds a dict instead of a list"),
    ],
)
def test_invalid_content_is_refused(name: str, content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"map\.\w+' (holds )?.*{message}"):
        load_token_map(write(tmp_path, content, name), VOCAB_SIZE, [1])


def test_a_matrix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds a Tensor instead of a list"):
        load_token_map(write(tmp_path, torch.zeros(2, 2), "map.pt"), VOCAB_SIZE, [1])


@pytest.mark.parametrize("name", ["map.pt", "map.json"])
def test_unreadable_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        load_token_map(tmp_path / name, VOCAB_SIZE, [1])
    (tmp_path / name).write_bytes(b"\x80\x02not a list")
    with pytest.raises(ValueError, match=name):
        load_token_map(tmp_path / name, VOCAB_SIZE, [1])


def test_pickled_code_in_a_map_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "was run"

    class Malicious:
        def __reduce__(self) -> tuple[object, ...]:
            return marker.touch, ()

    torch.save(Malicious(), tmp_path / "map.pt")
    with pytest.raises(ValueError, match="cannot be read as plain tensors"):
        load_token_map(tmp_path / "map.pt", VOCAB_SIZE, [1])
    assert not marker.exists()
