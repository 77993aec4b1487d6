"""No code is run from data: nothing in the packages unpickles, evaluates or executes input.

The check reads the source and resolves imported names, so that it finds `from torch import load as read`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for top in ("specray", "cluster") for path in sorted((ROOT / top).rglob("*.py"))]
TORCH_LOAD_HOME = ROOT / "specray/models/weights.py"

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "zmq"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "builtins.eval",
    "builtins.exec",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "os.system",
    "os.popen",
    "torch.hub.load",
    "torch.jit.load",
    "pandas.read_pickle",
}
SWITCHES = {"allow_pickle", "shell", "trust_remote_code"}  # options of a call that must be off or absent


def findings(path: Path, source: str) -> list[str]:
    """Uses of modules and functions that can run data as code, each as `line: use`."""
    tree = ast.parse(source)
    names = dict(imported_names(tree))
    modules = [f"{line}: import of {name}" for name, line in imported_modules(tree)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return modules + [f"{call.lineno}: {wrong}" for call in calls for wrong in violations(call, names, path)]


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Imports from the forbidden modules, except those of exceptions only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not all(alias.name.endswith("Error") for alias in node.names):
            modules = [node.module or ""]
        else:
            continue
        yield from ((module, node.lineno) for module in modules if module.split(".")[0] in MODULES)


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Imported names and what they refer to: (`read`, `torch.load`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def violations(call: ast.Call, names: dict[str, str], path: Path) -> Iterator[str]:
    name = dotted(call.func, names)
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in CALLS:
        yield name
    if name == "torch.load" and not (path == TORCH_LOAD_HOME and is_constant(options.get("weights_only"), True)):
        yield f"torch.load without weights_only=True, or outside {TORCH_LOAD_HOME.name}"
    yield from (option for option in SWITCHES & options.keys() if not is_constant(options[option], False))


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def is_constant(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_from_data(path: Path) -> None:
    assert findings(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "from pickle import loads",
        "import zmq.asyncio",
        "def f():\n    import marshal",
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "import yaml as y\ny.load(text)",
        "from yaml import unsafe_load as read\nread(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load\nload(path)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_forbidden_uses_are_found(snippet: str) -> None:
    """In the file with the most permissions."""
    assert findings(TORCH_LOAD_HOME, snippet)


@pytest.mark.parametrize(
    "line",
    [
        "from pickle import UnpicklingError",
        "model.eval()",
        "re.compile(text)",
        "yaml.safe_load(text)",
        "f(shell=False)",
    ],
)
def test_harmless_lines_are_allowed(line: str) -> None:
    assert not findings(ROOT / "specray/x.py", line)


def test_torch_load_is_used_in_one_file() -> None:
    good = "torch.load(path, weights_only=True)"
    assert not findings(TORCH_LOAD_HOME, good)
    assert findings(ROOT / "specray/worker/worker.py", good)
    assert "torch.load(" in TORCH_LOAD_HOME.read_text(encoding="utf-8")
