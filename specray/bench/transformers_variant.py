"""The baseline: transformers' `generate`, greedy, one prompt at a time, with the same files and dtype."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from specray.bench.first_token import FirstToken
from specray.bench.variants import TRANSFORMERS, BenchRequest, Run, TimedReply
from specray.ops.cpu.processor import torch_threads
from specray.sampling_params import SamplingParams


class TransformersVariant:
    """A `Variant` over a model folder."""

    name = TRANSFORMERS

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, eos_token_ids: Sequence[int]) -> None:
        disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped; our own progress bar is shown instead
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        self._model = model.to(device)
        self._eos_token_ids = list(eos_token_ids)

    def run(self, requests: Sequence[BenchRequest], concurrency: int, cache_salt: str) -> Run:
        assert concurrency == 1, "refused by `Session` otherwise"
        del cache_salt  # there is no cache between prompts
        start = time.perf_counter()
        with torch_threads():
            replies = [self._answer(request) for request in requests]
        return Run(replies, time.perf_counter() - start, [])

    def _answer(self, request: BenchRequest) -> TimedReply:
        prompt = torch.tensor([request.token_ids], device=self._model.device)
        clock = FirstToken()
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=clock,
                **self._options(request.params),
            )
        token_ids = output[0, prompt.shape[1] :].tolist()
        seconds = time.perf_counter() - start
        return TimedReply(token_ids, clock.time - start, seconds)

    def _options(self, params: SamplingParams) -> dict[str, Any]:
        min_new_tokens = {"min_new_tokens": params.max_tokens} if params.ignore_eos else {}
        return {
            "do_sample": False,
            "max_new_tokens": params.max_tokens,
            "eos_token_id": self._eos_token_ids,
            "pad_token_id": self._eos_token_ids[0],
            **min_new_tokens,
        }
