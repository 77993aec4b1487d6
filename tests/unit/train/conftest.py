"""Fixtures of the trainers' tests."""

import pytest


@pytest.fixture
def draws_plots() -> None:
    """Named by tests in which runs draw their plots, which takes longer than these small runs themselves."""


@pytest.fixture(autouse=True)
def no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "draws_plots" not in request.fixturenames:
        monkeypatch.setattr("specray.train.run_files.can_plot", lambda: False)
