"""Fixtures and settings that all tests share."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.mocks import Server

DATA = {
    "traces_dir": "TRACES_DIR",
    "profiles_dir": "PROFILES_DIR",
    "measured_dir": "MEASURED_DIR",
}  # fixture: the variable that it needs

# A failure seen once must be seen again: in CI the examples are fixed, and nothing is kept between runs.
settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("dev", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def folder(variable: str) -> Path:
    """The folder that a variable names: skips where it is unset, fails where it names none."""
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} is not set")
    path = Path(named)
    if not path.is_dir():
        pytest.fail(f"{variable}={named}: no such folder")
    return path


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The real traces (TRACES_DIR)."""
    return folder("TRACES_DIR")


@pytest.fixture(scope="session")
def profiles_dir() -> Path:
    """The public profiles that the cost tables are fitted on (PROFILES_DIR)."""
    return folder("PROFILES_DIR")


@pytest.fixture(scope="session")
def measured_dir() -> Path:
    """Public measurements of real engines, end to end (MEASURED_DIR)."""
    return folder("MEASURED_DIR")


@pytest.fixture(scope="module")
def shared_mock() -> Iterator[Server]:
    """A mock server for all tests of a file."""
    from tests.mocks import serving

    with serving() as found:
        yield found


@pytest.fixture
def server(shared_mock: Server) -> Server:
    """The file's mock server, with its counts at 0."""
    shared_mock.ask("/mock/reset")
    return shared_mock


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that asks for data which is said to be there may not skip."""
    report = yield
    wanted = [v for name, v in DATA.items() if name in getattr(item, "fixturenames", ()) and os.environ.get(v)]
    if report.skipped and not hasattr(report, "wasxfail") and wanted:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped although {wanted[0]} is set: {report.longrepr}"
    return report
