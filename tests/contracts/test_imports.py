"""Who may import whom, and which calls no file may make; read from the source, so lazy imports count too."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

LEAVES = {"channel", "config", "sampling_params", "outputs", "errors", "metrics", "step"}
LAYERS = ["leaves", "ops", "layers", "models", "spec_decode", "worker"]  # each may import itself and what is before it
TOOLS = {"bench", "chat", "cli", "dashboard", "demo", "local_server", "train"}
DOORS = {("worker", "specray.engine.executor")}  # the protocol that an executor implements, and its values

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "zmq"}
BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}
BANNED_CALLS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"}
TORCH_LOAD_HOME = "specray.models.weights"


class Import(NamedTuple):
    importer: str
    imported: str
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for top in ("specray", "cluster") for path in sorted((ROOT / top).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imports_of(name: str, tree: ast.AST) -> Iterator[Import]:
    """Every import in `tree`, functions included, as absolute names: `from a import b` is a.b where a.b is a module."""
    package = name if SOURCES.get(name, Path()).name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(name, full if full in SOURCES or base == "ray" else base, node.lineno)


IMPORTS = [imported for name, tree in TREES.items() for imported in imports_of(name, tree)]
OUR_IMPORTS = [item for item in IMPORTS if item.imported.split(".")[0] in ("specray", "cluster")]


def layer_of(module: str) -> str:
    top, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    if top == "cluster":
        return "cluster"
    if not part or part in LEAVES:
        return "leaves"
    return "tools" if part in TOOLS else part


def may_import(importer: str, imported: str) -> bool:
    """The import direction of the design, in one place."""
    above, below = layer_of(importer), layer_of(imported)
    if (above, imported) in DOORS or above == below or above in ("cluster", "tools"):
        return below != "cluster" or above == "cluster"
    if above == "llm":
        return below in (*LAYERS, "engine")
    if above == "engine":
        return below == "leaves"
    return above in LAYERS and below in LAYERS and LAYERS.index(below) < LAYERS.index(above)


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def banned_modules(tree: ast.AST) -> list[str]:
    """Imports of modules that turn data into code; an exception's name alone is harmless."""
    harmless = {node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and names_errors_only(node)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and node not in harmless]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return [name for name in names if name.split(".")[0] in BANNED_MODULES]


def names_errors_only(node: ast.ImportFrom) -> bool:
    return all(alias.name.endswith("Error") for alias in node.names)


def banned_calls(name: str, tree: ast.AST) -> list[str]:
    """Calls that turn data into code, each as `line: call`."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        call, options = dotted(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        if call in BANNED_BUILTINS | BANNED_CALLS:
            found.append(f"{node.lineno}: {call}")
        if call == "torch.load" and not (name == TORCH_LOAD_HOME and is_true(options.get("weights_only"))):
            found.append(f"{node.lineno}: torch.load without weights_only=True or outside {TORCH_LOAD_HOME}")
        found += [
            f"{node.lineno}: {option}"
            for option in ("allow_pickle", "shell", "trust_remote_code")
            if option in options and not is_false(options[option])
        ]
    return found


def is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def private_ray_uses(name: str, tree: ast.AST) -> list[str]:
    names = [item.imported for item in imports_of(name, tree)]
    names += [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [n for n in names if n.startswith("ray.") and any(part.startswith("_") for part in n.split("."))]


@pytest.mark.parametrize("item", OUR_IMPORTS, ids=lambda item: f"{item.importer}->{item.imported}")
def test_imports_point_down(item: Import) -> None:
    assert may_import(item.importer, item.imported), (
        f"{SOURCES[item.importer]}:{item.line} imports {item.imported}, against the import direction"
    )


def test_engine_package_imports_neither_ray_nor_cluster() -> None:
    wrong = [i for i in IMPORTS if i.importer.startswith("specray") and i.imported.split(".")[0] in ("ray", "cluster")]
    assert not wrong


def test_host_side_imports_no_tensor_library() -> None:
    host = [i for i in IMPORTS if layer_of(i.importer) in ("engine", "leaves")]
    assert not [i for i in host if i.imported.split(".")[0] in ("torch", "transformers", "numpy")]


def test_no_cycles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in SOURCES}
    for item in OUR_IMPORTS:
        graph[item.importer].add(item.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_loading_the_engine_loads_no_torch() -> None:
    program = "import sys, specray.engine.engine, specray.engine.async_engine; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "'specray.engine.engine'" in loaded.stdout
    for heavy in ("torch", "transformers", "ray"):
        assert f"'{heavy}'" not in loaded.stdout, f"importing specray.engine loads {heavy}"


@pytest.mark.parametrize("name", SOURCES)
def test_no_code_from_data(name: str) -> None:
    assert not banned_modules(TREES[name])
    assert not banned_calls(name, TREES[name])


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("cluster")])
def test_public_ray_only(name: str) -> None:
    assert not private_ray_uses(name, TREES[name])


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_lint_sees_banned_calls(line: str) -> None:
    assert banned_calls(TORCH_LOAD_HOME, ast.parse(line))


@pytest.mark.parametrize("line", ["import pickle", "from pickle import loads", "import zmq.asyncio"])
def test_lint_sees_banned_modules(line: str) -> None:
    assert banned_modules(ast.parse(line))
    assert not banned_modules(ast.parse("from pickle import UnpicklingError"))


@pytest.mark.parametrize("line", ["model.eval()", "re.compile(text)", "yaml.safe_load(text)"])
def test_lint_allows_harmless_calls(line: str) -> None:
    assert not banned_calls("specray.x", ast.parse(line))


def test_lint_knows_the_home_of_torch_load() -> None:
    good = ast.parse("torch.load(path, weights_only=True)")
    assert not banned_calls(TORCH_LOAD_HOME, good)
    assert banned_calls("specray.worker.worker", good)


@pytest.mark.parametrize("line", ["from ray._private import x", "import ray.util._x", "ray.x._private.f()"])
def test_lint_sees_private_ray(line: str) -> None:
    assert private_ray_uses("cluster.x", ast.parse(line))


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("specray.ops.attention", "specray.config", True),
        ("specray.ops.attention", "specray.layers.linear", False),
        ("specray.worker.worker", "specray.spec_decode", True),
        ("specray.worker.worker", "specray.engine.request", False),
        ("specray.engine.scheduler", "specray.worker.worker", False),
        ("specray.engine.scheduler", "specray.step", True),
        ("specray.llm", "specray.engine.engine", True),
        ("specray.llm", "specray.cli", False),
        ("specray.cli", "specray.llm", True),
        ("specray.train.answers", "specray.llm", True),
        ("specray.train.recorder", "specray.spec_decode.drafter", True),
        ("specray.worker.worker", "specray.train.recorder", False),
        ("specray.spec_decode.eagle", "specray.train.heads", False),
        ("specray.cli", "cluster.check", False),
        ("cluster.router", "specray.engine.engine", True),
        ("specray.config", "specray.engine.engine", False),
    ],
)
def test_import_direction_is_the_designs(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed
