"""What the system says about the processor."""

import platform
from functools import cache
from pathlib import Path

# Of x86 and ARM; together they tell kinds of processors apart. Some virtual machines give all of a maker's one name.
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU implementer", "CPU part", "Features")


def cpu_name() -> str:
    """The maker's name of it, for people."""
    return _facts().get("model name") or platform.processor() or "unknown CPU"


def cpu_features() -> str:
    """Its instruction sets."""
    facts = _facts()
    return facts.get("flags") or facts.get("Features") or platform.processor()


def cpu_identity() -> str:
    """Equal for processors of one kind, which run the same program equally fast."""
    facts = _facts()
    return "; ".join(facts[name] for name in _IDENTITY if name in facts) or platform.processor()


@cache
def _facts() -> dict[str, str]:
    """The lines of /proc/cpuinfo about the first core; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
