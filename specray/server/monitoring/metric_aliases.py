"""Engine metrics under the names of vLLM and SGLang, for dashboards, alerts and autoscalers made for them.

An alias has the value and the buckets of our metric. A mean or a share is computed from our counters since the engine
started. Their metrics without a counterpart here are not exported.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specray.metrics import METRICS, HistogramSnapshot, Snapshot, labelled, number
from specray.outputs import FinishReason

_HELP = {metric.name: metric.help for metric in METRICS}
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Alias(NamedTuple):
    """One of their metrics. `source` is our metric of the same meaning, or computes the value from a snapshot."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    source: str | Callable[[Snapshot], float]
    label: str | None = None  # besides those of every series


def _cache_hit_rate(snapshot: Snapshot) -> float:
    queries = number(snapshot, "specray_prefix_cache_queries_total")
    return number(snapshot, "specray_prefix_cache_hits_total") / queries if queries else 0.0


def accept_length(snapshot: Snapshot) -> float:
    """Tokens per verify step since the engine started; 0 before the first one, as in SGLang."""
    steps = number(snapshot, "specray_verify_steps_total")
    accepted = number(snapshot, "specray_spec_decode_num_accepted_tokens_total")
    return 1 + accepted / steps if steps else 0.0


def _accept_rate(snapshot: Snapshot) -> float:
    drafted = number(snapshot, "specray_spec_decode_num_draft_tokens_total")
    return number(snapshot, "specray_spec_decode_num_accepted_tokens_total") / drafted if drafted else 0.0


def _finished(snapshot: Snapshot) -> dict[str, float]:
    counts = snapshot["specray_request_finished_total"]
    assert isinstance(counts, dict)
    return counts


VLLM = (
    Alias("vllm:num_requests_running", "gauge", "specray_num_requests_running"),
    Alias("vllm:num_requests_waiting", "gauge", "specray_num_requests_waiting"),
    Alias("vllm:kv_cache_usage_perc", "gauge", "specray_kv_cache_usage_perc"),
    Alias("vllm:gpu_cache_usage_perc", "gauge", "specray_kv_cache_usage_perc"),  # its name until vLLM 0.9
    Alias("vllm:prefix_cache_queries_total", "counter", "specray_prefix_cache_queries_total"),
    Alias("vllm:prefix_cache_hits_total", "counter", "specray_prefix_cache_hits_total"),
    Alias("vllm:num_preemptions_total", "counter", "specray_num_preemptions_total"),
    Alias("vllm:prompt_tokens_total", "counter", "specray_prompt_tokens_total"),
    Alias("vllm:generation_tokens_total", "counter", "specray_generation_tokens_total"),
    Alias("vllm:request_success_total", "counter", "specray_request_finished_total", "finished_reason"),
    Alias("vllm:spec_decode_num_drafts_total", "counter", "specray_spec_decode_num_drafts_total"),
    Alias("vllm:spec_decode_num_draft_tokens_total", "counter", "specray_spec_decode_num_draft_tokens_total"),
    Alias("vllm:spec_decode_num_accepted_tokens_total", "counter", "specray_spec_decode_num_accepted_tokens_total"),
    Alias(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "specray_spec_decode_num_accepted_tokens_per_pos_total",
        "position",
    ),
    Alias("vllm:time_to_first_token_seconds", "histogram", "specray_time_to_first_token_seconds"),
    Alias("vllm:request_time_per_output_token_seconds", "histogram", "specray_time_per_output_token_seconds"),
    Alias("vllm:inter_token_latency_seconds", "histogram", "specray_inter_token_latency_seconds"),
    Alias("vllm:request_prompt_tokens", "histogram", "specray_request_prompt_tokens"),
    Alias("vllm:request_generation_tokens", "histogram", "specray_request_generation_tokens"),
    Alias("vllm:prompt_tokens_cached_total", "counter", "specray_prefix_cache_hits_total"),
    Alias("vllm:request_queue_time_seconds", "histogram", "specray_request_queue_time_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "histogram", "specray_e2e_request_latency_seconds"),
)
SGLANG = (
    Alias("sglang:num_running_reqs", "gauge", "specray_num_requests_running"),
    Alias("sglang:num_queue_reqs", "gauge", "specray_num_requests_waiting"),
    Alias("sglang:token_usage", "gauge", "specray_kv_cache_usage_perc"),
    Alias("sglang:cache_hit_rate", "gauge", _cache_hit_rate),
    Alias("sglang:spec_accept_length", "gauge", accept_length),
    Alias("sglang:prompt_tokens_total", "counter", "specray_prompt_tokens_total"),
    Alias("sglang:generation_tokens_total", "counter", "specray_generation_tokens_total"),
    Alias("sglang:cached_tokens_total", "counter", "specray_prefix_cache_hits_total"),
    Alias("sglang:num_requests_total", "counter", lambda snapshot: sum(_finished(snapshot).values())),
    Alias("sglang:num_aborted_requests_total", "counter", lambda snapshot: _finished(snapshot)[FinishReason.ABORT]),
    Alias("sglang:time_to_first_token_seconds", "histogram", "specray_time_to_first_token_seconds"),
    Alias("sglang:inter_token_latency_seconds", "histogram", "specray_inter_token_latency_seconds"),
    Alias("sglang:request_time_per_output_token_seconds", "histogram", "specray_time_per_output_token_seconds"),
    Alias("sglang:prompt_tokens_histogram", "histogram", "specray_request_prompt_tokens"),
    Alias("sglang:generation_tokens_histogram", "histogram", "specray_request_generation_tokens"),
    Alias("sglang:spec_accept_rate", "gauge", _accept_rate),
    Alias("sglang:spec_verify_calls_total", "counter", "specray_verify_steps_total"),
    Alias("sglang:num_retracted_requests_total", "counter", "specray_num_preemptions_total"),
    Alias("sglang:queue_time_seconds", "histogram", "specray_request_queue_time_seconds"),
    Alias("sglang:e2e_request_latency_seconds", "histogram", "specray_e2e_request_latency_seconds"),
)


class AliasCollector(Collector):
    """Exposes snapshots, by replica, under their names. `engine` is the replica, `model_name` the served model."""

    def __init__(self, snapshots: Mapping[str, Snapshot], model_name: str) -> None:
        self._snapshots = snapshots
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for alias in (*VLLM, *SGLANG):
            yield self._family(alias)

    def _family(self, alias: Alias) -> Metric:
        text = _HELP[alias.source] if isinstance(alias.source, str) else "Computed since the engine started."
        labels = ["model_name", "engine", *([alias.label] if alias.label else [])]
        family: Any = _FAMILIES[alias.kind](alias.name, text, labels=labels)
        for replica, snapshot in self._snapshots.items():
            value = snapshot[alias.source] if isinstance(alias.source, str) else alias.source(snapshot)
            series = [self._model_name, replica]
            if isinstance(value, HistogramSnapshot):
                family.add_metric(series, buckets=value.cumulative(), sum_value=value.total)
                continue
            for label_value, count in labelled(value):
                family.add_metric([*series, label_value] if alias.label else series, count)
        metric: Metric = family
        return metric
