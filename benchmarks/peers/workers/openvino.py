"""OpenVINO GenAI's continuous batching, with the GGUF file. Modes: plain, ngram (prompt lookup)."""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.workers.protocol import Answer, Engine, Options, serve

CACHE_GIB = 1
MODES: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"prompt_lookup": True}}


def load(options: Options) -> Engine:
    scheduler: Any = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = options.max_batch
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": options.threads, **MODES[options.mode]}
    pipeline: Any = openvino_genai.ContinuousBatchingPipeline(options.gguf, scheduler, "CPU", properties)

    def answer(prompts: list[list[int]], max_tokens: int) -> Answer:
        config = _generation(options.mode, max_tokens)
        tokens: list[list[int]] = [[] for _ in prompts]
        first = 0.0
        start = time.perf_counter()
        handles = [
            pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle, ids in zip(handles, tokens, strict=True):
                while handle.can_read():
                    ids += [token for output in handle.read().values() for token in output.generated_ids]
                    first = first or time.perf_counter() - start
        return Answer(time.perf_counter() - start, first, tokens)

    return Engine(openvino_genai.__version__.partition("-")[0], "", answer)


def _generation(mode: str, max_tokens: int) -> Any:
    config: Any = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.apply_chat_template = False
    if mode == "ngram":
        config.num_assistant_tokens, config.max_ngram_size = 5, 3
    return config


if __name__ == "__main__":
    serve(load)
