"""SpecRay itself, in this project's environment. Modes: WEIGHTS-METHOD, such as bf16-plain or int4-eagle3."""

from itertools import count

from benchmarks.eagle import EAGLE3, served
from benchmarks.peers.workers.protocol import CONTEXT_LENGTH, Answer, Engine, Options, serve
from specray import __version__
from specray.bench.variants import BenchRequest, EngineVariant, parse_method
from specray.config import EngineConfig, SpeculativeConfig
from specray.llm import LLM
from specray.ops.cpu.library import kernels
from specray.sampling_params import SamplingParams

QUANTIZATION = {"bf16": None, "int4": "auto"}  # auto keeps the blocks of the GGUF file


def load(options: Options) -> Engine:
    weights, method = options.mode.split("-")
    config = EngineConfig.model_validate(
        {
            "model": options.gguf,
            "dtype": "bfloat16",
            "quantization": QUANTIZATION[weights],
            "num_threads": options.threads,
            "context_length": CONTEXT_LENGTH,
            "max_total_tokens": options.max_batch * CONTEXT_LENGTH,
            "max_running_requests": options.max_batch,
            "disable_radix_cache": True,
        }
    )
    engine = EngineVariant(method, LLM(config.model_copy(update={"speculative": _speculative(method)})))
    salts = count()  # an n-gram store must not know an earlier answer

    def answer(prompts: list[list[int]], max_tokens: int) -> Answer:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        run = engine.run(
            [BenchRequest(prompt, params) for prompt in prompts], options.max_batch, f"batch-{next(salts)}"
        )
        first = min(reply.ttft for reply in run.replies)
        return Answer(run.seconds, first, [reply.token_ids for reply in run.replies])

    return Engine(__version__, "" if kernels() else "without compiled kernels", answer)


def _speculative(method: str) -> SpeculativeConfig:
    return served(EAGLE3) if method == EAGLE3 else parse_method(method)


if __name__ == "__main__":
    serve(load)
