"""Autoscaling: the number of Router replicas, from their queues and measured token rates.

`decide` is a pure function of the replicas' reports; `TokenRatePolicy` adapts it to Ray Serve's custom policies.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite
from typing import Any, NamedTuple

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.config import AutoscalingOptions
from specray.metrics import Snapshot

ROUNDING = 1e-9  # a load of 2.0 may be computed as slightly more


class Sample(NamedTuple):
    """One replica's report at one time. The last three fields are totals since it started."""

    at: float  # seconds
    num_waiting: float  # requests in its queue
    num_running: float  # requests it is running
    num_tokens: float  # tokens it generated
    busy_s: float  # seconds it spent in steps
    num_finished: float  # requests it finished


History = Mapping[str, Sequence[Sample]]  # samples of each running replica, in any order; empty for one without reports


class Trend(NamedTuple):
    """A change of the number of replicas that has been due without interruption."""

    since: float  # seconds
    num_replicas: int  # number after the smallest change due in that time


class Decision(NamedTuple):
    num_replicas: int
    trend: Trend | None  # pass to the next call


def decide(
    history: History, num_replicas: int, now: float, trend: Trend | None, options: AutoscalingOptions
) -> Decision:
    """The number of replicas to run, given that `num_replicas` was the last decision.

    A change is made once it has been due without interruption for `up_delay_s` or `down_delay_s`, by the smallest
    amount due in that time. The number therefore falls at most once per `down_delay_s`, and only to a number that
    was sufficient throughout.
    """
    current = min(max(num_replicas, options.min_replicas), options.max_replicas)
    desired = desired_replicas(history, current, now, options)
    if desired == current:
        return Decision(current, None)
    is_up = desired > current
    if trend is None or (trend.num_replicas > current) is not is_up:
        trend = Trend(now, desired)
    smallest = min(trend.num_replicas, desired) if is_up else max(trend.num_replicas, desired)
    if now - trend.since < (options.up_delay_s if is_up else options.down_delay_s):
        return Decision(current, Trend(trend.since, smallest))
    return Decision(smallest, None)


def desired_replicas(history: History, current: int, now: float, options: AutoscalingOptions) -> int:
    """The number of replicas that the reports of the last `window_s` seconds call for, without delays.

    Load in replicas = running / target_running
                     + min(waiting / target_running,                                            # start all now
                           waiting * tokens_per_request / (tokens_per_second * target_wait_s))  # within target_wait_s

    `running` and `waiting` are means over the window, summed over replicas. `tokens_per_request` is a mean since the
    replicas started, because no request may end within a window. `tokens_per_second` is a mean over the busy time of
    the window. Without a measured speed, only the length of the queue counts.

    The number rises if the load requires it. It falls if fewer replicas can carry the load plus `down_margin`, assuming
    that each running replica without usable reports is loaded to its target. Missing reports thus neither start nor
    stop replicas. A starting replica counts as idle. The result is within min_replicas and max_replicas.
    """
    recent = _recent(history, now, options.window_s)
    load = _load(recent, options)
    num_unknown = len(history) - len(recent)
    at_least = ceil(load - ROUNDING)
    at_most = ceil((load + num_unknown) * (1 + options.down_margin) - ROUNDING)
    desired = min(max(current, at_least), at_most) if recent else current
    return min(max(desired, options.min_replicas), options.max_replicas)


def _recent(history: History, now: float, window_s: float) -> list[list[Sample]]:
    """Usable samples by replica, oldest first. Clocks of nodes differ, so a sample's time may be in the future."""
    usable = (
        sorted(s for s in samples if all(isfinite(v) and v >= 0 for v in s) and abs(now - s.at) <= window_s)
        for samples in history.values()
    )
    return [samples for samples in usable if samples]


def _load(recent: Sequence[Sequence[Sample]], options: AutoscalingOptions) -> float:
    """Load in replicas, see `desired_replicas`."""
    running = sum(_mean(s.num_running for s in samples) for samples in recent)
    waiting = sum(_mean(s.num_waiting for s in samples) for samples in recent)
    queue = waiting / options.target_running
    if work_s := _seconds_per_request(recent):
        queue = min(queue, waiting * work_s / options.target_wait_s)
    return running / options.target_running + queue


def _seconds_per_request(recent: Sequence[Sequence[Sample]]) -> float | None:
    """Tokens per request / tokens per second of a busy replica; None if not measured."""
    num_tokens = sum(samples[-1].num_tokens for samples in recent)
    num_finished = sum(samples[-1].num_finished for samples in recent)
    tokens_now = sum(max(0.0, samples[-1].num_tokens - samples[0].num_tokens) for samples in recent)
    busy_now = sum(max(0.0, samples[-1].busy_s - samples[0].busy_s) for samples in recent)
    if not (num_finished and tokens_now and busy_now):
        return None
    return num_tokens / num_finished * busy_now / tokens_now


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def autoscaling_stats(snapshot: Snapshot) -> dict[str, float]:
    """The fields of a `Sample` except its time, as a replica's `record_autoscaling_stats` returns them to Serve."""
    return {
        "num_waiting": _total(snapshot, "specray_num_requests_waiting"),
        "num_running": _total(snapshot, "specray_num_requests_running"),
        "num_tokens": _total(snapshot, "specray_generation_tokens_total"),
        "busy_s": _total(snapshot, "specray_step_seconds_total"),
        "num_finished": _total(snapshot, "specray_request_finished_total"),
    }


def _total(snapshot: Snapshot, name: str) -> float:
    value = snapshot[name]
    if isinstance(value, dict):
        return sum(value.values())
    assert isinstance(value, int | float), name
    return float(value)


class TokenRatePolicy:
    """`decide` as a Serve policy. Serve's controller calls it several times a second."""

    def __init__(self, **options: Any) -> None:
        self._options = AutoscalingOptions(**options)

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        assert ctx.current_time is not None
        trend: Trend | None = ctx.policy_state.get("trend")
        history = _history(map(str, ctx.running_replicas), ctx.raw_metrics or {})
        decision = decide(history, ctx.target_num_replicas, ctx.current_time, trend, self._options)
        return decision.num_replicas, {"trend": decision.trend}


def serve_autoscaling(options: AutoscalingOptions) -> AutoscalingConfig:
    """The `autoscaling_config` of a deployment. Serve's delays are off, because `decide` applies its own."""
    return AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        look_back_period_s=options.window_s,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=TokenRatePolicy, policy_kwargs=options.model_dump()
        ),
    )


def _history(replicas: Iterable[str], raw_metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> History:
    """Convert Serve's time series, one per metric, to samples. Times without all metrics are skipped."""
    numbers: dict[str, dict[float, dict[str, float]]] = {replica: {} for replica in replicas}
    for name, by_replica in raw_metrics.items():
        for replica, series in by_replica.items():
            for point in series:
                numbers.setdefault(str(replica), {}).setdefault(point.timestamp, {})[name] = point.value
    names = Sample._fields[1:]
    return {
        replica: [
            Sample(at, *(values[name] for name in names))
            for at, values in by_time.items()
            if values.keys() >= set(names)
        ]
        for replica, by_time in numbers.items()
    }
