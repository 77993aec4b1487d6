"""Files in deploy/ fit the schemas of the programs that read them, our options, and each other.

Nothing is started. The configurations in configs/ are checked by `test_configs`.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.scripts.scripts import start as ray_start
from ray.serve.deployment import deployment_to_schema

from cluster.app import _ingress, _router
from cluster.cli.check import check_file
from cluster.config import AppConfig
from cluster.engine.placement import decide_device

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKER = DEPLOY / "docker"
CRD = ROOT.parent / "shared/data/kuberay/ray.io_rayservices.yaml"
MANIFESTS = sorted((DEPLOY / "kuberay").glob("*.yaml"))
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*[!e]"))  # not the .dockerignore of each
SERVE_FILES = [DOCKER / "serve.yaml", DOCKER / "serve-cuda.yaml", DEPLOY / "ray/two-engines.yaml"]
UNIT = DEPLOY / "systemd/specray.service"
RAY_START_OPTIONS = {option for parameter in ray_start.params for option in parameter.opts}

needs_crd = pytest.mark.skipif(not CRD.is_file(), reason="the RayService definition of KubeRay is not available")
Json = dict[str, Any]


def test_documented_files_exist() -> None:
    assert {path.stem for path in MANIFESTS} == {"single-node", "multi-node-tp", "gcs-fault-tolerance"}
    assert {path.suffix for path in DOCKERFILES} == {".cpu", ".cuda"}


# Kubernetes: kubectl refuses what the operator's schema forbids, and silently drops unknown fields.


@needs_crd
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_fits_the_custom_resource_definition(path: Path) -> None:
    service = rayservice(path)
    assert violations(service, crd_schema()) == []


@needs_crd
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["rayClusterConfig", "headGroupSpec", "template", "spec", "terminationGracePeriodSecond"], 30),
        (["rayClusterConfig", "authOptions", "mode"], "none"),
        (["rayClusterDeletionDelaySeconds"], "330"),
        (
            ["rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "resources", "limits", "cpu"],
            "4x",
        ),
    ],
    ids=["unknown property", "not in the enum", "wrong type", "not a quantity"],
)
def test_an_invalid_manifest_is_refused(place: list[str | int], value: object) -> None:
    service = rayservice(MANIFESTS[-1])
    part: Any = service["spec"]
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    assert len(violations(service, crd_schema())) == 1


@needs_crd
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_other_kubernetes_objects_fit_the_definition(path: Path) -> None:
    """The definition includes Kubernetes' schemas of pods, services and network policies."""
    cluster = crd_schema()["properties"]["spec"]["properties"]["rayClusterConfig"]["properties"]
    rules = cluster["networkPolicy"]["properties"]["head"]["properties"]
    for document in documents(path):
        spec = document["spec"]
        match document["kind"]:
            case "NetworkPolicy":
                assert violations(spec.get("ingress", []), rules["ingressRules"]) == []
                assert violations(spec.get("egress", []), rules["egressRules"]) == []
            case "Service":
                assert violations(document, cluster["headGroupSpec"]["properties"]["headService"]) == []
            case "StatefulSet":
                assert violations(spec["template"], cluster["headGroupSpec"]["properties"]["template"]) == []
            case kind:
                assert kind == "RayService"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_has_a_valid_serve_configuration(path: Path, tmp_path: Path) -> None:
    assert served(path, tmp_path)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifest_enables_token_authentication(path: Path) -> None:
    cluster = rayservice(path)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"]["mode"] == "token"
    assert cluster["rayVersion"] == ray.__version__  # the operator takes tokens only with a version


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_pod_is_confined(path: Path) -> None:
    for pod in pods(path):
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"]["drop"] == ["ALL"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes_of(path)
            weights = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/models"]
            assert all(mount["readOnly"] for mount in weights)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_network_policy_selects_every_pod(path: Path) -> None:
    policies = [document["spec"] for document in documents(path) if document["kind"] == "NetworkPolicy"]
    selected = [policy["podSelector"]["matchLabels"].items() for policy in policies]
    for template in templates(path):
        labels = template["metadata"]["labels"].items()
        assert any(wanted <= labels for wanted in selected)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_has_time_to_finish_its_requests(path: Path, tmp_path: Path) -> None:
    longest = max(shutdown_seconds(app) for app in served(path, tmp_path).values())
    for template in ray_templates(path):
        pod = template["spec"]
        assert pod["terminationGracePeriodSeconds"] >= pre_stop_seconds(pod) + longest + 10  # Ray's own end


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_an_old_cluster_outlives_its_longest_request(path: Path, tmp_path: Path) -> None:
    longest = max(app.server.request_timeout_s for app in served(path, tmp_path).values())
    assert rayservice(path)["spec"]["rayClusterDeletionDelaySeconds"] > longest


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_an_engine_fits_a_pod(path: Path, tmp_path: Path) -> None:
    """A pod has the GPUs of one engine's ranks, or a core per thread."""
    limits = [template["spec"]["containers"][0]["resources"]["limits"] for template in ray_templates(path)]
    for app in served(path, tmp_path).values():
        if app.device == "cuda":
            assert app.tp_size <= max(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)
        else:
            assert app.num_threads is not None  # null means the node's cores, which a pod does not have
            assert app.tp_size * app.num_threads < max(int(limit["cpu"]) for limit in limits)


