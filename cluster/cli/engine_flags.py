"""Flags of SGLang's and vLLM's servers that SpecRay does not have: what to use instead, or why there is none.

One table answers for all of them, because a flag that looks similar may do something else. `docs/migrating.md` explains
the common ones. Flags that SpecRay has under the same name are not here: `flags` makes them of the configuration.
"""

import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

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
        "enable-chunked-prefill enable-mixed-chunk enable-dynamic-chunking scheduler-reserve-full-isl"
    ),
    "not needed: tools always work": "enable-auto-tool-choice exclude-tools-when-tool-choice-none",
    "not needed: grammars are compiled by llguidance, see docs/structured-output.md": (
        "grammar-backend structured-outputs-config constrained-json-* disable-outlines-disk-cache"
    ),
    "not needed: all methods and headers are allowed for the origins of --server-cors-origins": (
        "allowed-methods allowed-headers allow-credentials"
    ),
    "not needed: the server is ready once it has generated a token": "skip-server-warmup warmups",
    "not needed: usage and per-request figures are in every reply": (
        "enable-prompt-tokens-details enable-cache-report enable-per-request-metrics enable-force-include-usage "
        "per-request-spec-decode-metrics stream-response-default-include-usage return-input-ids return-output-ids "
        "return-tokens-as-token-ids enable-request-id-headers enable-server-load-tracking show-time-cost "
        "enable-tokenizer-info-endpoint enable-request-time-stats-logging"
    ),
    "not needed: docs/api.md has the limits of requests": "max-logprobs logprobs-mode",
    "not needed: requests start by age and fair shares of the tenants, and may be preempted": (
        "schedule-* scheduling-policy *-priority-* priority-* retraction-policy prefill-delayer-* "
        "enable-prefill-delayer "
        "prefill-max-requests prefill-decode-interval* prefill-schedule-interval num-continuous-decode-steps "
        "min-free-slots-delay scheduler-recv-interval num-reserved-decode-tokens "
        "watermark* enable-watermark optimistic-prefill-attempts context-bucket batch-notify-size"
    ),
    "not needed: the HTTP server runs in processes of its own; see --server-num-ingress-replicas": (
        "api-server-count tokenizer-worker-num detokenizer-worker-num renderer-num-workers "
        "enable-http-worker-reuseport "
        "*dynamic-batch-tokenizer* enable-tokenizer-batch-encode disable-tokenizer-batch-decode "
        "load-balance-method data-parallel-* -dp? dp-* enable-dp-* disable-nccl-for-dp-* attn-dp-size "
        "attention-data-parallel-size enable-attn-tp-* disable-attn-tp-gather"
    ),
    "not needed: prefixes are shared by blocks of --page-size tokens, and the least recently used go first": (
        "radix-* prefix-* prefix-caching-hash-algo disable-chunked-prefix-cache *session-radix-cache swa-* "
        "disable-hybrid-* disable-sliding-window enable-*-swa-bounded-replay disable-cascade-attn "
        "enable-streaming-session"
    ),
    "not needed: a file's format is recognized": "config-format model-impl model-config-parser tokenizer-backend",
    "not needed: weights are mapped from safetensors": (
        "safetensors-* weight-loader-* model-loader-extra-config use-tqdm-on-load ignore-patterns pt-load-map-location "
        "delete-ckpt-after-loading max-parallel-loading-workers startup-weight-load-mode weight-cache-* "
        "model-checksum weight-version"
    ),
    "not needed: garbage collection is frozen after the start": "gc-* enable-cudagraph-gc",
    # Not supported.
    "not supported: adapters (LoRA); serve the merged model": "*lora*",
    "not supported: models take and give text only": (
        "mm-* *-mm-* *multimodal* *media* image-processor-backend *image* *video* *encoder* language-* asr-* "
        "*precise-embedding-interpolation"
    ),
    "not supported: models generate; no embeddings, no scores": (
        "pooler-config is-embedding convert runner enable-mis enable-prompt-embeds *flash-late-interaction "
        "io-processor-plugin prefill-only-disable-kv-cache"
    ),
    "not supported: no state-space or linear-attention layers": (
        "*mamba* *replayssm* gdn-* kda-* linear-* *scattered-sconv"
    ),
    "not supported: prefill and decode run on the same engine": (
        "disaggregation-* kv-transfer-config kv-events-config ec-* enable-pd* pdmux-* mooncake-* engine-info-* "
        "*enable-pd-* kv-sharing-fast-prefill"
    ),
    "not supported: KV and weights stay in one memory": (
        "*offload* *hicache* *hierarchical* *hisparse* *lmcache* *flexkv* kv-offloading-* *memory-saver *unified-* "
        "kt-* *paged-experts* ple-* kv-cache-* enable-kv-cache-* *page-major* cpu-offload-* *external-linker* "
        "enable-*-cpu-backup enable-cumem-allocator engram-config"
    ),
    "not supported: every rank holds a part of each expert": (
        "*eplb* fuseep-mode *expert* *-ep-* *elastic-ep* ep-* ep -ep *deepep* all2all-backend *moe-* *moe dwdp-size "
        "enable-waterfill *megamoe* *a2a* enable-two-batch-overlap enable-single-batch-overlap tbo-* enable-dbo "
        "dbo-* ubatch-size"
    ),
    "not supported: a context is not split over ranks": (
        "*context-parallel* *-cp-* cp-* *dcp-* -pcp -dcp attn-cp-size enable-prefill-cp enable-layernorm-sp "
        "enable-hc-sp"
    ),
    "not supported: no plug-ins, and no code from a model's folder, are run": (
        "*-plugin *-cls -asc middleware logits-processors custom-weight-loader enable-custom-logit-processor "
        "forward-hooks scheduler-cls additional-config"
    ),
    "not supported: weights change by a restart; drafters by POST /admin/drafter": (
        "*sleep* *weight-transfer* checkpoint-engine-* remote-instance-* *elastic* fault-tolerance-config "
        "enable-fault-tolerance modelexpress-config"
    ),
    "not supported: no diffusion language models": "dllm-* diffusion-config -dc",
    "not supported: no gRPC or HTTP/2 server; run the front proxy of deploy/haproxy": (
        "*grpc* smg-* enable-http2 http2-* uds"
    ),
    "not supported: run the front proxy of deploy/haproxy": "ssl-* enable-ssl-refresh h11-* gated-launch-port sidecar*",
    "not supported: the tokenizer is the model's": (
        "tokenizer tokenizer-path tokenizer-mode tokenizer-revision skip-tokenizer-init tokens-only code-revision "
        "hf-config-path hf-chat-template-name completion-template decrypted-*-file"
    ),
    "not supported: requests name the variables of the template (chat_template_kwargs)": (
        "default-chat-template-kwargs chat-template-content-format trust-request-* response-role reasoning-effort-map"
    ),
    "not supported: the reasoning parser is enough": "reasoning-config enable-strict-thinking strip-thinking-cache",
    "not supported: other defaults than those of the model's generation_config.json": (
        "override-generation-config preferred-sampling-params default-priority-value allow-auto-truncate"
    ),
    "not supported: a KV type for some layers": "kv-cache-dtype-skip-layers quantization-param-path *dequant-dtype",
    "not supported: convert the checkpoint beforehand": "modelopt-* quantize-and-serve quantization-config *quant*",
    "not supported: this drafting method; see docs/drafting.md": (
        "speculative-dflash-* speculative-dspark-* speculative-domino-* speculative-ngram-external-* "
        "decoupled-spec-* speculative-draft-kv-cache-dtype speculative-draft-window-size speculative-draft-sink-size "
        "speculative-use-block-verification speculative-* uno-*"
    ),
    "not supported: tools that the server runs itself": "tool-server tool-strict-level",
    "not supported: hidden states and experts are not returned": (
        "*return-hidden-states* *return-aux-hidden-state* *return-indexer-topk *routed-experts *sampling-mask* "
        "aux-output-config"
    ),
    "not needed: all metrics are always exported; see docs/operating.md": (
        "*metrics* bucket-* *-buckets extra-metric-labels load-publish-* load-snapshot-*"
    ),
    "not supported: docs/operating.md has the tools there are": (
        "*debug* *dump* *canary* *profil* *nvtx* *nsight* *trace* jit-monitor-* *logging* log-config-file "
        "log-error-stack crash-dump-folder fail-on-environ-validation enable-return-*"
    ),
    "not needed: kernels and communication are chosen by the device and the model": (
        "*allreduce* *all-reduce* *nccl* *flashinfer* *fp4* *fp8* *gemm* dsa-* dsv4-* *dsa-* *fused* *symm-mem* "
        "*mscclpp* *p2p-check* *qk-norm* *megakernel *monokernel* monokernel-* *tf32* *fp32* *sparse* kernel-config "
        "cuda-graph-* cudagraph-* disable-cuda-graph-padding *aiter* *msprobe* *mxfp4* *indexer* c128-page-size "
        "boundary-reduction *lean-attention *dense-mlp* *torch-symm* mlx-* sm-group-num *batch-sharded-sampling "
        "performance-mode enable-quant-communications *mla* *lm-head* use-fp64-gumbel *shm-tensor-arena "
        "ir-op-priority *distributed-timeout* dist-timeout *linker*"
    ),
    "not needed: SpecRay has nothing that it changes": (
        "allow-deprecated-quantization anthropic-disabled-thinking-effort cohere-* disable-fastapi-docs "
        "enable-offline-docs enable-scale-out fingerprint-* sse-keep-alive-interval"
    ),
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
