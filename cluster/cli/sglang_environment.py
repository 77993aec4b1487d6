"""The environment variables of SGLang's page on speculative decoding, as `specray serve` reads them."""

from collections.abc import Iterator, Mapping, Sequence

from cluster.config import AppConfig
from specray import unsupported_options
from specray.errors import ConfigError

SPEC_V2 = "SGLANG_ENABLE_SPEC_V2"
FORCE_GREEDY = "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"
_SWITCH = {"true": True, "1": True, "yes": True, "y": True, "false": False, "0": False, "no": False, "n": False}


def check_sglang_environment(environment: Mapping[str, str], apps: Sequence[AppConfig]) -> Iterator[str]:
    """A warning for every SGLANG_* variable that has no effect.

    Raises ConfigError for a variable that asks for something that an application does not do.
    """
    for name in sorted(name for name in environment if name.startswith("SGLANG_")):
        if name not in (SPEC_V2, FORCE_GREEDY):
            yield f"{name} is set but not read; configure SpecRay with flags or a file"
            continue
        is_on = _is_on(name, environment[name])
        if name == SPEC_V2 and any(app.disable_overlap_schedule == is_on for app in apps):
            yield f"{name}={environment[name]} is not applied; set --disable-overlap-schedule {str(not is_on).lower()}"
        drafters = [drafter for app in apps for drafter in app.speculative.members.values()]
        if name == FORCE_GREEDY and is_on and any(drafter.algorithm == "NGRAM" for drafter in drafters):
            raise unsupported_options.NGRAM_FORCE_GREEDY_VERIFY.error(name, True)


def _is_on(name: str, value: str) -> bool:
    is_on = _SWITCH.get(value.lower())
    if is_on is None:
        raise ConfigError(f"{name}={value!r} is neither true nor false; set it to one of them or unset it")
    return is_on
