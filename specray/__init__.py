"""SpecRay's engine: speculative decoding for large language models. Does not import ray or cluster.

`LLM` runs a model in this process. `specray.engine` runs on the host, `specray.worker` on the device; they exchange the
messages of `specray.step`.
"""

__version__ = "0.1.0"