# Docker.


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.name)
def test_serve_file_loads(path: Path) -> None:
    assert check_file(path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_copies_files_of_the_build_context(path: Path) -> None:
    sources = [Path(source) for source in copied(path)]
    sent = sent_to_docker(path.with_name(path.name + ".dockerignore"))
    assert sources
    assert [str(source) for source in sources if not (ROOT / source).exists()] == []
    assert [str(source) for source in sources if not {source, *source.parents} & sent] == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_runs_as_a_user_and_has_a_health_check(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "1000:1000"
    assert "http://127.0.0.1:8000/readyz" in text
    assert "RAY_AUTH_MODE=token" in text


def test_compose_mounts_and_builds_existing_files() -> None:
    for name, service in compose()["services"].items():
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), (name, source)
            elif not source.startswith("${"):
                assert source in compose()["volumes"], (name, source)
        if build := service.get("build"):
            assert (DOCKER / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).is_file()


def test_tritons_cache_is_writable_and_may_hold_code() -> None:
    """Root file systems are read-only, and Docker mounts memory without exec unless it is asked for."""
    [folder] = re.findall(r"TRITON_CACHE_DIR=(\S+)", (DOCKER / "Dockerfile.cuda").read_text(encoding="utf-8"))
    [mount] = [each for each in compose()["services"]["cuda"]["tmpfs"] if each.startswith(f"{folder}:")]
    assert "exec" in mount.partition(":")[2].split(",")
    for pod in pods(DEPLOY / "kuberay/multi-node-tp.yaml"):
        for container in pod["containers"]:
            if "nvidia.com/gpu" in container["resources"]["limits"]:
                assert folder in [each["mountPath"] for each in container["volumeMounts"]]


def test_the_kernels_can_be_compiled_in_the_cpu_image() -> None:
    """The image has a compiler, and a writable folder that may hold code."""
    recipe = (DOCKER / "Dockerfile.cpu").read_text(encoding="utf-8")
    assert re.search(r"apt-get install .*g\+\+", recipe)
    [folder] = re.findall(r"SPECRAY_KERNEL_CACHE=(\S+)", recipe)
    [mount] = [each for each in compose()["services"]["cpu"]["tmpfs"] if each.startswith(f"{folder}:")]
    assert "exec" in mount.partition(":")[2].split(",")
    for manifest in ("single-node", "gcs-fault-tolerance"):
        for pod in pods(DEPLOY / f"kuberay/{manifest}.yaml"):
            for container in pod["containers"]:
                mounts = [each["mountPath"] for each in container.get("volumeMounts", [])]
                assert folder in mounts or "-cpu" not in container["image"], container["name"]


def test_compose_publishes_on_loopback_only_and_confines_every_container() -> None:
    for name, service in compose()["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name


def test_a_container_of_compose_has_time_to_finish_its_requests() -> None:
    services = compose()["services"]
    for name, file in {"cpu": "serve.yaml", "cuda": "serve-cuda.yaml"}.items():
        (app,) = check_file(DOCKER / file).values()
        assert int(services[name]["stop_grace_period"].removesuffix("s")) >= shutdown_seconds(app) + 10


def test_the_cpu_container_has_a_core_for_each_thread() -> None:
    (app,) = check_file(DOCKER / "serve.yaml").values()
    assert app.num_threads is not None
    assert app.num_threads < compose()["services"]["cpu"]["cpus"]


def test_prometheus_and_grafana_find_our_files_where_compose_mounts_them() -> None:
    services = compose()["services"]
    rules = load(DOCKER / "prometheus.yaml")["rule_files"]
    providers = load(DOCKER / "grafana/provisioning/dashboards/specray.yaml")["providers"]
    folders = [provider["options"]["path"] for provider in providers]
    assert [rule for rule in rules if not on_host(services["prometheus"], rule).is_file()] == []
    assert [folder for folder in folders if not list(on_host(services["grafana"], folder).glob("*.json"))] == []


def test_prometheus_and_grafana_name_services_of_compose() -> None:
    services = compose()["services"]
    aliases = {alias for service in services.values() for alias in aliases_of(service)}
    jobs = load(DOCKER / "prometheus.yaml")["scrape_configs"]
    targets = {
        target.partition(":")[0] for job in jobs for group in job["static_configs"] for target in group["targets"]
    }
    sources = load(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert targets <= services.keys() | aliases
    assert {source["url"] for source in sources} == {"http://prometheus:9090"}


# Plain Ray and systemd.


def test_ray_up_file_fits_rays_schema() -> None:
    schema = json.loads((Path(ray.__path__[0]) / "autoscaler/ray-schema.json").read_text())
    assert violations(load(DEPLOY / "ray/cluster.yaml"), schema) == []


def test_every_ray_start_has_valid_options_a_token_and_a_local_dashboard() -> None:
    commands = [(text, command) for text in ray_texts() for command in ray_starts(text)]
    assert len(commands) == 5  # two of each recipe for two machines, one for one
    for text, command in commands:
        assert "RAY_AUTH_MODE=token" in text
        options = {word.partition("=")[0] for word in command if word.startswith("--")}
        assert options <= RAY_START_OPTIONS
        if "--head" in options:
            assert {"--dashboard-host=127.0.0.1", "--include-dashboard=false"} & set(command)


def test_unit_is_valid(tmp_path: Path) -> None:
    """With its programs replaced by an existing one, because systemd checks that they exist."""
    text = re.sub(r"/opt/specray/bin/[\w.-]+", "/bin/true", UNIT.read_text(encoding="utf-8"))
    if not shutil.which("systemd-analyze"):
        parser = ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(text)
        assert parser.sections() == ["Unit", "Service", "Install"]
        return
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stderr
    assert verified.stderr == ""  # systemd only warns about unknown settings


def test_unit_has_time_to_stop_and_the_right_signal() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE))
    assert settings["KillSignal"] == "SIGINT"  # `serve run` stops its application only on this signal
    assert settings["KillMode"] == "mixed"
    assert int(settings["TimeoutStopSec"]) >= shutdown_seconds(decide_device(AppConfig())) + 10


# Reading.


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def documents(path: Path) -> list[Json]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def rayservice(path: Path) -> Json:
    (service,) = (document for document in documents(path) if document["kind"] == "RayService")
    return json.loads(json.dumps(service))  # aliases become copies


def ray_templates(path: Path) -> list[Json]:
    cluster = rayservice(path)["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", []))]


