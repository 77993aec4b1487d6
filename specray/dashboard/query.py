"""Queries to a live Prometheus over its HTTP API."""

import json
import math
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from specray.errors import ConfigError

TIMEOUT_S = 30.0


class Series(NamedTuple):
    """One curve, without points that are not numbers."""

    labels: dict[str, str]
    times: list[float]  # seconds since 1970
    values: list[float]


def query_range(url: str, expression: str, start: float, end: float, step: float) -> list[Series]:
    """Series of an expression that have a number in this time. ConfigError if no server answers."""
    question = urlencode({"query": expression, "start": start, "end": end, "step": step})
    answer = _get(url, f"api/v1/query_range?{question}")
    series = [_series(item["metric"], item["values"]) for item in answer["data"]["result"]]
    return [one for one in series if one.values]


def _get(url: str, path: str) -> Any:
    try:
        # No proxy from the environment: this Prometheus is usually on the same machine.
        with build_opener(ProxyHandler({})).open(f"{url.rstrip('/')}/{path}", timeout=TIMEOUT_S) as reply:
            return json.load(reply)
    except HTTPError as error:
        raise ConfigError(f"{url} rejects the query: {error.read().decode(errors='replace')}") from None
    except (URLError, ValueError) as error:
        raise ConfigError(
            f"no Prometheus answers at {url} ({error}); start one with the prometheus.yaml of "
            "`specray dashboard --write`, or name another"
        ) from None


def _series(labels: dict[str, str], points: list[tuple[float, str]]) -> Series:
    numbers = [(time, float(value)) for time, value in points if math.isfinite(float(value))]
    return Series(labels, [time for time, _ in numbers], [value for _, value in numbers])
