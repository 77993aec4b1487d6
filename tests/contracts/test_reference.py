"""The README's configuration reference is what the configuration says, and the step stays readable."""

from pathlib import Path

from cluster.cli.reference import reference
from specray.bench.figures import STEP_PATH

ROOT = Path(__file__).parents[2]
MAX_STEP_PATH_LINES = 1475


def test_the_reference_is_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- reference: python -m cluster.cli.reference -->\n", "\n<!-- end of reference -->"
    assert readme.partition(begin)[2].partition(end)[0] == reference(), "paste the output of the command in the comment"


def test_the_step_path_can_be_read_in_one_sitting() -> None:
    lines = {name: len((ROOT / f"specray/{name}.py").read_text(encoding="utf-8").splitlines()) for name in STEP_PATH}
    assert sum(lines.values()) <= MAX_STEP_PATH_LINES, lines
