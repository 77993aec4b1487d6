"""What the README tells people to type exists, and what it names is there."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli import check, serve
from specray.cli.main import build_parser
from specray.metrics import METRICS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
CLUSTER_PARSERS = {"serve": serve.parser(), "check": check.parser()}  # programs of their own
TOP_FOLDERS = ("specray/", "cluster/", "configs/", "tests/", "deploy/", "dashboards/")


def command_lines() -> Iterator[str]:
    """Lines of the README's shell blocks, continued ones joined, without prompts and comments."""
    for block in re.findall(r"```(?:bash|sh|console|shell)\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            text = line.strip().removeprefix("$ ")
            if text and not text.startswith("#"):
                yield text


def words(line: str) -> list[str]:
    """A command's words up to a pipe, a redirection or the next command."""
    split = shlex.split(line, comments=True)
    end = next((i for i, word in enumerate(split) if word in ("|", "&&", ";", ">", "&")), len(split))
    return split[:end]


def commands_of(program: str) -> list[list[str]]:
    found = [words(line) for line in command_lines()]
    return [command[1:] for command in found if command and command[0].rsplit("/", 1)[-1] == program]


def backticked() -> set[str]:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", prose))


def test_make_targets_exist() -> None:
    named = {word for command in commands_of("make") for word in command if "=" not in word}
    named |= {name.split()[1] for name in backticked() if name.startswith("make ") and len(name.split()) > 1}
    assert named
    assert named <= MAKE_TARGETS


def test_the_promised_targets_exist() -> None:
    assert {"demo", "test", "bench", "lint", "clean"} <= MAKE_TARGETS


@pytest.mark.parametrize("command", commands_of("specray"), ids=" ".join)
def test_specray_commands_parse(command: list[str]) -> None:
    assert is_accepted(command), f"specray {shlex.join(command)} is refused"


def is_accepted(command: list[str]) -> bool:
    name, *arguments = command
    parser = CLUSTER_PARSERS.get(name)
    try:
        parser.parse_args(arguments) if parser else build_parser().parse_args(command)
    except SystemExit as ended:
        return ended.code == 0  # --help and --version
    return True


@pytest.mark.parametrize("command", [*commands_of("serve"), *commands_of("specray")], ids=" ".join)
def test_served_configs_exist(command: list[str]) -> None:
    for word in command:
        assert not word.endswith(".yaml") or (ROOT / word).is_file()


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", README)
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_named_files_exist() -> None:
    paths = {name for name in backticked() if name.startswith(TOP_FOLDERS) and not re.search(r"[*{<… ]", name)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_named_metrics_exist() -> None:
    known = {metric.name for metric in METRICS}
    named = {name for name in backticked() if re.fullmatch(r"specray_[a-z_]+", name)}
    assert named <= known


def test_named_options_exist() -> None:
    parsers = [build_parser(), *_subparsers(build_parser()), *CLUSTER_PARSERS.values()]
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    named = {name.split()[0].partition("=")[0] for name in backticked() if name.startswith("--")}
    assert named <= known


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()
