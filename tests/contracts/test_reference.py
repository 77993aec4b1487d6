"""The configuration reference is what the configuration defines."""

from pathlib import Path

from cluster.cli.reference import COMMAND, reference

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference(), f"run: {COMMAND}"
