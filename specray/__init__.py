"""SpecRay's engine: speculative decoding for large language models. Does not import ray or cluster.

`LLM` runs a model in this process. `specray.engine` runs on the host, `specray.worker` on the device; they exchange the
messages of `specray.step`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specray.llm import LLM
    from specray.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]

_MODULES = {"LLM": "specray.llm", "SamplingParams": "specray.sampling_params"}


def __getattr__(name: str) -> Any:
    """Import a public class when it is first used: `specray.llm` loads torch, which takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
