"""Measurements of results/h200 beside the simulator: two models at once on a GPU, and runs of engine torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.answers.table import WIDTH, laid
from harness.policy.types import UserError
from harness.rows import record
from harness.run import spec as specs
from harness.validate import corun, prediction, stored
from tests import ROOT
from tests.bench import ok
from tests.cases import cases
from tests.harness.engines.servers.test_stub import fails

FOLDER = ROOT / "results" / "h200"
TABLE = str(FOLDER / "h200-measured.toml")


def rows(page: str) -> list[list[str]]:
    """Return the cells of a page's table, without its head."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_the_page_holds_both_lanes_of_every_pair_that_was_measured_and_names_the_farthest() -> None:
    pairs = list(corun.pairs(FOLDER, "h200", TABLE))
    assert len(pairs) == len(corun.MODES) * len(corun.ACTS) ** 2
    page = (FOLDER / "corun.md").read_text("utf-8")
    lines = rows(page)
    for pair in pairs:
        assert min(pair.measured) > 1  # nothing is faster beside something
        assert min(pair.simulated) > 0.98
        numbers = [f"{x:.2f}" for both in zip(pair.measured, pair.simulated, strict=True) for x in both]
        assert [corun.MODES[pair.mode], *(corun.ROW_TEXT[act] for act in pair.acts), *numbers] in lines
    assert corun.rms(pairs, "plain") <= 0.13
    assert corun.rms(pairs, "split") <= 0.10
    worst = max(pairs, key=lambda pair: pair.worst)
    seen, ours = max(zip(worst.measured, worst.simulated, strict=True), key=lambda lane: lane[0] / lane[1])
    assert f"{seen:.1f} times as long as alone, and {ours:.1f} times in" in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= WIDTH


def test_a_folder_without_that_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing was measured of two models at once"):
        corun.compare(tmp_path, None)


def test_the_command_compares_the_stored_runs_of_a_folder(tmp_path: Path) -> None:
    folder, page = tmp_path / "runs", tmp_path / "page.md"
    static = next((FOLDER / "torch").glob("static-*"))
    shutil.copytree(static, folder / static.name)
    text = ok("validate", folder, "--table", TABLE, "--page", page)
    kept = next(row for row in rows((FOLDER / "torch/README.md").read_text("utf-8")) if row[0] == "static")
    assert rows(page.read_text("utf-8")) == [kept]  # the shipped page is what the command finds
    assert text.startswith("The simulator is off by at most 2 points of attainment in these 1 runs.")
    strict = stored.compare(folder, TABLE, "absolute:ttft=1ms,tpot=1ms", lambda *_: None)
    assert strict.rows[1][2] == "0.0 / 0.0"
    assert strict.page("x", laid).count("Each cell: measured / simulated.") == 1


def test_the_requests_of_a_warm_up_are_not_judged() -> None:
    run = next((FOLDER / "whole/runs").glob("static-*"))
    spec, every = specs.stored(record.meta(run)["spec"]), record.read(run).column("arrival_ns").to_numpy() / 1e9
    judged = prediction.offered(run, spec)
    assert sorted(judged.arrival_s) == sorted(every[(every >= 0.0) & (every < 16.0)])
    assert 0 < len(judged) < len(every)


@cases(
    ("asked", "message"),
    [
        ("", "holds stored runs, which need their machine's cost table: --table FILE"),
        (f"--table {TABLE} --slo 5xP95", "--slo 5xP95 needs a base; stored runs are judged by seconds"),
        (f"--table {TABLE} --seeds 2", "--seeds is for --engine NAME, which runs servers"),
        (f"--table {TABLE} --shape x.toml", "--shape is for files of measured runs"),
    ],
)
def test_stored_runs_are_refused_what_they_cannot_be_asked(asked: str, message: str) -> None:
    assert message in fails("validate", FOLDER / "torch", *asked.split())
