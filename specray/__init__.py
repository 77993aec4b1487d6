"""SpecRay's engine: speculative decoding with one forward path. Never imports ray or cluster.

`LLM` runs a model in this process; `specray.engine` is the host side, `specray.worker` the
device side, and `specray.step` all that crosses between them.
"""

__version__ = "0.1.0"
