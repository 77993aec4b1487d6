"""The 57 models that a public collection of vLLM recipes (21 August 2026) serves with speculation, by architecture.

`decoder` names the small checkpoint of `tests.support.decoders` that proves that the architecture is served, or
refused. `drafts` is what the recipe drafts with, where that is served: prompts, EAGLE-3 heads and draft models work
with any decoder.
"""

from dataclasses import dataclass

from tests.support.decoders import IMAGE_MODELS, SERVED


@dataclass(frozen=True, slots=True)
class Recipe:
    """Models of one architecture."""

    names: tuple[str, ...]  # on the hub
    shown: str
    architecture: str
    decoder: str | None  # None: transformers has no class for it
    drafts: str = ""
    limit: str = ""  # of the context, or the reason why it is not served

    @property
    def is_served(self) -> bool:
        return self.decoder in SERVED or self.decoder in IMAGE_MODELS


def _of(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}/{name}" for name in names)


_NO_CLASS = "no class in transformers"
_STATE = "layers with a state"
_SPARSE = "2,048 tokens of context"
RECIPES = (
    Recipe(_of("meta-llama", "Llama-3.1-8B-Instruct"), "Llama", "Llama", "llama", "EAGLE-3"),
    Recipe(_of("openai", "gpt-oss-120b"), "gpt-oss", "GptOss", "gpt_oss", "EAGLE-3"),
    Recipe(_of("Google", "gemma-4-26B-A4B-it", "gemma-4-31B-it"), "Gemma 4", "Gemma4", "gemma4-moe", "MTP"),
    Recipe(_of("zai-org", "GLM-4.5", "GLM-4.6", "GLM-4.7"), "GLM-4", "Glm4Moe", "glm4_moe", "MTP"),
    Recipe(_of("zai-org", "GLM-OCR"), "GLM-OCR", "GlmOcr", "glm_ocr"),
    Recipe(_of("tencent", "Hy3-preview", "Hy3"), "Hy3", "HYV3", "hy_v3", "MTP"),
    Recipe(_of("baidu", "ERNIE-4.5-21B-A3B-PT"), "ERNIE", "Ernie4_5_Moe", "ernie4_5_moe", "MTP"),
    Recipe(
        _of("moonshotai", "Kimi-K2.5", "Kimi-K2.6", "Kimi-K2.7-Code"),
        "Kimi-K2",
        "Kimi_K25",
        "kimi_k25",
        "EAGLE-3",
    ),
    Recipe(_of("Qwen", "Qwen3-VL-235B-A22B-Instruct"), "Qwen3-VL", "Qwen3VLMoe", "qwen3_vl_moe"),
    Recipe(_of("mistralai", "Mistral-Medium-3.5-128B"), "Mistral", "Mistral3", "ministral3-image"),
    Recipe(_of("mistralai", "Mistral-Small-4-119B-2603"), "Mistral", "Mistral3", "mistral4"),
    Recipe(_of("poolside", "Laguna-S-2.1", "Laguna-XS-2.1", "Laguna-XS.2"), "Laguna", "Laguna", "laguna"),
    Recipe(_of("meta-models", "Muse-Glimmer-30B"), "Muse", "MuseGlimmer", "muse_glimmer"),
    Recipe(_of("stepfun-ai", "Step-3.7-Flash"), "Step", "Step3p7", "step3p7", "MTP"),
    Recipe(_of("stepfun-ai", "Step-3.5-Flash"), "Step", "Step3p5", "step3p7", "MTP"),
    Recipe(_of("deepseek-ai", "DeepSeek-V3.2"), "DeepSeek-V3.2", "DeepseekV32", "deepseek_v32", "MTP", _SPARSE),
    Recipe(
        (*_of("zai-org", "GLM-5", "GLM-5.1", "GLM-5.2"), "mindlab-research/Macaron-V1-Coding-Venti"),
        "GLM-5, Macaron-V1",
        "GlmMoeDsa",
        "glm_moe_dsa",
        "MTP",
        _SPARSE,
    ),
    Recipe(_of("MiniMaxAI", "MiniMax-M3"), "MiniMax-M3", "MiniMaxM3Sparse", "minimax_m3", "EAGLE-3", _SPARSE),
    Recipe(_of("dots-studio", "dots3-note-prev"), "dots3-note", "Dots3Note", "dots3_note", limit=_SPARSE),
    Recipe(_of("Google", "gemma-4-E2B-it", "gemma-4-E4B-it"), "Gemma 4", "Gemma4", "gemma4", "MTP"),
    Recipe(_of("Google", "gemma-4-12B-it"), "Gemma 4", "Gemma4Unified", "gemma4_unified", "MTP"),
    Recipe(_of("XiaomiMiMo", "MiMo-V2.5", "MiMo-V2.5-Pro"), "MiMo-V2.5", "MiMoV2", None, limit=_NO_CLASS),
    Recipe(_of("Qwen", "Qwen3-Next-80B-A3B-Instruct"), "Qwen3-Next", "Qwen3Next", "qwen3_next", "MTP"),
    Recipe(
        _of("Qwen", "Qwen3.5-2B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"),
        "Qwen3.5 to 3.8",
        "Qwen3_5",
        "qwen3_5",
        "MTP",
    ),
    Recipe(
        _of(
            "Qwen", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B", "Qwen3.8-2.4T-A95B"
        ),
        "Qwen3.5 to 3.8",
        "Qwen3_5Moe",
        "qwen3_5_moe",
        "MTP",
    ),
    Recipe(_of("internlm", "Intern-S2-Preview"), "Intern-S2", "InternS2Preview", None, limit=_NO_CLASS),
    Recipe(
        _of(
            "nvidia",
            "NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
            "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
            "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
        ),
        "Nemotron",
        "NemotronH",
        "nemotron_h",
        limit=_STATE,
    ),
    Recipe(_of("inclusionAI", "Ling-3.0-flash"), "Ling", "BailingHybrid", "bailing_hybrid", limit=_STATE),
    Recipe(_of("moonshotai", "Kimi-K3"), "Kimi-K3", "KimiK3", None, limit=_NO_CLASS),
    Recipe(_of("thinkingmachines", "Inkling-Small", "Inkling"), "Inkling", "Inkling", "inkling", limit=_STATE),
    Recipe(
        _of("deepseek-ai", "DeepSeek-V4-Flash", "DeepSeek-V4-Pro"),
        "DeepSeek-V4",
        "DeepseekV4",
        "deepseek_v4",
        limit="compressed keys",
    ),
)
