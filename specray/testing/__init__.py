"""Checks for drafters that are written outside this package. With pytest:

import pytest

from specray.config import EngineConfig
from specray.testing import DRAFTER_CHECKS

CONFIG = EngineConfig(speculative={"algorithm": "my_package.my_module:MyDrafter"})


@pytest.mark.parametrize("check", DRAFTER_CHECKS)
def test_my_drafter(check):
    check(CONFIG)
"""

from specray.testing.conformance import DRAFTER_CHECKS

__all__ = ["DRAFTER_CHECKS"]
