"""What Ray says of an actor, in our words: where it runs, why it did not start, how it has ended."""

import logging
import os
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import RayActorError, RayTaskError

from specray.errors import ConfigError, EngineDeadError

logger = logging.getLogger("ray.serve")


class Place(NamedTuple):
    """Where a process has come to run."""

    node_id: str
    address: str  # of the node, as the other nodes know it
    pid: int

    @classmethod
    def here(cls) -> Self:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return cls(ray.get_runtime_context().get_node_id(), address, os.getpid())


def start_error(what: str, error: RayTaskError) -> Exception:
    """The actor's own ConfigError where there is one: its text says what to change."""
    cause = error.cause
    if isinstance(cause, ConfigError):
        return ConfigError(str(cause))
    return EngineDeadError(f"{what} did not start: {type(cause).__name__}: {cause}")


def exit_reason(what: str, sentinel: "ray.ObjectRef[Any]", ended: str) -> str:
    """How the never-ending task of an actor has come to its end; `ended` says what it means that it returned."""
    try:
        ray.get(sentinel)
    except RayTaskError as error:
        logger.error("%s failed: %s", what, error)
        return f"failed: {type(error.cause).__name__}"
    except RayActorError:
        return "died"
    return ended
