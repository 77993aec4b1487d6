"""`python -m tests.figures.round_trip`: how long a plan takes from the router to its ranks and the result back.

Plans without rows, over real ranks on Ray: what is measured is the way, not the work. Median and 99th percentile.
"""

import tempfile
import time
from pathlib import Path

import ray

from cluster.config import AppConfig
from cluster.executor import RayExecutor
from specray.step import StepPlan
from tests.chaos.ledger import quantile
from tests.support.toy import write_toy

NUM_WARM, NUM_TRIPS = 200, 5000
PAUSE_S = 0.002  # between two plans: ranks are found waiting, as they are after a real step


def main() -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        model = write_toy(Path(folder))
        for tp_size in (1, 2):
            trips = measure(str(model), tp_size)
            shown = ", ".join(
                f"p{share * 100:g} {1000 * (quantile(trips, share) or 0):.3f} ms" for share in (0.5, 0.99)
            )
            print(f"router to ranks and back, TP {tp_size}, {len(trips)} plans: {shown}", flush=True)


def measure(model: str, tp_size: int) -> list[float]:
    """Seconds of each trip, what ranks worked on it subtracted."""
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
