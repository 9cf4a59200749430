"""Studies that a module of their own runs: one table for all of them, and what they print is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from harness.cli.app import main
from harness.study import receipt
from harness.study.ledger import DRIVERS
from tests.cases import cases


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
    for given in (("--systems", "prism"), ("--gpus", 2), ("--shard", "1/2")):
        result = bench("study", name, "--dry-run", *given, "-o", tmp_path)
        assert result.exit_code == 2
        assert result.stderr == f"error: {name} has no {given[0]}: its runs are those of its claims\n"


@cases("name", list(DRIVERS))
def test_full_adds_nothing_to_a_driver_and_says_so(name: str, tmp_path: Path) -> None:
    plain, full = (bench("study", name, "--dry-run", *given, "-o", tmp_path) for given in ((), ("--full",)))
    assert full.exit_code == plain.exit_code == 0
    assert full.stdout == plain.stdout
    assert full.stderr == f"{name} runs all that it has: --full adds nothing\n"


def test_what_is_printed_is_kept_until_seeds_or_inputs_change(tmp_path: Path) -> None:
    lengths, calls = tmp_path / "lengths.csv", list[int]()

    def text(seeds: int) -> list[str]:
        def told() -> list[str]:
            calls.append(seeds)
            return [f"{seeds} seeds", "and a line"]

        return receipt.answered(tmp_path, seeds, [lengths], told)

    lengths.write_text("1,2")
    for seeds in (2, 2, 3, 2):
        assert text(seeds) == [f"{seeds} seeds", "and a line"]
    assert calls == [2, 3]
    lengths.write_text("1,2,3")
    text(2)
    assert calls == [2, 3, 2]


@cases("name", ["muxserve", "weaver"])
def test_a_missing_input_has_a_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("PROFILES_DIR", "TRACES_DIR"):
        monkeypatch.setenv(folder, str(tmp_path))
    result = bench("study", name, "-o", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: no file ")
