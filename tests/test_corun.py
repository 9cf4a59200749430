"""Measurements of results/h200 beside the simulator: two models at once on a GPU, and runs of engine torch."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from harness.cli.app import main
from harness.policy.types import UserError
from harness.report.text_table import WIDTH, laid
from harness.rows import record
from harness.run import spec as specs
from harness.validate import corun, stored
from tests.cases import cases

FOLDER = Path(__file__).parent.parent / "results" / "h200"
TABLE = str(FOLDER / "h200-measured.toml")


def rows(page: str) -> list[list[str]]:
    """Return the cells of a page's table, without its head."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_the_page_holds_every_pair_that_was_measured_and_names_the_farthest() -> None:
    factors = list(corun.factors(FOLDER, "h200", TABLE))
    assert len(factors) == len(corun.MODES) * len(corun.ACTS) ** 2
    page = (FOLDER / "corun.md").read_text("utf-8")
    lines = rows(page)
    for mode, victim, other, seen, ours in factors:
        assert seen > 1  # nothing is faster beside something
        assert ours > 0.98
        assert abs(np.log(ours / seen)) < 0.19
        line = [corun.MODES[mode], corun.ACTS_TEXT[victim], corun.ACTS_TEXT[other], f"{seen:.2f}", f"{ours:.2f}"]
        assert line in lines
    mode, victim, other, seen, _ = max(factors, key=lambda row: row[3] / row[4])
    for mode_, limit in (("plain", 0.13), ("split", 0.10)):
        off = [np.log(ours / seen) for of, _, _, seen, ours in factors if of == mode_]
        assert np.sqrt(np.mean(np.square(off))) <= limit
    worst = f"{corun.ACTS_TEXT[victim]} beside {corun.ACTS_TEXT[other]}, {corun.MODES[mode]}: it takes {seen:.2f}"
    assert worst in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= WIDTH


def test_two_equal_decodes_share_the_bytes_of_a_card() -> None:
    alone_s, beside_s = (
        corun.unit_s("decode64", other, split=False, gpu="h200", table=TABLE) for other in ("", "decode64")
    )
    assert 1.4 < beside_s / alone_s <= 1.60  # twice f, .80, less what host time overlaps


def test_a_folder_without_that_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing was measured of two models at once"):
        corun.beside(tmp_path, None)


def test_the_command_compares_the_stored_runs_of_a_folder(tmp_path: Path) -> None:
    folder, page = tmp_path / "runs", tmp_path / "page.md"
    static = next((FOLDER / "torch").glob("static-*"))
    shutil.copytree(static, folder / static.name)
    done = CliRunner().invoke(main, ["validate", str(folder), "--table", TABLE, "--page", str(page)])
    assert done.exit_code == 0, done.output
    kept = next(row for row in rows((FOLDER / "torch/README.md").read_text("utf-8")) if row[0] == "static")
    assert rows(page.read_text("utf-8")) == [kept]  # the shipped page is what the command finds
    assert done.stdout.startswith("The simulator is off by at most 2 points of attainment in these 1 runs.")
    strict = stored.beside(folder, TABLE, "absolute:ttft=1ms,tpot=1ms", lambda *_: None)
    assert strict.rows[1][2] == "0.0 / 0.0"
    assert strict.page("x", partial(laid, markdown=True)).count("Each cell: measured / simulated.") == 1


def test_the_requests_of_a_warm_up_are_not_judged() -> None:
    run = next((FOLDER / "whole/runs").glob("static-*"))
    spec, every = specs.stored(record.meta(run)["spec"]), record.read(run).column("arrival_ns").to_numpy() / 1e9
    judged = stored.offered(run, spec)
    assert sorted(judged.arrival_s) == sorted(every[(every >= 0.0) & (every < 16.0)])
    assert 0 < len(judged) < len(every)


@cases(("asked", "message"), [
    ("", "holds stored runs, which need their machine's cost table: --table FILE"),
    (f"--table {TABLE} --slo 5xP95", "--slo 5xP95 needs a base; stored runs are judged by seconds"),
    (f"--table {TABLE} --seeds 2", "--seeds is for --engine NAME, which runs servers"),
    (f"--table {TABLE} --shape x.toml", "--shape is for files of measured runs"),
])  # fmt: skip
def test_stored_runs_are_refused_what_they_cannot_be_asked(asked: str, message: str) -> None:
    done = CliRunner().invoke(main, ["validate", str(FOLDER / "torch"), *asked.split()])
    assert done.exit_code == 2
    assert message in done.stderr
