"""The README and the documentation agree with the code: commands, flags, routes, files, names and examples exist."""

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fastapi import FastAPI

from cluster.cli import serve
from cluster.config import AppConfig
from specray.cli.main import build_parser
from specray.config import EngineConfig
from specray.metrics import METRICS
from specray.sampling_params import SamplingParams
from specray.server.anthropic.protocol import MessagesRequest
from specray.server.app import create_app
from specray.server.chat.protocol import ChatRequest
from specray.server.completions.protocol import CompletionRequest
from specray.server.generate.protocol import GenerateRequest
from specray.server.routes.admin import add_admin_routes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
        *(
            ROOT / name / "README.md"
            for name in ("specray", "specray/server", "specray/dashboard", "cluster", "deploy")
        ),
        *sorted(DOCS.glob("*.md")),
    ]
}
OURS = {name: text for name, text in PAGES.items() if not name.startswith("deploy/")}  # without other programs' flags
MIGRATING = PAGES["docs/migrating.md"]
CLIENTS_PAGE = "docs/clients.md"  # `make clients` runs its examples, with packages that are not installed here
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
CLUSTER_PARSERS = {"serve": serve.parser(), "check": serve.check_parser()}  # not subcommands of build_parser
TOP_FOLDERS = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and path.name != "build")
SERVER = "http://127.0.0.1:8000"
BODIES: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/generate": GenerateRequest,
    "/v1/messages": MessagesRequest,
}
SAME = "the same"


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced code blocks in one of the languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def shell_lines(text: str) -> Iterator[str]:
    """Lines of a page's shell blocks, continued ones joined, without prompts and comments."""
    for block in blocks(text, "bash", "sh", "console", "shell"):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.strip().removeprefix("$ ")
            if command and not command.startswith("#"):
                yield command


def commands(program: str) -> list[list[str]]:
    """Arguments of each call of `program` in a shell block, also behind `&&` or a pipe."""
    separators = ("|", "&&", ";", "&", ">", "<")
    found = []
    for line in (line for text in PAGES.values() for line in shell_lines(text)):
        words = shlex.split(line, comments=True)
        for start in [0, *(i + 1 for i, word in enumerate(words) if word in separators)]:
            command = list(takewhile(lambda word: word not in separators, words[start:]))
            if command and command[0].rsplit("/", 1)[-1] == program and command[1:] not in found:
                found.append(command[1:])
    return found


def named_commands(program: str) -> list[list[str]]:
    """Words behind `program` in inline code."""
    named = (name.split() for text in PAGES.values() for name in backticked(text))
    return [words[1:] for words in named if words[0] == program and len(words) > 1]


