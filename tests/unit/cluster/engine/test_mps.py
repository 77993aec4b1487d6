"""The MPS daemon of an engine, with a program that stands for NVIDIA's: none of this has run on a GPU."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.config import AppConfig
from cluster.engine import mps
from cluster.engine.executor import RayExecutor
from cluster.engine.mps import ANOTHER, IN_USE, MpsDaemon, reason_not_started, terminate_client
from cluster.engine.placement import decide_device
from tests.support.fake_mps import SERVER, UUIDS, FakeMps, has_ended

COLOCATED = {"device": "cuda", "speculative": {"algorithm": "NGRAM"}, "draft": {"placement": "colocated"}}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    fake = FakeMps(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path)
    return fake


@pytest.fixture
def daemon(fake: FakeMps, tmp_path: Path) -> Iterator[MpsDaemon]:
    with contextlib.closing(MpsDaemon(tmp_path)) as daemon:
        assert daemon.start(UUIDS) == IN_USE
        yield daemon
    assert fake.commands[-1] == "quit -t 5"


def test_a_daemon_has_folders_of_its_own_and_names_gpus_by_uuid(
    fake: FakeMps, daemon: MpsDaemon, tmp_path: Path
) -> None:
    pipes, logs = tmp_path / "mps", tmp_path / "mps-log"
    assert daemon.pipes == str(pipes)
    assert fake.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        "CUDA_MPS_LOG_DIRECTORY": str(logs),
        "CUDA_VISIBLE_DEVICES": ",".join(UUIDS),
    }
    assert [folder.stat().st_mode & 0o777 for folder in (pipes, logs)] == [0o700, 0o700]


def test_a_process_is_released_at_its_server(fake: FakeMps, daemon: MpsDaemon) -> None:
    terminate_client(daemon.pipes, 77)
    assert fake.commands[-2:] == ["get_server_list", f"terminate_client {SERVER} 77"]


def test_closing_ends_the_daemon(fake: FakeMps, daemon: MpsDaemon) -> None:
    process = fake.daemon()
    daemon.close()
    assert has_ended(process, 0.0)


def test_a_daemon_that_does_not_quit_is_killed(fake: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "END_TIMEOUT_S", 1)
    (fake.folder / "deaf").touch()
    daemon = MpsDaemon(tmp_path)
    daemon.start(UUIDS)
    process = fake.daemon()
    daemon.close()
    assert fake.commands[-1] == "quit -t 1"
    assert has_ended(process)


def test_a_daemon_ends_with_the_process_that_started_it(fake: FakeMps, tmp_path: Path) -> None:
    """Also if that one is killed, and Ray kills its children first."""
    script = (
        "import pathlib; from cluster.engine.mps import MpsDaemon; from tests.support import fake_mps; "
        f"daemon = MpsDaemon(pathlib.Path({str(tmp_path)!r})); print(daemon.start(fake_mps.UUIDS), flush=True); "
        "input(); fake_mps.die_as_ray_does()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == f"{IN_USE}\n"
        process = fake.daemon()
        assert process.is_running()
        owner.communicate("\n")
    assert has_ended(process)
    assert fake.commands[-1] == "quit -t 5"


def test_an_engine_runs_without_a_daemon_that_does_not_start(
    fake: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mps, "START_TIMEOUT_S", 0.2)
    (fake.folder / "broken").touch()
    with contextlib.closing(MpsDaemon(tmp_path)) as daemon:
        assert daemon.start(UUIDS) == "nvidia-cuda-mps-control has not started"
        terminate_client(daemon.pipes, 77)
    assert "not permitted" in caplog.text
    assert fake.commands == []


def test_a_daemon_that_does_not_answer_leaves_no_pipes(
    fake: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(mps, "END_TIMEOUT_S", 1)
    (fake.folder / "mute").touch()
    with contextlib.closing(MpsDaemon(tmp_path)) as daemon:
        assert daemon.start(UUIDS) == "nvidia-cuda-mps-control has not started"
    assert (fake.folder / "environment").exists()  # it did start
    assert list(Path(daemon.pipes).iterdir()) == []


def test_an_engine_runs_without_a_daemon_if_its_gpus_have_no_uuids(fake: FakeMps, tmp_path: Path) -> None:
    with contextlib.closing(MpsDaemon(tmp_path)) as daemon:
        assert daemon.start(["0", UUIDS[1]]) == "nvidia-smi gave no UUIDs"
    assert fake.commands == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"draft": {"placement": "colocated", "mps": "off"}}, "draft.mps: off"),
        ({"draft": {"placement": "separate"}}, "no drafter shares a rank's GPU"),
        ({"draft": {"placement": "auto"}}, "no drafter shares a rank's GPU"),  # inline
        ({"draft": {"placement": "auto"}, "server": {"admin_key_file": "/keys"}}, ""),
        ({"device": "cpu"}, "no drafter shares a rank's GPU"),
        ({"speculative": {}}, "no drafter shares a rank's GPU"),
        ({"tp_size": 2, "placement": {"across_nodes": True}}, "placement.across_nodes: a daemon serves one node"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_a_daemon_is_for_drafters_that_share_a_gpu_of_one_node(options: dict[str, object], reason: str) -> None:
    config = decide_device(AppConfig.model_validate(COLOCATED | options))
    assert reason_not_started(config, {}) == reason


@pytest.mark.usefixtures("fake")
def test_a_daemon_yields_to_one_that_runs(daemon: MpsDaemon) -> None:
    config = AppConfig.model_validate(COLOCATED)
    assert reason_not_started(config, {"CUDA_MPS_PIPE_DIRECTORY": daemon.pipes}) == ANOTHER
    assert reason_not_started(config, {"CUDA_MPS_PIPE_DIRECTORY": "/elsewhere"}) == ""


def test_a_daemon_needs_its_program(fake: FakeMps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AppConfig.model_validate(COLOCATED)
    (fake.folder / "nvidia-cuda-mps-control").unlink()
    monkeypatch.setenv("PATH", str(fake.folder))
    assert reason_not_started(config, {}) == "nvidia-cuda-mps-control not found on this node"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason_not_started(config, {}) == "nvidia-cuda-mps-control and nvidia-smi not found on this node"


@pytest.mark.parametrize(("mps", "shares_memory"), [(IN_USE, True), (ANOTHER, True), ("draft.mps: off", False)])
def test_drafters_exchange_trees_in_memory_only_with_a_daemon(mps: str, shares_memory: bool) -> None:
    """A target that waits on the GPU would otherwise hold it."""
    engine = object.__new__(RayExecutor)
    engine._folder, engine._epoch, engine.mps = SimpleNamespace(name="/run"), 1, mps  # type: ignore[assignment]
    draft = {"placement": "colocated", "cuda_ipc": True}
    assert engine._endpoint(AppConfig.model_validate(COLOCATED | {"draft": draft})).uses_cuda_ipc == shares_memory
    assert not engine._endpoint(AppConfig.model_validate(COLOCATED)).uses_cuda_ipc
