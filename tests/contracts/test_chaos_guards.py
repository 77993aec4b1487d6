"""The guards that `tests.chaos.unguarded` takes out are where it looks for them."""

import pytest

from tests.chaos.unguarded import GUARDS, ROOT, Guard


@pytest.mark.parametrize("guard", sorted({guard for guards in GUARDS.values() for guard in guards}))
def test_the_guard_is_there_once(guard: Guard) -> None:
    assert (ROOT / guard.file).read_text(encoding="utf-8").count(guard.old) == 1
