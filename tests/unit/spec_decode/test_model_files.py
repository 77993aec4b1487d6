"""Files that do not belong together are refused before any weight is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specray.config import EngineConfig
from specray.errors import ConfigError
from specray.spec_decode.model_files import check_model_files
from tests.support.decoders import write_decoder
from tests.support.heads import write_random_head
from tests.support.methods import METHODS
from tests.support.toy import write_toy


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("target"))


def with_speculation(target: Path, algorithm: str, path: Path | None) -> EngineConfig:
    options = {"algorithm": algorithm, "draft_model_path": None if path is None else str(path)}
    return EngineConfig.model_validate({"model": str(target), "speculative": options})


def change(folder: Path, **options: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_passes_with_its_own_files(method: str, target: Path, tmp_path: Path) -> None:
    check_model_files(EngineConfig(model=str(target), speculative=METHODS[method](target, tmp_path)))


def eagle2(folder: Path, target: Path) -> None:
    write_random_head(folder, target, 2)


def eagle3(folder: Path, target: Path) -> None:
    write_random_head(folder, target, 3)


def parallel(folder: Path, target: Path) -> None:
    write_random_head(folder, target, 3, is_parallel=True)


def wide(folder: Path, target: Path) -> None:
    eagle3(folder, target)
    change(folder, hidden_size=64)


def large_vocabulary(folder: Path, target: Path) -> None:
    eagle3(folder, target)
    change(folder, vocab_size=128)


def other_tokens(folder: Path, target: Path) -> None:  # noqa: ARG001
    write_toy(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"th": ', '"tx": ').replace('"t",\n        "h"', '"t",\n        "x"'))


def with_states(folder: Path, target: Path) -> None:  # noqa: ARG001
    write_decoder("lfm2", folder)


def no_weights(folder: Path, target: Path) -> None:  # noqa: ARG001
    write_toy(folder)
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("algorithm", "write", "message"),
    [
        ("EAGLE3", eagle2, "holds an EAGLE-2 head"),
        ("EAGLE", eagle3, "holds an EAGLE-3 head"),
        ("PARALLEL", eagle2, "algorithm=PARALLEL expects an EAGLE-3 one"),
        ("PARALLEL", eagle3, "not a P-EAGLE head: it needs a tensor mask_hidden"),
        ("EAGLE3", parallel, "holds a P-EAGLE head .*set speculative.algorithm: PARALLEL"),
        ("EAGLE3", wide, "hidden_size=64, but the target's is 32"),
        ("EAGLE3", large_vocabulary, "vocab_size=128, but the target's is 64"),
        ("EAGLE3", no_weights, "model.safetensors"),
        ("STANDALONE", other_tokens, "in the draft model's vocabulary"),
        ("STANDALONE", with_states, "layers of this draft model keep states"),
        ("STANDALONE", no_weights, "safetensors"),
        ("MTP", no_weights, "safetensors"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    algorithm: str, write: Callable[[Path, Path], None], message: str, target: Path, tmp_path: Path
) -> None:
    write(tmp_path, target)
    with pytest.raises(ConfigError, match=message):
        check_model_files(with_speculation(target, algorithm, tmp_path))


@pytest.mark.parametrize("algorithm", ["EAGLE", "MTP"])
def test_a_target_without_mtp_layers_is_refused(algorithm: str, target: Path) -> None:
    with pytest.raises(ConfigError, match="MTP layers"):
        check_model_files(with_speculation(target, algorithm, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 3}, "tp_size=3 cannot share 4 query heads and 2 KV heads; set tp_size to at most 2 or 4"),
        ({"context_length": 1000}, "context_length=1000 is more than the 256 positions"),
    ],
)
def test_options_that_the_target_does_not_support_are_refused(
    options: dict[str, Any], message: str, target: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model_files(EngineConfig(model=str(target), **options))


def test_a_token_map_of_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    write_random_head(tmp_path / "head", target, 2)
    (tmp_path / "map.json").write_text("[1, 2, 99999]")
    config = with_speculation(target, "EAGLE", tmp_path / "head")
    speculative = config.speculative.model_copy(update={"token_map": str(tmp_path / "map.json")})
    with pytest.raises(ConfigError, match="99999"):
        check_model_files(config.model_copy(update={"speculative": speculative}))
