"""`python -m benchmarks.round_trip`: time of a plan from the router to its ranks and of the result back.

The plans have no rows, so only the transport between real ranks on Ray is measured. Printed are the median and 99th
percentile. The first line is a byte between two processes on separate cores, as the machine's own limit.
"""

import os
import socket
import tempfile
import time
from pathlib import Path

import ray

from cluster.config import AppConfig
from cluster.engine.executor import RayExecutor
from specray.step import StepPlan
from tests.chaos.ledger import quantile
from tests.support.toy import write_toy

NUM_WARM, NUM_TRIPS = 200, 5000
PAUSE_S = 0.002  # between two plans, so that ranks wait as they do after a real step


def main() -> None:
    report("a byte to another process and back", bare())
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        model = write_toy(Path(folder))
        for tp_size in (1, 2):
            report(f"router to ranks and back, TP {tp_size}", measure(str(model), tp_size))


def report(what: str, trips: list[float]) -> None:
    shown = ", ".join(f"p{share * 100:g} {1000 * (quantile(trips, share) or 0):.3f} ms" for share in (0.5, 0.99))
    print(f"{what}, {len(trips)} times: {shown}", flush=True)


def bare() -> list[float]:
    """Seconds of each round trip over a unix socket."""
    ours, theirs = socket.socketpair()
    cores = sorted(os.sched_getaffinity(0))
    if (child := os.fork()) == 0:
        ours.close()
        os.sched_setaffinity(0, {cores[-1]})
        while theirs.recv(1):
            theirs.send(b"x")
        os._exit(0)
    theirs.close()
    os.sched_setaffinity(0, {cores[0]})
    trips = []
    for _ in range(NUM_TRIPS):
        start = time.perf_counter()
        ours.send(b"x")
        ours.recv(1)
        trips.append(time.perf_counter() - start)
    ours.close()
    os.waitpid(child, 0)
    os.sched_setaffinity(0, cores)
    return trips


def measure(model: str, tp_size: int) -> list[float]:
    """Seconds of each round trip, without the ranks' own work."""
    options = {"model": model, "tp_size": tp_size, "device": "cpu", "dtype": "float32", "num_threads": 1}
    executor = RayExecutor(AppConfig.model_validate({**options, "max_total_tokens": 4096}))
    try:
        trips = []
        for number in range(NUM_WARM + NUM_TRIPS):
            start = time.perf_counter()
            executor.submit(StepPlan(number, [], [], []))
            result = executor.collect()
            trips.append(time.perf_counter() - start - sum(result.times))
            time.sleep(PAUSE_S)
        return trips[NUM_WARM:]
    finally:
        executor.close()


if __name__ == "__main__":
    main()
