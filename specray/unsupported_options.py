"""SGLang options that this engine does not implement.

All are declared, so that a command line written for SGLang either works or fails with the reason and an alternative.
Options that cannot change the output are accepted; `options_without_effect` lists them for the log.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from specray.errors import ConfigError


class UnsupportedOption:
    """An option that accepts only null and its `harmless` values, which describe what the engine does anyway.

    All accepted values are stored as the first harmless one.
    """

    def __init__(self, reason: str, *harmless: object) -> None:
        self._reason = reason
        self._harmless = harmless or (None,)

    @property
    def check(self) -> AfterValidator:
        return AfterValidator(self._check)

    @property
    def field(self) -> Any:
        """A field whose default is its only value."""
        return Field(self._harmless[0], description=f"SGLang's option; other values are refused: {self._reason}.")

    def error(self, name: str, value: object) -> ConfigError:
        """The error for another value of the option."""
        return ConfigError(f"{name}={value!r} is not supported: {self._reason}")

    def _check(self, value: object, info: ValidationInfo) -> object:
        if value is not None and value not in self._harmless:
            raise self.error(str(info.field_name), value)
        return self._harmless[0]


def _kernels(what: str, *names: str) -> BeforeValidator:
    """A check that a value is null or one of `names`, some of SGLang's; `what` the kernels compute."""

    def check(value: object, info: ValidationInfo) -> object:
        if value is not None and value not in names:
            raise ConfigError(
                f"{info.field_name}={value!r} is not supported: the kernels for {what} are {', '.join(names)}; set it "
                "to one of them, or remove it"
            )
        return value

    return BeforeValidator(check)


# For options that accept some of SGLang's values.
ATTENTION_KERNELS = _kernels("attention", "auto", "torch", "triton", "flashinfer", "fa")
ATTENTION_MODE = _kernels("draft trees", "prefill", "decode")
MOE_RUNNER_BACKEND = _kernels("experts", "auto", "torch", "triton")
MOE_A2A_BACKEND = UnsupportedOption(
    "tensor parallelism splits every expert, so ranks exchange no tokens; remove it", "none"
)
NGRAM_FORCE_GREEDY_VERIFY = UnsupportedOption(
    "sampled requests would get greedy output; send temperature=0 for greedy decoding", False
)
ENABLE_MULTI_LAYER_EAGLE = UnsupportedOption(
    "all MTP layers of the checkpoint are used; set speculative.num_steps=1 to use only the first", True
)
ENABLE_DP_ATTENTION = UnsupportedOption(
    "attention is tensor-parallel within an engine; set server.num_replicas for data parallelism", False
)

# Options that are accepted because they cannot change the output, and the reason why they have no effect.
_WITHOUT_EFFECT = {
    "trust_remote_code": "code from a checkpoint is never run",
}


def without_effect(name: str) -> str:
    """The description of an option that is accepted without effect."""
    return f"SGLang's option; accepted without effect: {_WITHOUT_EFFECT[name]}."


def options_without_effect(config: object) -> Iterator[str]:
    """`name=value: reason` for every option that is set but has no effect."""
    for name, reason in _WITHOUT_EFFECT.items():
        if value := getattr(config, name):
            yield f"{name}={value}: {reason}"
