"""Processes of Ray actors: where they run, why they did not start or have ended, and how frozen ones are killed."""

import contextlib
import logging
import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from specray.errors import ConfigError, EngineDeadError, SpecRayError

logger = logging.getLogger("ray.serve")
CAUSE_S = 0.5  # for the actor that ended the others to be reported, too
MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"  # variable of processes that use an MPS daemon (`cluster.engine.mps`)
NVIDIA_SMI = "nvidia-smi"
SMI_TIMEOUT_S = 20.0  # without persistence mode, the driver takes seconds to start
RAY_EXIT_S = 1.0  # for a process that Ray ends, which takes milliseconds; Ray logs a failure if it is killed meanwhile


class Place(NamedTuple):
    """Where a process runs."""

    node_id: str
    address: str  # the node's in the Ray cluster
    pid: int
    gpus: tuple[str, ...] = ()  # numbers or UUIDs of the GPUs that it sees

    @classmethod
    def here(cls) -> Self:
        """The place of this process."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        gpus = tuple(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        return cls(ray.get_runtime_context().get_node_id(), address, os.getpid(), gpus)


def see_own_gpus() -> None:
    """Let this actor see the GPUs that Ray gave it and no others; call it before torch is imported.

    Ray does this itself, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set or the actor reserves none. Every
    rank would then take the first GPU of its node. With MPS they are named by UUID, because its daemon renumbers GPUs.
    """
    if ray.is_initialized():  # not in tests that call an actor's class
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        if os.environ.get(MPS_FOLDER):
            uuids = _gpu_uuids()
            gpus = [uuids.get(gpu, gpu) for gpu in gpus]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def start_error(what: str, error: RayError) -> SpecRayError:
    """The error to raise when `what` fails to start: the actor's own ConfigError, or else an EngineDeadError."""
    if not isinstance(error, RayTaskError):
        return EngineDeadError(f"{what} did not start: it {_end_of(error)}")
    cause = error.cause
    if isinstance(cause, ConfigError):
        return ConfigError(str(cause))
    return EngineDeadError(f"{what} did not start: {type(cause).__name__}: {cause}")


def exit_reason(names: Sequence[str], sentinels: "Sequence[ray.ObjectRef[Any]]", returned: str) -> str:
    """Which of some actors ended first, and why: "rank 1 of the target died".

    At least one of their endless tasks `sentinels` has ended. The end of an actor breaks the collectives of the others,
    which may be reported first. `returned` is the reason of a task that returned normally.
    """
    ends = _ends(names, sentinels)
    if all(_is_consequence(error) for _, error in ends) and len(ends) < len(sentinels):
        ray.wait(list(sentinels), num_returns=len(sentinels), timeout=CAUSE_S)
        ends = _ends(names, sentinels)
    name, end = min(ends, key=lambda each: _is_consequence(each[1]))
    match end:
        case None:
            return f"{name} {returned}"
        case RayTaskError(cause=SpecRayError() as cause):
            return f"{name} failed: {type(cause).__name__}: {cause}"
        case RayTaskError(cause=cause):  # messages of other errors may have paths and addresses
            return f"{name} failed: {type(cause).__name__}"
        case _:
            return f"{name} {_end_of(end)}"


def _gpu_uuids() -> dict[str, str]:
    """The UUID of each GPU of this node, by number; empty if nvidia-smi does not say."""
    if (program := shutil.which(NVIDIA_SMI)) is None:
        return {}
    query = [program, "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=SMI_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s does not answer: %s", NVIDIA_SMI, error)
        return {}
    return dict(re.findall(r"^(\d+), ((?:GPU|MIG)-\S+)$", said, re.MULTILINE))


def _ends(names: Sequence[str], sentinels: "Sequence[ray.ObjectRef[Any]]") -> list[tuple[str, RayError | None]]:
    """The name of each actor that has ended, and its error."""
    ended, _ = ray.wait(list(sentinels), num_returns=len(sentinels), timeout=0.0)
    ends: list[tuple[str, RayError | None]] = []
    for name, sentinel in zip(names, sentinels, strict=True):
        if sentinel in ended:
            try:
                ray.get(sentinel)
                ends.append((name, None))
            except RayError as error:
                logger.error("%s ended: %s", name, error)
                ends.append((name, error))
    return ends


def _is_consequence(error: RayError | None) -> bool:
    """Whether an actor may have ended because another one did: a collective failed, or its task returned."""
    return error is None or (isinstance(error, RayTaskError) and not isinstance(error.cause, SpecRayError))


def _end_of(error: RayError) -> str:
    """What Ray reports of a process that returned nothing. Its own message is long and has addresses."""
    match error:
        case OutOfMemoryError():
            return "was ended by Ray, because its node had no memory left"
        case RayActorError():
            return "died"
        case _:
            return f"was lost: {type(error).__name__}"


class Process:
    """Another process on this machine, held by a file descriptor so that a process that reuses its ID is not killed.

    Ray stops an actor by sending it a message, which a frozen process does not receive.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    @property
    def is_running(self) -> bool:
        """Whether it has neither ended nor been killed by `kill`."""
        return self._fd is not None and not self._has_ended(0.0)

    def kill(self, grace_s: float = 0.0) -> None:
        """Kill the process unless it ends within `grace_s` seconds. Idempotent."""
        if self._fd is None:
            return
        self._has_ended(grace_s)
        with contextlib.suppress(OSError):  # already ended
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        os.close(self._fd)
        self._fd = None

    def _has_ended(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for its end."""
        assert self._fd is not None
        ended = select.poll()
        ended.register(self._fd, select.POLLIN)
        return bool(ended.poll(1000 * timeout))
