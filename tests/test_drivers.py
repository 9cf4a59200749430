"""Studies that a module of their own runs: one table for all of them, and what they print is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from harness.cli.app import main
from harness.policy.types import UserError
from harness.run.teller import Silent
from harness.study import drivers
from harness.study.drivers import DRIVERS
from tests.cases import cases


class Counting:
    """A driver whose input is a file, and which counts its calls."""

    PAPER, SEEDS = "A test, 2026", 3

    def __init__(self, path: Path) -> None:
        self.path, self.calls = path, list[int]()

    def inputs(self) -> list[Path]:
        if not self.path.is_file():
            raise UserError(f"no file {self.path.name}")
        return [self.path]

    def count(self, seeds: int) -> int:
        return 10 * seeds

    def text(self, seeds: int, _out: Path, **_: object) -> Iterator[str]:
        self.calls.append(seeds)
        yield from (f"{seeds} seeds", "and a line")


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    (tmp_path / "lengths.csv").write_text("1,2")
    driver = Counting(tmp_path / "lengths.csv")
    monkeypatch.setattr(drivers, "DRIVERS", {"counting": driver})
    return driver


def bench(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@cases("name", list(DRIVERS))
def test_a_dry_run_counts_and_writes_nothing(name: str, tmp_path: Path) -> None:
    driver = DRIVERS[name]
    for seeds, given in ((2, ("--seeds", 2)), (driver.SEEDS, ())):
        result = bench("study", name, "--dry-run", *given, "-o", tmp_path)
        assert result.output == f"{driver.count(seeds)} runs; stored runs that are current cost nothing\n"
    assert driver.count(4) == 4 * driver.count(1) > 0
    assert not list(tmp_path.iterdir())


@cases("name", list(DRIVERS))
def test_an_option_that_a_driver_cannot_take_is_an_error(name: str, tmp_path: Path) -> None:
    for given in (("--systems", "prism"), ("--full",), ("--gpus", 2), ("--shard", "1/2")):
        result = bench("study", name, "--dry-run", *given, "-o", tmp_path)
        assert result.exit_code == 2
        assert result.stderr == f"error: {name} has no {given[0]}: its runs are those of its claims\n"


def test_what_is_printed_is_kept_until_seeds_or_inputs_change(counting: Counting, tmp_path: Path) -> None:
    def text(seeds: int | None) -> list[str]:
        return list(drivers.text("counting", seeds, tmp_path, 1, Silent()))

    for seeds in (2, 2, None, 3, 2):
        assert text(seeds) == [f"{seeds or 3} seeds", "and a line"]
    assert counting.calls == [2, 3]
    counting.path.write_text("1,2,3")
    text(2)
    assert counting.calls == [2, 3, 2]
    counting.path.unlink()
    with pytest.raises(UserError, match=r"no file lengths\.csv"):
        text(2)