def templates(path: Path) -> list[Json]:
    others = [document["spec"]["template"] for document in documents(path) if document["kind"] == "StatefulSet"]
    return [*ray_templates(path), *others]


def pods(path: Path) -> list[Json]:
    return [template["spec"] for template in templates(path)]


def volumes_of(path: Path) -> set[str]:
    claims = [document["spec"].get("volumeClaimTemplates", []) for document in documents(path)]
    names = {volume["name"] for pod in pods(path) for volume in pod["volumes"]}
    return names | {claim["metadata"]["name"] for group in claims for claim in group}


def served(path: Path, tmp_path: Path) -> dict[str, AppConfig]:
    """The applications of a manifest, validated by Serve's schema and our configuration."""
    file = tmp_path / path.name
    file.write_text(rayservice(path)["spec"]["serveConfigV2"])
    return check_file(file)


def shutdown_seconds(app: AppConfig) -> float:
    """Maximum time for Serve to stop the ingress and then the router."""
    return sum(
        deployment_to_schema(deployment).graceful_shutdown_timeout_s for deployment in (_ingress(app), _router(app))
    )


def pre_stop_seconds(pod: Json) -> float:
    command = (
        pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    )
    assert command[0] == "sleep"
    return float(command[1])


def crd_schema() -> Json:
    versions = load_crd()["spec"]["versions"]
    (schema,) = (version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")
    return schema


def load_crd() -> Json:
    """The definition, made strict. Parsed once, because that takes seconds."""
    if not _CRD:
        _CRD.update(yaml.load(CRD.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        make_strict(_CRD["spec"])
    return _CRD


_CRD: Json = {}


def make_strict(node: Any) -> None:
    """Refuse unknown properties and drop requirements with defaults, like kubectl's strict validation."""
    if isinstance(node, list):
        for item in node:
            make_strict(item)
    if not isinstance(node, dict):
        return
    properties = node.get("properties")
    if node.get("type") == "object" and isinstance(properties, dict):
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            node.setdefault("additionalProperties", False)
        required = [name for name in node.get("required", []) if "default" not in properties.get(name, {})]
        node.pop("required", None)
        node |= {"required": required} if required else {}
    for value in node.values():
        make_strict(value)


def violations(instance: Any, schema: Json) -> list[str]:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(instance)
    return [f"{error.json_path}: {error.message}" for error in errors]


def compose() -> Json:
    return load(DOCKER / "compose.yaml")


def aliases_of(service: Json) -> list[str]:
    return service.get("networks", {}).get("default", {}).get("aliases", [])


def on_host(service: Json, path: str) -> Path:
    """The file of the repository that is mounted at a container's path."""
    mounts = dict(reversed(mount.split(":")[:2]) for mount in service["volumes"] if mount.startswith("."))
    for target, source in mounts.items():
        if Path(path).is_relative_to(target):
            return DOCKER / source / Path(path).relative_to(target)
    raise AssertionError(f"no mount of compose.yaml holds {path}")


def copied(dockerfile: Path) -> Iterator[str]:
    """Sources of COPY lines that come from the repository."""
    for line in dockerfile.read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            yield from (word for word in line.split()[1:-1] if not word.startswith("--"))


def sent_to_docker(ignore: Path) -> set[Path]:
    lines = ignore.read_text(encoding="utf-8").splitlines()
    assert "*" in lines  # everything except the named files is excluded
    return {Path(line[1:]) for line in lines if line.startswith("!")}


def ray_texts() -> Iterator[str]:
    """Shell scripts: code blocks of the recipe, commands of `ray up`, and the script."""
    yield from (DEPLOY / "ray/two-machines.md").read_text(encoding="utf-8").split("```")[1::2]
    commands = load(DEPLOY / "ray/cluster.yaml")
    yield from (*commands["head_start_ray_commands"], *commands["worker_start_ray_commands"])
    yield (DEPLOY / "ray/one-machine.sh").read_text(encoding="utf-8")


def ray_starts(text: str) -> Iterator[list[str]]:
    """The arguments of every `ray start` in a text."""
    joined = re.sub(r"\\?\n\s+(?=--)", " ", text)
    for command in re.findall(r"\bray start ([^\n;`]*--[^\n;`]*)", joined):
        yield shlex.split(command, comments=True)
