"""Every file in configs/ starts: Ray's schema and ours take it, listening is on loopback, and a typo is refused."""

from pathlib import Path

import pytest
import yaml

from cluster.check import check_file
from specray.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_the_embedded_demo_has_its_configs() -> None:
    assert {"plain.yaml", "ngram.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_loads(path: Path) -> None:
    assert check_file(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_listens_on_loopback(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_with_a_typo_is_refused(path: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    document["applications"][0]["args"]["modle"] = "x"
    broken = tmp_path / path.name
    broken.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=r"modle.*did you mean model"):
        check_file(broken)


def test_plain_and_ngram_differ_in_speculation_only() -> None:
    plain, ngram = (
        next(iter(check_file(ROOT / "configs" / f"{name}.yaml").values())).engine for name in ("plain", "ngram")
    )
    assert ngram.speculative.algorithm == "NGRAM"
    assert plain == ngram.model_copy(update={"speculative": plain.speculative})
