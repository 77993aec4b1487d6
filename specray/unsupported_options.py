"""SGLang options that this engine does not implement.

All are declared, so that a command line written for SGLang either works or fails with the reason and an alternative.
"""

from typing import Any

from pydantic import AfterValidator, Field, ValidationInfo

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