def backticked(text: str) -> list[str]:
    """Inline code of a page."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def is_accepted(command: list[str]) -> bool:
    """Whether `specray` takes these arguments."""
    name, *arguments = command
    parser = CLUSTER_PARSERS.get(name)
    try:
        parser.parse_args(arguments) if parser else build_parser().parse_args(command)
    except SystemExit as ended:
        return ended.code == 0  # --help and --version
    return True


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """All flags of a parser and its subcommands."""
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for sub in action.choices.values() for option in options_of(sub)}
    return found


def test_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_make_targets_exist() -> None:
    named = {word for command in commands("make") for word in command if "=" not in word}
    named |= {command[0] for command in named_commands("make")}
    assert {"demo", "test", "docs"} <= named <= MAKE_TARGETS


def test_named_subcommands_exist() -> None:
    for command in named_commands("specray"):
        words = list(takewhile(lambda word: re.fullmatch("[a-z0-9-]+", word) and word[0] != "-", command))
        assert not words or is_accepted([*words, "--help"]), command


@pytest.mark.parametrize("command", commands("specray"), ids=" ".join)
def test_specray_commands_parse(command: list[str]) -> None:
    assert is_accepted(command), f"specray {shlex.join(command)} is refused"


@pytest.mark.parametrize("command", [*commands("serve"), *commands("specray")], ids=" ".join)
def test_served_configurations_exist(command: list[str]) -> None:
    for word in command:
        assert not word.endswith(".yaml") or (ROOT / word).is_file()


@pytest.mark.parametrize("command", [c for c in commands("specray") if c[0] == "serve"], ids=" ".join)
def test_serve_commands_make_a_valid_configuration(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main([*command[1:], "--print-config"]) == 0, capsys.readouterr().err


def routes() -> set[str]:
    """Paths that the server answers."""
    app = create_app(SimpleNamespace(config=AppConfig(), tracer=None))  # type: ignore[arg-type]
    admin = FastAPI()
    add_admin_routes(admin, AppConfig(), SimpleNamespace())  # type: ignore[arg-type]
    return {route.path for route in [*app.routes, *admin.routes] if hasattr(route, "path")}


@pytest.mark.parametrize("command", commands("curl"), ids=" ".join)
def test_curl_commands_name_a_route_and_send_a_valid_body(command: list[str]) -> None:
    [url] = [word for word in command if word.startswith("http")]
    path = url.removeprefix(SERVER)
    assert path in routes()
    if "-d" in command:
        body = json.loads(command[command.index("-d") + 1])
        if path in BODIES:
            assert not BODIES[path].model_validate(body).ignored_fields


def test_documented_routes_exist() -> None:
    known = routes()
    for name in ("README.md", "docs/serving.md", "docs/api.md"):
        named = {code for code in backticked(PAGES[name]) if re.fullmatch(r"/[a-z_0-9./]+", code)}
        assert named - {"/admin"} <= known


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", PAGES[page])
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (folder / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    outside = ("build/",)
    paths = {name for name in backticked(PAGES[page]) if name.startswith(TOP_FOLDERS) and not name.startswith(outside)}
    paths = {path for path in paths if not re.search(r"[*{<… ]", path)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_named_modules_exist() -> None:
    """Modules behind `python -m`."""
    found = {name for text in PAGES.values() for name in re.findall(r"python3? -m ([a-z_.]+)", text)}
    ours = {name for name in found if name.split(".")[0] in ("specray", "cluster", "tests", "benchmarks")}
    assert ours
    assert [name for name in sorted(ours) if importlib.util.find_spec(name) is None] == []


def test_named_metrics_exist() -> None:
    known = {metric.name for metric in METRICS}
    named = {name for text in PAGES.values() for name in backticked(text) if re.fullmatch(r"specray_[a-z_]+", name)}
    assert named <= known


@pytest.mark.parametrize("page", OURS)
def test_named_flags_exist(page: str) -> None:
    known = set().union(*map(options_of, [build_parser(), *CLUSTER_PARSERS.values()]))
    text = OURS[page]
    if page == "docs/migrating.md":  # the first column and the prose name flags of other servers
        text = "\n".join(ours for _, ours in migration_rows())
    named = {name.split()[0].partition("=")[0] for name in backticked(text) if name.startswith("--")}
    assert named <= known


def migration_rows() -> list[tuple[str, str]]:
    """(theirs, ours) of each row of the tables of flags."""
    rows = [line.strip("|").split("|") for line in MIGRATING.splitlines() if line.startswith("| ")]
    return [(theirs.strip(), ours.strip()) for theirs, ours in rows]


def test_flags_that_are_said_to_be_the_same_exist() -> None:
    known = options_of(CLUSTER_PARSERS["serve"])
    same = {flag for theirs, ours in migration_rows() if ours.startswith(SAME) for flag in backticked(theirs)}
    assert len(same) > 30
    assert same <= known


def test_flags_that_are_said_to_be_missing_are_missing() -> None:
    known = options_of(CLUSTER_PARSERS["serve"])
    missing = {
        flag for theirs, ours in migration_rows() if ours.startswith("not supported") for flag in backticked(theirs)
    }
    assert missing
    assert not missing & known


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {CLIENTS_PAGE}))
def test_python_examples_import_what_exists(page: str) -> None:
    for block in blocks(PAGES[page], "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names)


CALLS: dict[str, Any] = {"LLM": EngineConfig, "create": ChatRequest, "SamplingParams": SamplingParams}


def python_calls(name: str) -> list[dict[str, Any]]:
    """Keyword arguments of the calls of `name` in the Python examples, apart from variables and Anthropic's client."""
    examples = [block for text in PAGES.values() for block in blocks(text, "python") if "Anthropic(" not in block]
    trees = [ast.parse(block) for block in examples]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
        for call in calls
        if name in (getattr(call.func, "id", None), getattr(call.func, "attr", None))
        and not any(isinstance(node, ast.Name) for keyword in call.keywords for node in ast.walk(keyword.value))
    ]


@pytest.mark.parametrize("name", CALLS)
def test_python_examples_pass_valid_arguments(name: str) -> None:
    found = python_calls(name)
    assert found
    for arguments in found:
        made = CALLS[name](**arguments)
        assert not getattr(made, "ignored_fields", [])


def glossary_owners() -> list[tuple[str, str]]:
    """(word, owner) of each line of the glossary: a class or a path."""
    lines = re.findall(r"^- \*\*(.+)\*\*: .*\((.*)\)$", PAGES["docs/glossary.md"], re.MULTILINE)
    return [(word, owner) for word, owners in lines for owner in backticked(owners)]


def test_the_glossary_names_classes_and_files_that_exist() -> None:
    sources = [
        path.read_text(encoding="utf-8") for name in ("specray", "cluster") for path in (ROOT / name).rglob("*.py")
    ]
    classes = set(re.findall(r"^class (\w+)", "\n".join(sources), re.MULTILINE))
    owners = glossary_owners()
    assert len({word for word, _ in owners}) >= 40
    assert [each for each in owners if each[1] not in classes and not (ROOT / each[1]).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_named_options_exist(page: str) -> None:
    """Dotted names such as `speculative.num_steps` are options of the configuration."""
    groups = {name: field.annotation for name, field in AppConfig.model_fields.items()}
    for code in backticked(PAGES[page]):
        if match := re.fullmatch(
            r"(speculative|draft|placement|routing|autoscaling|server)\.(?!(?:py|h)\b)([a-z_0-9]+)(:.*)?", code
        ):
            group: Any = groups[match[1]]
            assert match[2] in group.model_fields, code


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert set(re.findall(r"[a-z-]+\.md", str(navigation))) == {path.name for path in DOCS.glob("*.md")}


@pytest.mark.parametrize("link", ["nowhere.md", "architecture.md#nowhere"])
def test_a_broken_link_fails_make_docs(link: str, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")  # `make docs` installs it
    for name in ("docs", "mkdocs.yml", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs/index.md").open("a") as page:
        page.write(f"\n[a link]({link})\n")
    recipe = re.search(r"python -m (mkdocs build .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert recipe is not None
    done = subprocess.run([sys.executable, "-m", *recipe[1].split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("WARNING -") == 1, done.stderr
