"""vLLM's CPU build in bfloat16, compiled as by default. Modes: plain, ngram (prompt lookup)."""

import os
import time
from typing import Any

from benchmarks.peers.workers.protocol import CONTEXT_LENGTH, Answer, Engine, Options, serve

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    },
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process of its own would only add messages
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def load(options: Options) -> Engine:
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ |= ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}  # auto may leave cores out
    import torch
    import vllm
    from vllm import LLM, SamplingParams  # reads the environment

    engine: Any = LLM(
        options.model,
        dtype="bfloat16",
        max_model_len=CONTEXT_LENGTH,
        max_num_seqs=options.max_batch,
        enable_prefix_caching=False,
        **MODES[options.mode],
    ).llm_engine

    def answer(prompts: list[list[int]], max_tokens: int) -> Answer:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        tokens: dict[str, list[int]] = {}
        first = 0.0
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first = first or time.perf_counter() - start
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - start
        return Answer(seconds, first, [answer for _, answer in sorted(tokens.items(), key=_number)])

    return Engine(vllm.__version__, f"torch {torch.__version__}", answer)


def _number(pair: tuple[str, list[int]]) -> int:
    """A request's place in its batch; the engine may add a suffix to the id."""
    return int(pair[0].partition("-")[0])


if __name__ == "__main__":
    serve(load)
