"""How many random cases a property sees, where it is not the profile's number of tests/conftest.py."""

from hypothesis import settings


def at_most(count: int) -> settings:
    """Fewer where the profile has fewer, as for other builds of the kernels."""
    return settings(max_examples=min(count, settings.default.max_examples))
