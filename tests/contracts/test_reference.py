"""The README's configuration reference matches the configuration's fields."""

from pathlib import Path

from cluster.cli.reference import reference

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- reference: python -m cluster.cli.reference -->\n", "\n<!-- end of reference -->"
    assert readme.partition(begin)[2].partition(end)[0] == reference(), "paste the output of the command in the comment"
