"""transformers' `generate` in bfloat16. Modes: plain, ngram (prompt lookup, one prompt at a time)."""

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.workers.protocol import Answer, Engine, Options, serve
from specray.bench.first_token import FirstToken

PADDING = 0
MODES: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"prompt_lookup_num_tokens": 10}}


def load(options: Options) -> Engine:
    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, local_files_only=True)
    model.generation_config.eos_token_id = None  # answers go on to max_tokens
    model.generation_config.pad_token_id = PADDING

    def answer(prompts: list[list[int]], max_tokens: int) -> Answer:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = FirstToken()
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                streamer=clock,
                **MODES[options.mode],
            )
        return Answer(time.perf_counter() - start, clock.time - start, output[:, width:].tolist())

    return Engine(transformers.__version__, f"torch {torch.__version__}", answer)


if __name__ == "__main__":
    serve(load)
