"""Options of SGLang's reference that have no place here: known by name, and refused with the reason.

So a command line that was written for SGLang either means the same here or is told what to do instead; nothing of it is
ignored in silence. Not here: options that work (`config`).
"""

from typing import Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from specray.errors import ConfigError


class UnsupportedOption:
    """One such option. Null and `harmless` values ask for what is done anyway: they are read as the first of them."""

    def __init__(self, reason: str, *harmless: object) -> None:
        self._reason = reason
        self._harmless = harmless or (None,)

    @property
    def check(self) -> AfterValidator:
        return AfterValidator(self._check)

    @property
    def field(self) -> Any:
        """A field with its only value, described."""
        return Field(self._harmless[0], description=f"SGLang's; anything else is refused: {self._reason}.")

    def _check(self, value: object, info: ValidationInfo) -> object:
        if value is not None and value not in self._harmless:
            raise ConfigError(f"{info.field_name}={value!r} cannot be had: {self._reason}")
        return self._harmless[0]


def _check_kernels(value: object, info: ValidationInfo) -> object:
    if value not in (None, "auto", "torch"):
        raise ConfigError(
            f"{info.field_name}={value!r} cannot be had: attention runs on torch's own kernels, on CPUs and GPUs; "
            "set it to 'torch', or remove it"
        )
    return value


ATTENTION_KERNELS = BeforeValidator(_check_kernels)  # options of ours as well, with fewer values than SGLang's
ATTENTION_MODE = UnsupportedOption("trees are verified on the one path that prompts take, too; remove it", "prefill")
MOE_RUNNER_BACKEND = UnsupportedOption("experts run on torch's own operations, in target and draft; remove it", "auto")
MOE_A2A_BACKEND = UnsupportedOption(
    "nothing is sent from all to all, for tp_size divides every expert; remove it", "none"
)
ENABLE_SPEC_V2 = UnsupportedOption(
    "drafting overlaps with the router's work, for trees as well, where draft.placement is colocated; set that", False
)
NGRAM_FORCE_GREEDY_VERIFY = UnsupportedOption(
    "sampled requests would get greedy text; send temperature 0 where that is wanted", False
)
ENABLE_MULTI_LAYER_EAGLE = UnsupportedOption(
    "as many MTP layers draft as the checkpoint has; speculative.num_steps=1 uses the first alone", True
)
ENABLE_TORCH_COMPILE = UnsupportedOption(
    "steps are not compiled, for their shapes change with every tree; quantization=int8 makes a CPU faster", False
)
TORCH_COMPILE_MAX_BS = UnsupportedOption("steps are not compiled; remove it")
CUDA_GRAPH_MAX_BS = UnsupportedOption("no CUDA graphs are captured; remove it")
