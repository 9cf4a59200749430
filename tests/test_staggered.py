"""The staggered ramps beside a measured run: its file, what is derived from it, and how aims are judged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from harness.cli.app import main
from harness.engines.costs import quantities
from harness.policy.types import GIB, UserError
from harness.validate import staggered
from harness.validate.staggered import Interval, congested, files, first_instance, knee, notes, ours, process, read
from plots import fig_staggered, style
from tests.cases import cases

HEADER = ",".join(staggered.COLUMNS)
ROW = "sweep1024-baseline,7,25,256,1024,1,625,590000,3000,60,12000,20,24000"
MEASURED = os.environ.get("MEASURED_DIR", "")


def file(folder: Path, *rows: str) -> Path:
    path = folder / "mine.csv"
    path.write_text("\n".join((HEADER, *rows)) + "\n", "utf-8")
    return path


def alone(held: float, peaks: Sequence[int]) -> pd.DataFrame:
    """What the first instance of a static split would have measured if processes held so much."""
    host = quantities.host(staggered.HOST, staggered.GPU)
    parts = [ours("static", peak, 943.0, held, models=1, host=host) for peak in peaks]
    return pd.concat(parts, ignore_index=True).assign(requests=1.0, output_tokens=943.0)


def test_a_row_is_read_in_seconds(tmp_path: Path) -> None:
    path = file(tmp_path, ROW, ROW.replace("baseline", "kvcached"))
    assert files(tmp_path) == files(path) == [path]
    rows = read(path)
    assert rows["system"].tolist() == ["elastic", "static"]
    assert rows[["peak", "instance", "requests"]].iloc[0].tolist() == [25, 1, 625]
    assert rows[list(staggered.METRICS)].iloc[0].tolist() == pytest.approx([3.0, 0.06, 12.0, 0.02, 24.0])
    assert staggered.mean_output(rows) == 590000 / 625


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", "utf-8")
    assert files(tmp_path) == []


@cases(
    ("row", "message"),
    [
        (ROW.replace("3000", ""), "missing or not above 0"),
        (ROW.replace("3000", "fast"), "fast"),
        (ROW.replace("3000", "-1"), "missing or not above 0"),
        (ROW.replace("-baseline", "-best"), "does not end in -baseline or -kvcached"),
        (ROW.replace(",7,", ",14,"), "mine.csv:2: not a 7B"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(file(tmp_path, row))


def test_the_memory_of_a_process_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staggered, "FEW", (26, 28))
    found = process(alone(7.0 * GIB, staggered.FEW))
    assert found.low <= found.mean <= found.high
    assert np.array(found) / GIB == pytest.approx(7.0, abs=0.15)


def test_more_memory_of_a_process_is_less_for_requests() -> None:
    small, large = (ours("static", 30, 943.0, gib * GIB, models=1)["mean_ttft_s"].iloc[0] for gib in (5, 8))
    assert large > 1.5 * small


def test_elastic_memory_takes_what_a_static_split_leaves_unused() -> None:
    static, elastic = (ours(name, 28, 943.0, 7.5 * GIB) for name in ("static", "elastic"))
    assert len(static) == len(elastic) == staggered.MODELS
    assert static["mean_ttft_s"].min() > 2.0
    assert elastic["p99_ttft_s"].max() < 1.0


def frame(ttft_s: dict[str, float]) -> pd.DataFrame:
    """Made-up points: a mean and median TTFT by who, for both systems at all peaks; P99s are congested from 35 on."""
    return pd.DataFrame(
        [
            {"who": who, "system": name, "peak": peak, "instance": k, "mean_ttft_s": s, "median_ttft_s": s / k,
             "p99_ttft_s": s * (peak >= 35), "mean_tpot_s": 0.02, "mean_e2e_s": 1.0}
            for who, s in ttft_s.items()
            for name in ("static", "elastic")
            for peak in (25, 30, 34, 35, 36, 40)
            for k in range(1, 7)
        ]
    )  # fmt: skip


def test_aims_are_met_within_their_bounds_only() -> None:
    held = Interval(GIB, 2 * GIB, 3 * GIB)
    near = frame({"measured": 4.0, "ours": 5.0, "low": 5.1, "high": 4.9, "fluid": 1.0})
    assert congested(near, "measured", 30) == 3  # 4, 2 and 1.33 s; 4 / 4 is not above 1
    assert congested(near, "ours", 30) == 4
    assert knee(near, "ours") == 35
    lines = notes(near, held)
    assert "static mean TTFT at peak 40: measured 4.0 s, ours 5.0 [4.9 - 5.1], fluid 1.0: met" in lines[4]
    assert not any("not met" in line or "not modelled" in line for line in lines)
    far = notes(frame({"measured": 4.0, "ours": 5.3, "low": 5.3, "high": 5.3, "fluid": 1.0}), held)
    missed = [line.partition(":")[0] for line in far if "not met" in line]
    means = [f"static mean TTFT at peak {peak}" for peak in (25, 30, 36, 40)]
    assert missed == means + [f"static instances with a median TTFT above 1 s at peak {peak}" for peak in (25, 30)]
    assert "not modelled" in far[-1]


def test_the_figure_shows_both_systems_by_peak_and_by_instance() -> None:
    points = frame({"measured": 4.0, "ours": 5.0, "low": 5.1, "high": 4.9, "fluid": 1.0})
    with style.theme():
        figure = fig_staggered.draw(points)
    assert [len(axes.get_lines()) for axes in figure.axes] == [4, 4, 10, 10]
    said = " ".join(str(figure.get_supxlabel()).split())
    assert "is a guess" in said


def test_the_command_says_how_the_aims_came_out(tmp_path: Path) -> None:
    rows = [
        f"sweep1024-{name},7,{peak},256,1024,{k},{peak**2},{943 * peak**2},{ms},60,12000,20,24000"
        for name, ms in (("baseline", 3000), ("kvcached", 60))
        for peak in range(25, 30)
        for k in range(1, 7)
    ]
    done = CliRunner().invoke(main, ["validate", str(file(tmp_path, *rows)), "--no-plot"])
    assert done.exit_code == 0, done.output
    assert "static mean TTFT at peak 25: measured 3.0 s, ours" in done.output
    assert "a guess: the card is not named" in done.output


@pytest.mark.skipif(not MEASURED, reason="MEASURED_DIR is not set")
def test_the_committed_profile_explains_the_rows_that_it_was_fitted_on() -> None:
    (path,) = files(Path(MEASURED))
    rows, host = read(path), quantities.host(staggered.HOST, staggered.GPU)
    output = staggered.mean_output(rows)
    metrics = ["mean_ttft_s", "mean_tpot_s", "mean_e2e_s"]
    want = np.stack([first_instance(rows, "elastic", staggered.ALONE, metric) for metric in metrics], axis=1)
    runs = [ours("elastic", peak, output, GIB, models=1, host=host) for peak in staggered.ALONE]
    error = np.abs(np.stack([run.loc[0, metrics].to_numpy(np.float64) for run in runs]) / want - 1)
    assert np.median(error) == pytest.approx(0.033, abs=0.002)
    assert np.quantile(error, 0.95) == pytest.approx(0.061, abs=0.002)
