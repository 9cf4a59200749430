"""Fixtures and settings that all tests share."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings

from harness.cli import terminal

DATA = {
    "traces_dir": "TRACES_DIR",
    "profiles_dir": "PROFILES_DIR",
    "measured_dir": "MEASURED_DIR",
}  # fixture: the variable that it needs

FULL_S = 1200.0  # limit of a test of full runs, in place of pyproject.toml's

# A failure seen once must be seen again: in CI the examples are fixed, and nothing is kept between runs.
EXAMPLES = 100 if os.environ.get("BENCH_FULL") else 40
settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True, max_examples=EXAMPLES)
settings.register_profile("dev", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

STDERR = pytest.StashKey[int]()  # a descriptor of the terminal, which tests do not capture
LIMIT_S = pytest.StashKey[float]()  # seconds that a test may take


def pytest_configure(config: pytest.Config) -> None:
    """Keep where a test that hangs is told; pytest captures 2 later. An illegal step of a state diagram raises.

    On a busy machine no stage has a line of its own among those that tests count.
    """
    os.environ["BENCH_STRICT"] = "1"
    terminal.FIRST_S = math.inf
    config.stash[STDERR] = os.dup(2)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the simulator, where it is imported, before a test's time counts; other processes wait for the first."""
    if session.items and "harness.engines.sim.engine" in sys.modules:
        from tests.harness.engines.sim import compiled

        compiled.once()


@pytest.fixture(scope="session", autouse=True)
def _signals() -> None:
    """Have SIGINT and SIGTERM end processes, in whatever tests start too: jobs in a script's background ignore them."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


# ------------------------------------------------------------------ a test that hangs or kills its process ends the run


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """End the process at a test's limit and show where it was: in compiled code too, where no Python thread runs."""
    item.stash[LIMIT_S] = settings.timeout
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[STDERR])
    return True


def pytest_timeout_cancel_timer() -> bool:
    """End the limit: the test is over."""
    faulthandler.cancel_dump_traceback_later()
    return True


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Set a failed test's limit again: pytest takes it away, and what it cleans up may hang."""
    if (limit_s := node.stash.get(LIMIT_S, None)) is not None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=node.config.stash[STDERR])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport, sched: Any) -> None:
    """End the run with the name of the test whose worker died: xdist would give its file to others, test and all."""
    sched.config.hook.pytest_runtest_logreport(report=report)
    pytest.exit(str(report.longrepr), returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that read data which is not in the repository (`-m data` picks them); those of full runs are slow."""
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker("slow")
            item.add_marker(pytest.mark.timeout(FULL_S))
        if DATA.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker("data")


def folder(variable: str) -> Path:
    """Return the first folder that a variable names: skip where it is unset, fail where it names none."""
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} is not set")
    path = Path(named.split(os.pathsep)[0])
    if not path.is_dir():
        pytest.fail(f"{variable}={named}: no such folder")
    return path


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what a test leaves in the user's cache folder, such as checks that passed, from all others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{uuid4().hex}"))


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Return the real traces (TRACES_DIR)."""
    return folder("TRACES_DIR")


@pytest.fixture(scope="session")
def profiles_dir() -> Path:
    """Return the public profiles that the cost tables are fitted on (PROFILES_DIR)."""
    return folder("PROFILES_DIR")


@pytest.fixture(scope="session")
def measured_dir() -> Path:
    """Return public measurements of real engines, end to end (MEASURED_DIR)."""
    return folder("MEASURED_DIR")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that asks for data which is said to be there, and skips."""
    report = yield
    wanted = [v for name, v in DATA.items() if name in getattr(item, "fixturenames", ()) and os.environ.get(v)]
    if report.skipped and not hasattr(report, "wasxfail") and wanted:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped although {wanted[0]} is set: {report.longrepr}"
    return report
