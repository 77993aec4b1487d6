"""llama.cpp's server in this process (xllamacpp), with the GGUF file. Modes: plain, ngram-simple, ngram-map."""

import json
import time
from importlib.metadata import version
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp

from benchmarks.peers.workers.protocol import CONTEXT_LENGTH, Answer, Engine, Options, serve

# Not ngram-mod: its pool keeps earlier answers, and rounds repeat prompts.
MODES = {"plain": "NONE", "ngram-simple": "NGRAM_SIMPLE", "ngram-map": "NGRAM_MAP_K"}
INSTRUCTIONS = ("AVX", "AVX2", "AVX_VNNI", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX_INT8", "NEON", "SVE")


def load(options: Options) -> Engine:
    params: Any = xllamacpp.CommonParams()
    params.model.path = options.gguf
    params.n_parallel = options.max_batch
    params.n_ctx = options.max_batch * CONTEXT_LENGTH
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.verbosity = 0
    method = f"COMMON_SPECULATIVE_TYPE_{MODES[options.mode]}"
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, method)]
    server: Any = xllamacpp.Server(params)

    def answer(prompts: list[list[int]], max_tokens: int) -> Answer:
        url = f"{server.listening_address}/completion"  # also keeps the server, which ends with its last reference
        start = time.perf_counter()
        replies = _post(url, {**_request(max_tokens), "prompt": prompts if len(prompts) > 1 else prompts[0]})
        seconds = time.perf_counter() - start
        replies = replies if isinstance(replies, list) else [replies]
        first = min(reply["timings"]["prompt_ms"] for reply in replies) / 1000
        return Answer(seconds, first, [reply["tokens"] for reply in sorted(replies, key=lambda reply: reply["index"])])

    return Engine(version("xllamacpp"), f"wheel compiled for {_instructions()}", answer)


def _request(max_tokens: int) -> dict[str, Any]:
    return {
        "n_predict": max_tokens,
        "ignore_eos": True,
        "samplers": ["top_k"],
        "top_k": 1,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }


def _post(url: str, body: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as response:
        return json.load(response)


def _instructions() -> str:
    """The vector instructions that the library was compiled for."""
    used = {part.split("=")[0].strip() for part in xllamacpp.get_system_info().partition(":")[2].split("|")}
    return ", ".join(name for name in INSTRUCTIONS if name in used) or "no vector instructions"


if __name__ == "__main__":
    serve(load)
