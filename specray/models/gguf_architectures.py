"""The architectures of GGUF files that are served, and what no file says about them.

A file's metadata have no key for what llama.cpp's code or its converter fixes for an architecture: which rows the
converter reorders, what it adds to norms, and settings that one of the two leaves out. Sources are llama.cpp's
`conversion/*.py` and `src/models/*.cpp`. Names of tensors come from the `gguf` package, those of parameters from
transformers' classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specray.errors import ConfigError
from specray.models.gguf_reader import GgufFile

SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one value of general.architecture become a model of transformers."""

    model_type: str  # of transformers
    has_interleaved_rope: bool = False
    """The converter reordered the rows of q and k from halves (x0 x1 … y0 y1 …) to pairs (x0 y0 x1 y1 …)."""
    norm_offset: float = 0.0
    """What the converter added to the weights of norms."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that the file does not have."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that the class computes without a field for them; others are refused."""
    variants: Mapping[str, "Architecture"] = field(default_factory=dict)
    """A key, or a part of a tensor's name: what files with it are instead."""


_SIGMOID_ROUTER = {"expert_gating_func": _SIGMOID}
_LLAMA = Architecture(
    "llama",
    has_interleaved_rope=True,
    variants={"expert_count": Architecture("mixtral", has_interleaved_rope=True)},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,  # Mistral and SmolLM, too
    "mistral": _LLAMA,
    "mistral3": Architecture("ministral3", has_interleaved_rope=True),
    "llama4": Architecture("llama4_text", expected=_SIGMOID_ROUTER),
    "arcee": Architecture("arcee", has_interleaved_rope=True),
    "smollm3": Architecture("smollm3", has_interleaved_rope=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", fields={"norm_topk_prob": True}),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", norm_offset=1.0),
    "gpt-oss": Architecture("gpt_oss"),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3"),
    "granite": Architecture("granite", has_interleaved_rope=True),
    "granitemoe": Architecture(
        "granitemoe",
        has_interleaved_rope=True,
        variants={"ffn_gate_shexp": Architecture("granitemoeshared", has_interleaved_rope=True)},
    ),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe", expected=_SIGMOID_ROUTER),
    "deepseek2": Architecture(
        "deepseek_v2", variants={"exp_probs_b": Architecture("deepseek_v3", expected=_SIGMOID_ROUTER)}
    ),
    "dots1": Architecture("dots1", fields={"sliding_window": None}, expected=_SIGMOID_ROUTER),
    "olmo": Architecture("olmo", has_interleaved_rope=True, expected={"attention.layer_norm_epsilon": 1e-5}),
    "olmo2": Architecture("olmo2", variants={"attention.sliding_window": Architecture("olmo3")}),
    "olmoe": Architecture("olmoe"),
    "command-r": Architecture("cohere"),
    "cohere2": Architecture("cohere2"),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "seed_oss": Architecture("seed_oss"),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "exaone4": Architecture("exaone4"),
    "exaone-moe": Architecture("exaone_moe", expected=_SIGMOID_ROUTER),
    "nemotron": Architecture("nemotron", norm_offset=1.0),
    "starcoder2": Architecture("starcoder2"),
    "stablelm": Architecture("stablelm"),
    "jais2": Architecture("jais2"),
}


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """general.architecture, and what files with it are. ConfigError if they are not served."""
    name = file.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ConfigError(f"{file.path} has the architecture {name!r}; supported are {', '.join(ARCHITECTURES)}")
    parts = {tensor.split(".")[-2] for tensor in file.tensors if "." in tensor}
    for sign, variant in ARCHITECTURES[name].variants.items():
        if file.metadata.get(f"{name}.{sign}") or sign in parts:
            return name, variant
    return name, ARCHITECTURES[name]
