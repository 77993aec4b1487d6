"""The benchmark of quality: its copy with channels in another order computes the same function."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from benchmarks.quality import REFERENCE, main, predictions, reordered
from specray.models.registry import load_config
from tests.support.stories import write_stories

TEXT = "Once upon a time there was a little dog who liked to play in the park with a red ball."


def test_a_model_with_channels_in_another_order_computes_the_same_function(stories: Path, tmp_path: Path) -> None:
    copy = write_stories(tmp_path)
    config, weights = load_config(copy), load_file(stories / "model.safetensors")
    other = reordered(weights, config)
    assert all(not torch.equal(other[name], weights[name]) for name in weights)
    save_file(other, copy / "model.safetensors", {"format": "pt"})
    expected, found = (predictions(REFERENCE, folder, TEXT, tqdm(disable=True)) for folder in (stories, copy))
    assert torch.equal(found.best, expected.best)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=1e-4)


def test_the_table_has_a_row_for_each_type(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT, encoding="utf-8")
    assert main(["--model", str(stories), "--text", str(text)]) == 0
    shown = capsys.readouterr().out
    assert all(f"| {name}" in shown for name in ("float32", "bfloat16", "auto", "int8", "int4"))
    assert "100.0%" in shown
