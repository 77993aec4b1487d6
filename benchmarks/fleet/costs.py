"""The duration of a step, fitted to what was measured on a GPU."""

import re
from typing import NamedTuple

import numpy as np

from benchmarks.results import load
from specray.step import StepPlan

MACHINE = "NVIDIA H200"
TABLE = "Decode steps of an 8B model with random weights"
PLAIN_OR_CHAIN = re.compile(r"(?:plain|chain of (\d+), ([\d.]+) tokens a step)$")


class StepCosts(NamedTuple):
    """Seconds of a step: a constant, and a share for each row (a known token or a draft)."""

    constant: float
    per_row: float

    def seconds(self, plan: StepPlan) -> float:
        num_rows = sum(row.num_tokens + row.draft_limit.num_tokens for row in plan.rows)
        return self.constant + self.per_row * num_rows if num_rows else 0.0


def measured_costs(machine: str = MACHINE) -> StepCosts:
    """Least squares over the plain steps and chains of a machine in `benchmarks/results`. ValueError without any.

    A step of R requests with chains of N has R (N + 1) rows, and lasts R x tokens a step / tokens a second.
    """
    rows, seconds = [], []
    for result in (result for file in load().get(machine, []) for result in file.results):
        shape, requests = PLAIN_OR_CHAIN.match(result.row), re.match(r"(\d+) requests?$", result.column)
        if result.table.startswith(TABLE) and shape is not None and requests is not None:
            num_requests, num_drafts = int(requests[1]), int(shape[1] or 0)
            rows.append(num_requests * (num_drafts + 1))
            seconds.append(num_requests * float(shape[2] or 1.0) / result.value)
    if len(rows) < 2:
        raise ValueError(f"no steps of {machine} are in benchmarks/results")
    per_row, constant = np.polyfit(rows, seconds, 1)
    return StepCosts(float(constant), float(per_row))
