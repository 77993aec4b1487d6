"""`tests.chaos.unguarded` finds the safeguards that it removes."""

import pytest

from tests.chaos.unguarded import ROOT, SAFEGUARDS, Safeguard


@pytest.mark.parametrize("safeguard", sorted({change for changes in SAFEGUARDS.values() for change in changes}))
def test_the_removed_code_exists_once(safeguard: Safeguard) -> None:
    assert (ROOT / safeguard.file).read_text(encoding="utf-8").count(safeguard.old) == 1
