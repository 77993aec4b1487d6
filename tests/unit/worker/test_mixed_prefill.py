"""How many prompt tokens a step may have in which other requests decode."""

import pytest

from specray.config import EngineConfig
from specray.worker.startup import mixed_prefill_tokens


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu"),
    [
        ({}, 64, 1024),
        ({"chunked_prefill_size": 256}, 64, 512),
        ({"mixed_prefill_tokens": 300}, 300, 300),
    ],
)
def test_a_mixed_step_has_few_prompt_tokens_on_a_cpu(options: dict[str, int], on_cpu: int, on_gpu: int) -> None:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    assert mixed_prefill_tokens(config, is_gpu=False) == on_cpu
    assert mixed_prefill_tokens(config, is_gpu=True) == on_gpu
