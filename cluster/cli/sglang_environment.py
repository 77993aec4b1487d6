"""The environment variables of SGLang's page on speculative decoding, as `specray serve` reads them."""

from collections.abc import Iterable, Iterator, Mapping

from cluster.config import AppConfig
from specray import unsupported_options
from specray.errors import ConfigError

SPEC_V2 = "SGLANG_ENABLE_SPEC_V2"
FORCE_GREEDY = "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"
_SWITCH = {"true": True, "1": True, "yes": True, "y": True, "false": False, "0": False, "no": False, "n": False}


def check_sglang_environment(environment: Mapping[str, str], apps: Iterable[AppConfig]) -> Iterator[str]:
    """A warning for every SGLANG_* variable that has no effect.

    Raises ConfigError for a variable that asks for something that an application does not do.
    """
    for name in sorted(name for name in environment if name.startswith("SGLANG_")):
        if name not in (SPEC_V2, FORCE_GREEDY):
            yield f"{name} is set but not read; configure SpecRay with flags or a file"
        elif _is_on(name, environment[name]):
            for app in apps:
                _check(name, app)


def _check(name: str, app: AppConfig) -> None:
    """ConfigError if the application does not do what the variable asks for. Colocated drafters always overlap."""
    algorithm = app.speculative.algorithm
    if name == SPEC_V2 and algorithm is not None and app.draft.placement == "inline":
        raise unsupported_options.ENABLE_SPEC_V2.error(name, True)
    if name == FORCE_GREEDY and algorithm == "NGRAM":
        raise unsupported_options.NGRAM_FORCE_GREEDY_VERIFY.error(name, True)


def _is_on(name: str, value: str) -> bool:
    is_on = _SWITCH.get(value.lower())
    if is_on is None:
        raise ConfigError(f"{name}={value!r} is neither true nor false; set it to one of them or unset it")
    return is_on
