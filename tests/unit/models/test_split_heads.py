"""A rank's part of a draft model: about one of n of its weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig, SpeculativeConfig
from specray.layers import linear
from specray.layers.parallel import RankGroup, SilentRank
from specray.models.registry import load_config, load_model
from specray.ops.quantised_weight import Weight
from specray.spec_decode import make_drafter
from specray.spec_decode.drafter import TargetView
from tests.support.methods import METHODS

CPU = torch.device("cpu")


def view(folder: Path, group: RankGroup) -> TargetView:
    """A target on a rank of `group`."""
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu")
    model = load_model(folder, config, group, CPU, progress=False)
    return TargetView(
        model,
        None,
        model.shape,
        torch.float32,
        folder,
        "auto",
        load_config(folder).architectures[0],
        [1],
        128,
        num_slots=64,
        max_rows=2,
        attention_backend="auto",
        device=CPU,
        group=group,
    )


def held(method: SpeculativeConfig, group: RankGroup, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Numbers in the matrices of a drafter on a rank, without those that it shares with the target."""
    counted: list[int] = []
    target = view(folder, group)
    for function in ("make_linear", "make_gated"):
        made = getattr(linear, function)

        def make(*arguments: Weight | None, made: Callable[..., object] = made) -> object:
            matrices = [part for part in arguments if isinstance(part, torch.Tensor) and part.dim() == 2]
            counted.extend(part.numel() for part in matrices)
            return made(*arguments)

        monkeypatch.setattr(linear, function, make)
    make_drafter(method, target)
    monkeypatch.undo()
    return sum(counted)


@pytest.mark.parametrize(
    "name", ["EAGLE3", "EAGLE", "EAGLE-map", "MTP", "MTP-stack", "MTP-deepseek", "STANDALONE-tree"]
)
def test_a_rank_of_two_holds_half_of_a_draft_model(
    name: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's only KV head is on both, and DeepSeek's latent projections are, as in a target."""
    method = METHODS[name](toy, tmp_path)
    whole, part = (held(method, group, toy, monkeypatch) for group in (RankGroup(), SilentRank(2)))
    assert 0.5 <= part / whole < (0.75 if name == "MTP-deepseek" else 0.6)


def test_a_head_whose_heads_the_ranks_cannot_share_is_whole_on_each(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS["EAGLE3"](toy, tmp_path)
    assert len({held(method, group, toy, monkeypatch) for group in (RankGroup(), SilentRank(4))}) == 1
    assert "is whole on every rank: tp_size=4 cannot share 2 query heads and 1 KV heads" in caplog.text
