"""Import rules between packages, read from the source, so that lazy imports count."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

LEAVES = {
    "caches",
    "channel",
    "config",
    "cores",
    "sampling_params",
    "outputs",
    "draft_trace",
    "private_folders",
    "errors",
    "grammar",
    "heartbeat",
    "metrics",
    "step",
    "step_wire",
    "tables",
    "tenants",
    "unsupported_options",
    "yaml_file",
}
LAYERS = [
    "leaves",
    "ops",
    "layers",
    "models",
    "spec_decode",
    "structured_output",
    "worker",
]  # each may import itself and what is before it
TOOLS = {"bench", "cli", "dashboard", "testing", "train", "utils"}
# Packages of `cluster`, and which others each may import. `shared`: the modules directly in `cluster`, without `app`.
CLUSTER = {
    "shared": set(),
    "liveness": set(),
    "engine": {"shared", "liveness"},
    "ingress": {"shared"},
    "app": {"shared", "engine", "ingress"},
    "cli": {"shared", "engine", "app"},
}
# Packages of `specray.server` that the rest is built on, and what they use of the server besides themselves.
SERVER = {
    "access": {"errors"},
    "model_output": {"config"},
    "routing": {"config", "tasks"},
    "schemas": {"errors"},
    "tool_calls": {"config", "model_output"},
}
ALLOWED_IMPORTS = {("worker", "specray.engine.executor")}  # the protocol that an executor implements, and its values


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
    if module == "specray":  # its public names, imported when they are first used
        return "tools"
    if top == "cluster":
        return "cluster"
    if not part or part in LEAVES:
        return "leaves"
    return "tools" if part in TOOLS else part


def may_import(importer: str, imported: str) -> bool:
    """The rules."""
    above, below = layer_of(importer), layer_of(imported)
    if (above, imported) in ALLOWED_IMPORTS or above == below or above in ("cluster", "tools"):
        return below != "cluster" or above == "cluster"
    if above == "llm":
        return below in (*LAYERS, "engine")
    if above == "server":
        return below in ("leaves", "models", "engine")
    if above == "engine":
        return below == "leaves"
    return above in LAYERS and below in LAYERS and LAYERS.index(below) < LAYERS.index(above)


def cluster_package(module: str) -> str:
    part = module.split(".")[1] if "." in module else "shared"
    return part if part in CLUSTER else "shared"


def may_import_in_cluster(importer: str, imported: str) -> bool:
    above, below = cluster_package(importer), cluster_package(imported)
    return above == below or below in CLUSTER[above]


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_ray_uses(name: str, tree: ast.AST) -> list[str]:
    names = [item.imported for item in imports_of(name, tree)]
    names += [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [n for n in names if n.startswith("ray.") and any(part.startswith("_") for part in n.split("."))]


def shown(wrong: list[Import]) -> list[str]:
    return [f"{SOURCES[item.importer]}:{item.line} imports {item.imported}" for item in wrong]


def test_imports_follow_the_rules() -> None:
    assert len(OUR_IMPORTS) > 1000
    assert not shown([item for item in OUR_IMPORTS if not may_import(item.importer, item.imported)])


def test_imports_between_packages_of_cluster_point_down() -> None:
    inner = [
        item for item in OUR_IMPORTS if item.importer.startswith("cluster") and item.imported.startswith("cluster")
    ]
    assert len(inner) > 100
    assert not shown([item for item in inner if not may_import_in_cluster(item.importer, item.imported)])


@pytest.mark.parametrize("package", SERVER)
def test_the_server_is_built_on_packages_that_know_little_of_it(package: str) -> None:
    """The choice of an engine knows no HTTP, and the parsers of a model's output no request."""
    inner = [item for item in OUR_IMPORTS if item.importer.startswith(f"specray.server.{package}.")]
    found = {item.imported.split(".")[2] for item in inner if item.imported.startswith("specray.server.")}
    assert found - {package} == SERVER[package]


def test_specray_imports_neither_ray_nor_cluster() -> None:
    wrong = [i for i in IMPORTS if i.importer.startswith("specray") and i.imported.split(".")[0] in ("ray", "cluster")]
    assert not wrong


def test_host_code_imports_no_tensor_library() -> None:
    host = [i for i in IMPORTS if layer_of(i.importer) in ("engine", "leaves")]
    assert not [i for i in host if i.imported.split(".")[0] in ("torch", "transformers")]
    arrays = {i.importer.rpartition(".")[0] for i in host if i.imported.split(".")[0] == "numpy"}
    assert arrays == {"specray.engine.draft_budget"}  # tables of costs and acceptance, for every step


def test_imports_have_no_cycles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in SOURCES}
    for item in OUR_IMPORTS:
        graph[item.importer].add(item.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def modules_after(*imports: str) -> set[str]:
    """Modules that a new interpreter has loaded after importing these."""
    program = f"import sys, {', '.join(imports)}; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def test_loading_the_engine_loads_no_torch() -> None:
    assert not modules_after("specray.engine.engine", "specray.engine.async_engine") & {"torch", "transformers", "ray"}


def test_checking_a_configuration_loads_no_model_library() -> None:
    """It would delay every command by seconds."""
    modules = ("cluster.cli.check", "cluster.cli.serve", "cluster.cli.launcher", "cluster.engine.router")
    assert not modules_after(*modules) & {"torch", "transformers"}


def test_importing_the_package_loads_nothing_of_it() -> None:
    assert not [name for name in modules_after("specray") if name.startswith(("specray.", "torch", "pydantic"))]


def test_only_rays_public_api_is_imported() -> None:
    found = {name: private_ray_uses(name, TREES[name]) for name in SOURCES if name.startswith("cluster")}
    assert not {name: uses for name, uses in found.items() if uses}


@pytest.mark.parametrize("line", ["from ray._private import x", "import ray.util._x", "ray.x._private.f()"])
def test_the_linter_finds_private_ray_imports(line: str) -> None:
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
        ("specray.llm", "specray.cli.main", False),
        ("specray.cli.main", "specray.llm", True),
        ("specray.train.answers", "specray.llm", True),
        ("specray.train.hidden_states", "specray.spec_decode.drafter", True),
        ("specray.worker.worker", "specray.train.hidden_states", False),
        ("specray.spec_decode.eagle", "specray.train.heads", False),
        ("specray.cli.main", "cluster.cli.check", False),
        ("cluster.engine.router", "specray.engine.engine", True),
        ("cluster.ingress.deployment", "specray.server.app", True),
        ("specray.server.service", "specray.engine.request", True),
        ("specray.server.service", "specray.worker.worker", False),
        ("specray.server.service", "cluster.config", False),
        ("specray.engine.scheduler", "specray.server.service", False),
        ("specray.config", "specray.engine.engine", False),
    ],
)
def test_the_rules_allow_what_the_design_allows(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("cluster.cli.serve", "cluster.app", True),
        ("cluster.app", "cluster.cli.plan", False),
        ("cluster.engine.router", "cluster.config", True),
        ("cluster.engine.router", "cluster.ingress.replicas", False),
        ("cluster.ingress.replicas", "cluster.engine.router", False),
        ("cluster.config", "cluster.engine.placement", False),
        ("cluster.liveness.watchdog", "cluster.engine.executor", False),
    ],
)
def test_import_direction_of_cluster(importer: str, imported: str, allowed: bool) -> None:
    assert may_import_in_cluster(importer, imported) is allowed
