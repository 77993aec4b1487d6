"""Engine metrics under the names of vLLM and SGLang, for dashboards, alerts and autoscalers made for them.

An alias has the kind, the label, the value and the buckets of our metric. A mean or a share is computed from our
counters since the engine started. Their metrics without a counterpart here are not exported.
"""

from collections.abc import Callable

from specray.metrics import Snapshot, number
from specray.outputs import FinishReason

Source = str | Callable[[Snapshot], float]  # our metric of the same meaning, or what computes the value


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


VLLM: dict[str, Source] = {
    "vllm:num_requests_running": "specray_num_requests_running",
    "vllm:num_requests_waiting": "specray_num_requests_waiting",
    "vllm:kv_cache_usage_perc": "specray_kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc": "specray_kv_cache_usage_perc",  # its name until vLLM 0.9
    "vllm:prefix_cache_queries_total": "specray_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "specray_prefix_cache_hits_total",
    "vllm:num_preemptions_total": "specray_num_preemptions_total",
    "vllm:prompt_tokens_total": "specray_prompt_tokens_total",
    "vllm:generation_tokens_total": "specray_generation_tokens_total",
    "vllm:request_success_total": "specray_request_finished_total",
    "vllm:spec_decode_num_drafts_total": "specray_spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": "specray_spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "specray_spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "specray_spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:time_to_first_token_seconds": "specray_time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds": "specray_time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds": "specray_inter_token_latency_seconds",
    "vllm:request_prompt_tokens": "specray_request_prompt_tokens",
    "vllm:request_generation_tokens": "specray_request_generation_tokens",
    "vllm:prompt_tokens_cached_total": "specray_prefix_cache_hits_total",
    "vllm:request_queue_time_seconds": "specray_request_queue_time_seconds",
    "vllm:e2e_request_latency_seconds": "specray_e2e_request_latency_seconds",
}
SGLANG: dict[str, Source] = {
    "sglang:num_running_reqs": "specray_num_requests_running",
    "sglang:num_queue_reqs": "specray_num_requests_waiting",
    "sglang:token_usage": "specray_kv_cache_usage_perc",
    "sglang:cache_hit_rate": _cache_hit_rate,
    "sglang:spec_accept_length": accept_length,
    "sglang:prompt_tokens_total": "specray_prompt_tokens_total",
    "sglang:generation_tokens_total": "specray_generation_tokens_total",
    "sglang:cached_tokens_total": "specray_prefix_cache_hits_total",
    "sglang:num_requests_total": lambda snapshot: sum(_finished(snapshot).values()),
    "sglang:num_aborted_requests_total": lambda snapshot: _finished(snapshot)[FinishReason.ABORT],
    "sglang:time_to_first_token_seconds": "specray_time_to_first_token_seconds",
    "sglang:inter_token_latency_seconds": "specray_inter_token_latency_seconds",
    "sglang:request_time_per_output_token_seconds": "specray_time_per_output_token_seconds",
    "sglang:prompt_tokens_histogram": "specray_request_prompt_tokens",
    "sglang:generation_tokens_histogram": "specray_request_generation_tokens",
    "sglang:spec_accept_rate": _accept_rate,
    "sglang:spec_verify_calls_total": "specray_verify_steps_total",
    "sglang:num_retracted_requests_total": "specray_num_preemptions_total",
    "sglang:queue_time_seconds": "specray_request_queue_time_seconds",
    "sglang:e2e_request_latency_seconds": "specray_e2e_request_latency_seconds",
}
