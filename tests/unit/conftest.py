"""Fixtures of unit tests."""

from pathlib import Path

import pytest

from tests.support.serve_file import SERVE_CONFIG


@pytest.fixture
def serve_config(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(SERVE_CONFIG)
    return path
