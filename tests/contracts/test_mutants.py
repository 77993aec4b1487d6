"""`python -m tests.mutants` finds the code that it changes, and the tests that it runs."""

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_changed_code_exists_once_and_so_do_the_tests(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert (ROOT / mutant.tests.split(" ")[0]).is_file()
