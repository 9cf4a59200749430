"""Rows of duels without a card: the law, the rows to their end, going on, and the constants that come of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.calibrate import rounds
from harness.engines.costs import forms, quantities
from probe import __main__ as command
from probe import conduct, dry, duels, law, report
from probe.plan import PLAN, ROWS
from probe.worker import Box, Sample, key
from tests import ROOT
from tests.cases import cases

H200 = ROOT / "results/h200"
D1, D64, PROMPT = (law.Lane(s, prompts=p) for s, p in ((1.498e-4, False), (2.259e-4, False), (1.701e-3, True)))
HALF = D1._replace(bandwidth=0.705, part="64")

TURNS = quantities.quantities("h200")["co_run"]


@cases(
    ("lanes", "slow"),
    [
        ([D1], [1.0]),
        ([D1, D1], [1.60, 1.60]),
        ([D1, D64], [2.006, 1.331]),
        ([D1, PROMPT], [6.250, 1.101]),
        ([D64, PROMPT], [4.414, 1.172]),
        ([PROMPT, PROMPT], [1.92, 1.92]),
        ([D1, D1, PROMPT], [7.050, 7.050, 1.242]),
        ([HALF, HALF._replace(part="68")], [1.65, 1.65]),
        ([HALF, PROMPT._replace(layer_s=2.804e-3, part="68"), D1], [1.60, 1.37, 10.59]),
        ([law.Lane(5.97e-5, prompts=False, duty=0.59)] * 2, [1.191] * 2),
    ],
)
def test_lanes_take_turns(lanes: list[law.Lane], slow: list[float]) -> None:
    assert law.slowdown(lanes) == pytest.approx(slow, abs=6e-3)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVICE", "cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run all rows without a card by the command itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEVICE", "cpu")
        out = tmp_path_factory.mktemp("results")
        assert command.main(["--out", str(out)]) == 0
        yield out / "dry"


def test_every_row_runs_to_its_end_and_every_cell_has_all_its_lanes(results: Path) -> None:
    lines = list(conduct.lines(results / conduct.RAW))
    assert {line["source"]: line["state"] for line in lines if "state" in line} == {row.name: "done" for row in ROWS}
    cells = {(duel.row, duel.text) for duel in report.duelled(report.read(results))}
    names = "turns decodes several mixed gaps partitions shared priorities processes".split()
    rows = {name: getattr(duels, name.upper()) for name in names}
    assert cells == {(row, duels.text(cell)) for row, each in rows.items() for cell in each}
    assert [len(rows[name]) for name in ("turns", "decodes", "partitions")] == [16, 21, 40]
    lanes = [line for line in lines if line.get("quantity") == "lane"]
    assert all(line["seconds"] > 0 and line["facts"]["mean_s"] > 0 for line in lanes)
    assert (results / "README.md").read_text().count(" x and ") >= sum(map(len, rows.values()))


def test_the_constants_of_a_card_come_back(results: Path) -> None:
    table, note = rounds.table(report.read(results), dry.HBM, "a card", TURNS) or ({}, "")
    assert {name: table[name] for name in law.Rounds._fields} == law.Rounds()._asdict()
    assert float(table["error"].split()[0]) < 0.1  # %
    assert table["source"].startswith("a card: duels, 20")
    assert forms.Turns(**table)  # which --table and the committed tables have
    assert note.startswith("co_run: passes 2, decode_fill 0.8, prompt_fill 0.96, apart 1.37")


def test_what_an_h200_measured_gives_its_constants() -> None:
    fitted = rounds.fit(report.read(H200), 4.8e12)
    assert fitted is not None
    assert fitted.rounds.passes == pytest.approx(2.0, abs=0.05)
    assert fitted.rounds.decode_fill == pytest.approx(0.84, abs=0.02)
    assert fitted.rounds.prompt_fill == pytest.approx(0.96, abs=0.03)
    assert len(fitted.whole) == len(fitted.apart) == 18
    assert 0.03 < fitted.error < 0.08


def test_too_few_pairs_give_no_constants() -> None:
    lines = report.read(H200).samples
    alone = [line for line in lines if line["at"].get("other") == ""]
    beside = [line for line in lines if line["at"].get("other") == "prefill"]
    assert rounds.fit(report.Book(alone), 4.8e12) is None
    few = rounds.fit(report.Book([*alone, *beside]), 4.8e12)
    assert few is not None
    assert few.rounds.passes == pytest.approx(2.0, abs=0.2)


@pytest.mark.usefixtures("on_cpu")
@cases("row", [row.name for row in ROWS if not row.alone])
def test_a_row_does_nothing_twice(row: str) -> None:
    run = getattr(duels, row)
    whole: list[Sample] = list(run(Box(math.inf)))
    done = [key(sample.what, sample.params) for sample in whole]
    assert len(set(done)) == len(done)
    assert list(run(Box(math.inf, done))) == []
    again = {key(sample.what, sample.params) for sample in run(Box(math.inf, done[:-1]))}
    assert done[-1] in again
    assert len(again) <= max(map(len, duels.SEVERAL))  # the lanes of one cell


@pytest.mark.usefixtures("on_cpu")
def test_no_mps_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duels, "PROCESSES", [])
    monkeypatch.setattr(duels, "MPS", "no-such-program")
    (only,) = duels.processes(Box(math.inf))
    assert (only.what, only.values) == ("mps", [0.0])


def test_rows_of_duels_fit_a_first_call() -> None:
    boxes = {row.name: row.box_s for row in PLAN.probes}
    assert sum(boxes[row.name] for row in ROWS[:8]) <= 190
    assert json.dumps(duels.PARTITIONS[0][0])  # a lane goes to its process as JSON
