"""Every flag of SGLang's and vLLM's servers works, or is answered with what to do instead; docs/migrating.md agrees.

`specray/cli/engine_flags.json` has the names: of SGLang 0.5.23's records of arguments, and of vLLM 0.33.0's engine and
frontend arguments.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from cluster.cli.serve import main, parser
from specray.cli.engine_flags import ANSWERS, answer, flags_of_engines

ROOT = Path(__file__).parents[2]
ENGINES = flags_of_engines()
OURS = {name for action in parser()._actions for name in action.option_strings}
ROW = re.compile(r"^\| (?P<theirs>`-[^|]+) \| (?P<ours>[^|]+) \|$", re.MULTILINE)
FLAG = re.compile(r"--[a-z0-9-]+[a-z0-9]")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_flag_of_an_engine_works_or_is_answered(engine: str) -> None:
    assert len(ENGINES[engine]) > 300
    assert [flag for flag in ENGINES[engine] if flag not in OURS and not answer(flag)] == []


def test_no_answer_is_for_flags_that_no_engine_has() -> None:
    """Nor for flags that work here."""
    names = {flag.removeprefix("--") for flags in ENGINES.values() for flag in flags if flag not in OURS}
    patterns = [pattern for text in ANSWERS.values() for pattern in text.split()]
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)] == []


def test_answers_name_flags_and_pages_that_exist() -> None:
    assert {flag for text in ANSWERS for flag in FLAG.findall(text)} - OURS == {"--speculative"}
    assert [page for text in ANSWERS for page in re.findall(r"docs/\S+?\.md", text) if not (ROOT / page).exists()] == []


def test_the_migration_page_agrees_with_the_answers() -> None:
    """Where it names another flag for theirs, so does the answer; where it says "the same", the flag works."""
    checked = 0
    for row in ROW.finditer((ROOT / "docs/migrating.md").read_text()):
        for flag in FLAG.findall(row["theirs"]):
            said = answer(flag)
            checked += 1
            if row["ours"].startswith(("the same", "refused", "accepted")):
                assert flag in OURS, flag
                continue
            assert said is not None, flag
            if "not supported" in row["ours"]:
                assert said.startswith("not supported"), (flag, said)
            else:
                assert set(FLAG.findall(row["ours"])) <= set(FLAG.findall(said)), (flag, said)
    assert checked > 60


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-enable-prefix-caching"], "use --disable-radix-cache"),
        (["--seed", "3"], "use the field seed of a request"),
        (["--max-num-seqs=8"], "use --max-running-requests"),
        (["--max_num_seqs", "8"], "use --max-running-requests"),
        (["-tp", "2"], "use --tp-size"),
        (["--enable-lora", "--api-key", "x"], "--api-key: SpecRay does not have this flag"),
        (["--sed"], "--sed: unknown flag"),
        (["--quantisation", "int8"], "--quantisation: unknown flag; did you mean --quantization?"),
    ],
)
def test_a_flag_of_another_engine_gets_its_answer(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
