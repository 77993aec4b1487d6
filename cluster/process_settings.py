"""Settings of the cluster's processes: log level, priority, garbage collection while they load, variables of Serve."""

import contextlib
import gc
import logging
import os
from collections.abc import Iterable, Iterator

# Variables that Serve reads on import. Ingresses and routers get them from `app`, Serve's proxy from where Ray is
# started.
#
# One event loop in each process. By default a replica has a thread for Serve's calls, one for our code and one for its
# calls to other deployments, and the proxy has two. Where all cores compute, each hand-over waits for a core. With one
# loop, 99 of 100 refusals at 20 times the capacity of two cores came within 37 instead of 48 ms (medians of several
# runs), for a seventh less CPU time each. The price is that code of ours that blocks also blocks Serve's calls, such as
# health checks. A process that calls a deployment must then do so from an event loop that lives as long as the process;
# the launcher has none and must not have these.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}

# The largest message by gRPC, in bytes. Replies with the log-probabilities of long prompts exceed Ray's limit of 4 MiB.
LARGE_MESSAGES = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1)}

LOG_LEVEL = "SPECRAY_LOG_LEVEL"  # carries the level to ranks and drafters
_LOGGERS = ("ray.serve", "cluster", "specray")
# The priority of processes that compute on a CPU is below that of proxy, ingress and router, which work for less than a
# millisecond at a time. Where all cores compute, each of them would otherwise wait for the end of a rank's time slice.
# At 20 times the capacity of two cores 99 of 100 refusals came within 48 ms instead of 116 ms by this alone (medians of
# several runs); goodput and the speed of one stream stayed the same.
NICENESS = "SPECRAY_NICENESS"  # carries the niceness to ranks and drafters
COMPUTING_NICENESS = 5


def most_verbose(levels: Iterable[str]) -> str:
    """The level that processes shared by several applications have."""
    return min(levels, key=lambda level: logging.getLevelNamesMapping()[level.upper()])


def set_log_level(level: str) -> None:
    """Set the level of this process's loggers; `level` is a name in lower case."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("ray.serve").addFilter(_is_readable)


def _is_readable(record: logging.LogRecord) -> bool:
    """False for messages of Serve that print its internal objects, which do not help operators."""
    return " object at 0x" not in record.getMessage()


def set_log_level_from_environment() -> None:
    """Set the level that the engine passed to this process, if it passed one."""
    if level := os.environ.get(LOG_LEVEL):
        set_log_level(level)


@contextlib.contextmanager
def frozen_garbage_collection() -> Iterator[None]:
    """Disable garbage collection within the block, and exclude all objects created in it from later collections.

    Collections would otherwise take a quarter of the import time, and later tenths of a second in single steps.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def lower_priority_from_environment() -> None:
    """Give this thread, and those it will start, the niceness that the engine passed to this process, if it did."""
    if niceness := os.environ.get(NICENESS):
        os.setpriority(os.PRIO_PROCESS, 0, max(int(niceness), os.getpriority(os.PRIO_PROCESS, 0)))
