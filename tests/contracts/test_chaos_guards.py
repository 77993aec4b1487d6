"""The guards that `tests.chaos.unguarded` takes out are where it looks for them."""

import pytest

from tests.chaos.unguarded import GUARDS, ROOT, NodeWatchdog


@pytest.mark.parametrize("watchdog", sorted({watchdog for watchdogs in GUARDS.values() for watchdog in watchdogs}))
def test_the_watchdog_is_there_once(watchdog: NodeWatchdog) -> None:
    assert (ROOT / watchdog.file).read_text(encoding="utf-8").count(watchdog.old) == 1
