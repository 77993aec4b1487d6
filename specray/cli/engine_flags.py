"""What users of SGLang and vLLM bring along: flags that SpecRay does not have, and SGLang's environment variables.

One table answers the flags with what to use instead, or why there is nothing, because a flag that looks similar may do
something else. `docs/migrating.md` explains the common ones. Flags that SpecRay has under the same name are not here:
`cluster.cli.flags` makes them of the configuration.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from specray import unsupported_options
from specray.config import EngineConfig
from specray.errors import ConfigError

SPEC_V2 = "SGLANG_ENABLE_SPEC_V2"  # variables of SGLang's page on speculative decoding
FORCE_GREEDY = "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"
_SWITCH = {"true": True, "1": True, "yes": True, "y": True, "false": False, "0": False, "no": False, "n": False}
# Answer -> the flags, without leading dashes, as patterns; the first answer that has a flag is its answer.
ANSWERS: dict[str, str] = {
    # Another name.
    "use --server-num-replicas: engines, each with its own ranks": "data-parallel-size dp-size -dp",
    "use --tp-size": "-tp",
    "use --quantization": "-q",
    "use --mem-fraction-static": "gpu-memory-utilization device-memory-utilization",
    "use --max-running-requests": "max-num-seqs max-num-active-seqs",
    "use --max-queued-requests": "max-num-queued-*",
    "use --max-prefill-tokens, which counts prompt tokens only": "max-num-batched-tokens max-num-scheduled-tokens",
    "use --mixed-prefill-tokens: half of it, while other requests decode": "long-prefill-token-threshold*",
    "use --page-size": "block-size",
    "use --max-total-tokens, in tokens": "num-gpu-blocks-override kv-cache-memory-bytes",
    "use --disable-radix-cache to turn the prefix cache off; it is on by default": "enable-prefix-caching",
    "use --server-api-key-file: a file of keys with a name for each client": "api-key",
    "use --server-admin-key-file: a file of keys with a name for each operator": "admin-api-key",
    "use --server-cors-origins": "allowed-origins",
    "use --server-step-timeout-s": "watchdog-timeout soft-watchdog-timeout watchdog-config",
    "use --server-drain-s": "shutdown-timeout",
    "use --server-stream-interval-ms, in milliseconds": "stream-interval incremental-streaming-output",
    "use --server-log-level": "uvicorn-log-level log-level-http",
    "use --server-access-log, which is off by default; it never has prompts or answers": (
        "enable-log-requests log-requests* disable-uvicorn-access-log enable-log-outputs "
        "enable-log-deltas max-log-len disable-access-log-for-endpoints uvicorn-access-log-exclude-prefixes"
    ),
    "use --server-log-interval-s": "disable-log-stats decode-log-interval",
    "use --server-metric-aliases for the names of vLLM's and SGLang's metrics; /metrics is always on": "enable-metrics",
    "use --server-otlp-traces-endpoint": "enable-trace otlp-service-name collect-detailed-traces trace-modules",
    "use the field seed of a request; each reply returns the seed that was used": "seed random-seed",
    "use --disable-cuda-graph": "enforce-eager disable-*cuda-graph",
    "use --cuda-graph-max-bs": (
        "cuda-graph-max-bs-* max-cudagraph-capture-size cudagraph-capture-sizes cuda-graph-bs-* cuda-graph-config -cc"
    ),
    "use --enable-torch-compile": "compilation-config optimization-level",
    "use --deterministic, for GPUs; the CPU kernels are always deterministic": (
        "enable-deterministic-inference rl-on-policy-target"
    ),
    "use --attention-backend": (
        "prefill-attention-backend decode-attention-backend attention-config -ac triton-attention-* sampling-backend "
        "linear-backend"
    ),
    "use --moe-runner-backend": "moe-backend",
    "use --speculative-verification rejection": "speculative-use-rejection-sampling",
    "use --speculative-draft-model-path": "speculative-draft-model spec-model",
    "use --speculative-algorithm": "spec-method",
    "use --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens": "spec-tokens",
    "use --speculative-num-draft-tokens, which counts the known token, too": "speculative-dflash-block-size",
    "use the flags --speculative-*: docs/migrating.md lists its keys": "speculative-config -sc",
    "use --speculative-budget, which adapts the trees by default": "speculative-adaptive*",
    "use --hf-overrides": "model-class-overrides",
    "use --server-generation-config: whether the model's defaults apply": "generation-config sampling-defaults",
    "use --server-response-store-mib": "enable-response-store file-storage-path",
    "use --disable-overlap-schedule to turn it off; it is on by default": "async-scheduling",
    "use --address to join a Ray cluster, and --placement-across-nodes": (
        "nnodes node-rank headless master-* dist-init-addr nccl-init-addr nccl-port use-ray -n -r "
        "distributed-executor-backend data-parallel-backend"
    ),
    "not supported: ranks share every layer; use --tp-size": "pipeline-parallel-size pp-* -pp",
    "use --device, and the variable CUDA_VISIBLE_DEVICES": "device-ids base-gpu-id gpu-id-step",
    "give the file as the first argument: specray serve FILE": "config",
    "set route_prefix in FILE": "root-path fastapi-root-path",
    "set http_options.ssl_keyfile_password in FILE": "ssl-keyfile-password",
    "set the variable HF_HOME": "download-dir",
    "set the variable HF_TOKEN": "hf-token",
    "set the variable OMP_NUM_THREADS or --num-threads; processes are pinned by numactl": "numa-*",
    # Not needed.
    "not needed: prompts are always processed in chunks beside decoding requests, see --chunked-prefill-size": (
        "enable-chunked-prefill enable-mixed-chunk enable-dynamic-chunking"
    ),
    "not needed: tools always work": "enable-auto-tool-choice exclude-tools-when-tool-choice-none",
    "not needed: grammars are compiled by llguidance, see docs/structured-output.md": (
        "grammar-backend structured-outputs-config constrained-json-*"
    ),
    "not needed: the server is ready once it has generated a token": "skip-server-warmup warmups",
    "not needed: usage and per-request figures (`metrics`) are in every reply": (
        "enable-prompt-tokens-details enable-cache-report enable-per-request-metrics enable-force-include-usage "
        "per-request-spec-decode-metrics"
    ),
    "not needed: requests start by priority, age and fair shares of the tenants, and may be preempted": (
        "schedule-* scheduling-policy *-priority-* priority-*"
    ),
    "not needed: the HTTP server runs in processes of its own; see --server-num-ingress-replicas": (
        "api-server-count tokenizer-worker-num"
    ),
    "not needed: all metrics are always exported; see docs/operating.md": "*metrics* bucket-* *-buckets",
    # Not supported.
    "not supported: adapters (LoRA); serve the merged model": "*lora*",
    "not supported: models take and give text only": "mm-* *-mm-* *multimodal* *media* *image* *video* language-*",
    "not supported: models generate; no embeddings, no scores": "pooler-config is-embedding convert runner",
    "not supported: prefill and decode run on the same engine": "disaggregation-* kv-transfer-config ec-* enable-pd*",
    "not supported: KV and weights stay in one memory": "*offload* *hicache* *hierarchical* *lmcache*",
    "not supported: every rank holds a part of each expert": "*eplb* *expert* *-ep-* ep-* ep -ep *deepep* *a2a*",
    "not supported: a context is not split over ranks": "*context-parallel* *-cp-* cp-* *dcp-* attn-cp-size",
    "not supported: no plug-ins, and no code from a model's folder, are run": (
        "*-plugin *-cls middleware logits-processors enable-custom-logit-processor"
    ),
    "not supported: no gRPC or HTTP/2 server; run the front proxy of deploy/haproxy": "*grpc* enable-http2 http2-*",
    "not supported: run the front proxy of deploy/haproxy": "ssl-* enable-ssl-refresh h11-*",
    "not supported: the tokenizer is the model's": "tokenizer tokenizer-* skip-tokenizer-init completion-template",
    "not supported: requests name the variables of the template (chat_template_kwargs)": (
        "default-chat-template-kwargs chat-template-content-format"
    ),
    "not supported: convert the checkpoint beforehand": "modelopt-* quantize-and-serve quantization-config",
    "not supported: this drafting method; see docs/drafting.md": "speculative-* decoupled-spec-* uno-*",
    "not needed or not supported: nothing in SpecRay corresponds to it": "*",
}


@cache
def flags_of_engines() -> dict[str, list[str]]:
    """The flags that the parsers of each engine accept, read from its published package."""
    names: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return names


def answer(flag: str) -> str | None:
    """What to do instead of a flag of SGLang or vLLM that SpecRay does not have; None for any other flag.

    Accepts vLLM's spellings with underscores and with `--no-`.
    """
    name = flag.replace("_", "-")
    for spelling in (name, name.replace("--no-", "--", 1)):
        if any(spelling in flags for flags in flags_of_engines().values()):
            bare = spelling.removeprefix("--")
            answers = (text for text, patterns in ANSWERS.items() if _names(patterns, bare))
            return next(answers, None)
    return None


def _names(patterns: str, flag: str) -> bool:
    return any(fnmatchcase(flag, pattern) for pattern in patterns.split())


def check_sglang_environment(environment: Mapping[str, str], apps: Sequence[EngineConfig]) -> Iterator[str]:
    """A warning for every SGLANG_* variable that has no effect.

    Raises ConfigError for a variable that asks for something that an application does not do.
    """
    for name in sorted(name for name in environment if name.startswith("SGLANG_")):
        if name not in (SPEC_V2, FORCE_GREEDY):
            yield f"{name} is set but not read; configure SpecRay with flags or a file"
            continue
        is_on = _is_on(name, environment[name])
        if name == SPEC_V2 and any(app.disable_overlap_schedule == is_on for app in apps):
            yield f"{name}={environment[name]} is not applied; set --disable-overlap-schedule {str(not is_on).lower()}"
        drafters = [drafter for app in apps for drafter in app.speculative.members.values()]
        if name == FORCE_GREEDY and is_on and any(drafter.algorithm == "NGRAM" for drafter in drafters):
            raise unsupported_options.NGRAM_FORCE_GREEDY_VERIFY.error(name, True)


def _is_on(name: str, value: str) -> bool:
    is_on = _SWITCH.get(value.lower())
    if is_on is None:
        raise ConfigError(f"{name}={value!r} is neither true nor false; set it to one of them or unset it")
    return is_on
