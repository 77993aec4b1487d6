"""Metrics under the names that vLLM and SGLang document, with the values of our own."""

import asyncio

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from specray.metrics import METRICS
from specray.server.monitoring.metric_aliases import SGLANG, VLLM
from tests.support.scripted_server import Serve

# As https://docs.vllm.ai/en/stable/usage/metrics/ and SGLang's "Production Metrics" have them.
DOCUMENTED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:e2e_request_latency_seconds": "histogram",
    "sglang:prompt_tokens": "counter",
    "sglang:generation_tokens": "counter",
    "sglang:token_usage": "gauge",
    "sglang:cache_hit_rate": "gauge",
    "sglang:num_running_reqs": "gauge",
    "sglang:num_queue_reqs": "gauge",
    "sglang:spec_accept_length": "gauge",
    "sglang:time_to_first_token_seconds": "histogram",
    "sglang:e2e_request_latency_seconds": "histogram",
    "sglang:inter_token_latency_seconds": "histogram",
    "sglang:prompt_tokens_histogram": "histogram",
    "sglang:generation_tokens_histogram": "histogram",
    "sglang:spec_accept_rate": "gauge",
    "sglang:spec_verify_calls": "counter",
}
COMPUTED = {
    "sglang:cache_hit_rate",
    "sglang:spec_accept_length",
    "sglang:spec_accept_rate",
    "sglang:num_requests",
    "sglang:num_aborted_requests",
}
OURS = {metric.name.removesuffix("_total") for metric in METRICS}


def families_of(serve: Serve, is_on: bool) -> dict[str, Metric]:
    """All families after two requests that share a prefix."""

    async def scrape() -> dict[str, Metric]:
        async with serve(server={"metric_aliases": is_on}) as server:
            for _ in range(2):
                await server.http.post("/v1/completions", json={"prompt": "a" * 40, "max_tokens": 30})
            text = (await server.http.get("/metrics")).text
        return {family.name: family for family in text_string_to_metric_families(text)}

    return asyncio.run(scrape())


def values(family: Metric) -> list[tuple[str, float]]:
    """(suffix and bucket or further label, value) of each sample."""
    shared = ("replica", "engine", "model_name")
    return sorted(
        (
            sample.name.removeprefix(family.name)
            + str(sorted((k, v) for k, v in sample.labels.items() if k not in shared)),
            sample.value,
        )
        for sample in family.samples
    )


def test_aliases_are_exported_on_request_only(serve: Serve) -> None:
    assert families_of(serve, False).keys() == OURS
    assert families_of(serve, True).keys() > OURS


def test_aliases_have_the_documented_names_kinds_and_labels(serve: Serve) -> None:
    families = families_of(serve, True)
    for name, kind in DOCUMENTED.items():
        assert families[name].type == kind, name
        assert all(sample.labels["model_name"] == "toy" for sample in families[name].samples)


def test_aliases_have_the_values_of_our_metrics(serve: Serve) -> None:
    families = families_of(serve, True)
    for alias, source in (VLLM | SGLANG).items():
        name = alias.removesuffix("_total")
        if name not in COMPUTED:
            assert isinstance(source, str)
            assert values(families[name]) == values(families[source.removesuffix("_total")]), name
    computed = {name: families[name].samples[0].value for name in COMPUTED}
    assert computed["sglang:num_requests"] == 2
    assert computed["sglang:num_aborted_requests"] == 0
    assert computed["sglang:cache_hit_rate"] == 32 / 80
    steps = families["specray_verify_steps"].samples[0].value
    accepted = families["specray_spec_decode_num_accepted_tokens"].samples[0].value
    assert computed["sglang:spec_accept_length"] == 1 + accepted / steps > 1
