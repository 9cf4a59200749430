"""A stage for each test that asks for one."""

from __future__ import annotations

import pytest

from tests.harness.engines.servers.staged import Stage


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Return an engine in a world of its own, with room for all three models."""
    return Stage(monkeypatch)
