"""Figures come from Parquet alone, to the byte, and keep each system's look."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

import plots
from harness.cli import lists
from harness.policy.types import UserError
from harness.rows import record, tidy
from plots import fig_compare, style
from tests import ROOT
from tests.bench import bench, ok
from tests.cases import cases
from tests.harness.study.study_table import counted

PLAIN = record.plain(tidy.TABLE_SCHEMA)


def sweep(*runs: dict[str, Any]) -> pa.Table:
    """Return made-up rows of attainment.parquet: a run is a few columns and its pooled values by definition."""
    return pa.Table.from_pylist(rows(*runs), schema=PLAIN).cast(tidy.TABLE_SCHEMA)


def rows(*runs: dict[str, Any], windows: int = 1) -> list[dict[str, Any]]:
    """Return rows of runs, each of which stands for windows of 900 requests in all, which miss alike.

    A run may have `windows` of its own.
    """
    lines: list[dict[str, Any]] = []
    for run, k in [(each, k) for each in runs for k in range(each.get("windows", windows))]:
        count = run.get("windows", windows)
        about = {
            "run": "r",
            "label": "static",
            "trace": "t",
            "models": "heavy8",
            "gpu": "h100",
            "gpus": 2,
            "seed": 0,
            "scaling": "rotate",
            "rate_scale": 1.0,
            "slo": "5xP95",
            "tier": "replayed",
            "fidelity": "simulated",
            "plan_origin": "trace",
        } | {k: v for k, v in run.items() if k not in {"values", "windows"}}
        about |= {"system": about["label"], "over": run.get("over", "pooled"), "n": 900 // count}
        about["seed"] = count * about["seed"] + k
        lines += [
            about | {"definition": name, "value": value} | counted(name, value, about)
            for name, value in run["values"].items()
        ]
    return lines


def values(both: float, ttft_s: float = 0.1, rate: float = 1.0) -> dict[str, float]:
    shares = {"both": both, "ttft": both, "tpot": 1.0}
    return shares | {"ttft_p95_s": ttft_s, "tpot_p95_s": 0.02, "offered_rps": 1.5 * rate}


ATTAINED = {(rate, seed): 1 - rate / 40 - seed / 100 for rate in (1.0, 2.0, 4.0, 8.0, 16.0) for seed in range(3)}
GRID = sweep(
    *(
        {"label": label, "gpus": gpus, "rate_scale": rate, "seed": seed, "values": values(share, rate=rate)}
        for label, gpus in [("static", 2), ("prism", 2), ("dedicated", 8)]
        for (rate, seed), share in ATTAINED.items()
    ),
    {"label": "qlm", "infeasible": "70B does not fit", "values": {"both": 0.0, "ttft": 0.0, "tpot": 0.0}},
    {"label": "swap", "rate_scale": 16.0, "values": values(0.1, math.inf, 16.0)},
    {"label": "pdmux", "skipped": "sim cannot Run.sms", "values": dict.fromkeys(["both", "ttft", "tpot"])},
)


def folder(path: Path, table: pa.Table) -> Path:
    record.write_table(path / record.SWEEP, table, {})
    return path


FOOTERS: dict[str, dict[str, Any]] = {
    "compare": {"study": "comparison", "layout": "table", "runs": {}},
    "study": {"study": "fig7", "layout": "lines", "runs": {}},
}


def test_a_figure_says_what_it_draws(tmp_path: Path) -> None:
    for name, facts in FOOTERS.items():
        record.write_table(tmp_path / name / record.SWEEP, GRID, facts)
        assert [list(part) for part in plots.of(tmp_path / name)] == [[name], []]
    record.write_table(tmp_path / "compare" / record.SENSITIVITY, GRID, {})
    assert list(plots.of(tmp_path / "compare")[0]) == ["compare", "tornado"]
    assert [name for name, what in lists.listing(plots) if not what.endswith(".")] == []


MINE = '''"""Nothing, twice."""

def draws(folder):
    return (folder / "attainment.parquet").is_file()


def render(folder, stem, command, note=""):
    stem.with_suffix(".csv").write_text(command)
    return [stem.with_suffix(".csv")]
'''


def added(monkeypatch: pytest.MonkeyPatch, place: Path, figures: dict[str, str]) -> None:
    """Let a folder with these figures, by name, stand for plots/."""
    place.mkdir()
    for name, text in figures.items():
        (place / f"fig_{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"plots.fig_{name}", raising=False)
    monkeypatch.setattr(plots, "FOLDER", place)
    monkeypatch.setattr(plots, "__path__", [str(place)])


def test_a_figure_is_a_file_and_a_broken_one_costs_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added(
        monkeypatch,
        tmp_path / "plots",
        {
            "mine": MINE,
            "raises": "def draws(folder): ...\n1 / 0\n",
            "half": "def draws(folder): ...\n",
            "of_points": "def render(points): ...\n",  # drawn by a command that has its points
        },
    )
    broken = {
        "half": "plots/fig_half.py is broken: it has no function `render`",
        "raises": "plots/fig_raises.py is broken: ZeroDivisionError: division by zero",
    }
    assert dict(lists.listing(plots)) == {"mine": "Nothing, twice.", **broken}
    made = folder(tmp_path / "sweep-3f9c", GRID)
    done = bench("plot", made, "-o", tmp_path / "out.pdf")
    assert (done.exit_code, done.stderr.splitlines()) == (0, list(broken.values()))
    assert (tmp_path / "out.csv").read_text().startswith("bench plot ")
    empty = bench("plot", tmp_path)
    assert empty.exit_code == 2
    assert empty.stderr.splitlines()[-1].endswith(": nothing that a figure draws (bench list figures)")


RENDER = 'render(folder, stem, command, note="")'
RAISES = {
    "in its code": (RENDER, "x = {}; return x['ttft']", "line 8: `render` raised KeyError: 'ttft'"),
    "by its arguments": (
        "render(folder)",
        "return []",
        "line 7: `render` raised TypeError: render() takes 1 positional argument but 4 were given",
    ),
    "by its answer": (RENDER, "pass", "line 7: `render` raised TypeError: 'NoneType' object is not iterable"),
}


@cases("raises", RAISES)
def test_a_figure_that_raises_is_one_line_and_the_others_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: tuple[str, str, str]
) -> None:
    signature, body, line = raises
    added(
        monkeypatch,
        tmp_path / "plots",
        {
            "bad": f"{MINE.partition('def render')[0]}def {signature}:\n    {body}\n",
            "mine": MINE,
            "unsure": 'def draws(folder):\n    raise ValueError("which?")\n\n\nrender = draws\n',
        },
    )
    monkeypatch.setattr("harness.cli.plot.FIGURES", tmp_path)
    made = folder(tmp_path / "sweep-3f9c", GRID)
    done = bench("plot", made)
    unsure = "plots/fig_unsure.py, line 2: `draws` raised ValueError: which?"
    assert (done.exit_code, done.stderr.splitlines()) == (2, [unsure, f"error: plots/fig_bad.py, {line}"])
    assert (tmp_path / "mine-3f9c.csv").is_file()


def test_the_example_of_a_figure_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (ROOT / "docs" / "contributing.md").read_text("utf-8")
    _, opened, rest = document.partition("This is `plots/fig_met.py`:\n\n```python\n")
    assert opened
    added(monkeypatch, tmp_path / "plots", {"met": rest.partition("```")[0]})
    made = folder(tmp_path / "sweep-3f9c", GRID)
    assert len(ok("plot", made, "-o", tmp_path / "met").splitlines()) == 4
    points = pd.read_csv(tmp_path / "met.csv", comment="#").set_index("label")["value"]
    assert points["prism"] == pytest.approx(np.mean([*ATTAINED.values()]))
    assert (tmp_path / "met.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.full
def test_a_reader_that_leaves_costs_no_figure(tmp_path: Path) -> None:
    """As `bench plot | head -0`: the first line has no reader, and the figure is drawn after it."""
    record.write_table(tmp_path / "x-3f9c" / record.SWEEP, GRID, FOOTERS["compare"])
    command = (sys.executable, "-m", "harness", "plot", tmp_path / "x-3f9c", "-o", tmp_path / "out", "--format", "svg")
    for stderr in (subprocess.PIPE, subprocess.STDOUT):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=stderr, cwd=ROOT, check=False)
        os.close(writer)
        assert (done.returncode, done.stderr or b"") == (0, b"")
        (tmp_path / "out.svg").unlink()


def test_equal_points_are_equal_bytes_without_a_date_and_with_all_fonts(tmp_path: Path) -> None:
    made = folder(tmp_path / "sweep", GRID)
    shuffled = GRID.take(pa.array(np.random.default_rng(0).permutation(len(GRID))))
    again = folder(tmp_path / "again", shuffled)
    first = fig_compare.render(made, tmp_path / "out" / "compare-3f9c", "bench plot x")
    mpl.rcParams["font.size"] = 30  # another's settings change nothing
    second = fig_compare.render(again, tmp_path / "two" / "compare-3f9c", "bench plot x")
    assert [p.name for p in first] == ["compare-3f9c.pdf", "compare-3f9c.png", "compare-3f9c.csv"]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    assert mpl.rcParams["font.size"] == 30
    mpl.rcdefaults()
    pdf = first[0].read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


def test_the_csv_holds_the_points_and_the_command(tmp_path: Path) -> None:
    paths = fig_compare.render(folder(tmp_path / "sweep", GRID), tmp_path / "f", "bench plot x")
    assert paths[2].read_text().splitlines()[0] == "# bench plot x"
    points = pd.read_csv(paths[2], comment="#")
    at = points[(points["series"] == "static") & (points["rate_scale"] == 4) & (points["definition"] == "both")].iloc[0]
    assert (at["mean"], at["n"]) == (pytest.approx(0.89), 3)
    assert at["low"] < at["mean"] < at["high"]
    assert set(points["series"]) == {"static", "prism", "dedicated (8 GPUs)", "qlm", "swap"}  # none skipped


def words(table: pa.Table) -> str:
    with style.theme():
        figure = fig_compare.draw(table, "2 runs are stale.")
        texts = [t.get_text() for t in figure.texts] + [t.get_text() for x in figure.legends for t in x.get_texts()]
        texts += [t.get_text() for axis in figure.axes for t in axis.get_yticklabels()]
    return " ".join(" ".join(texts).split())


def test_a_figure_says_what_it_shows() -> None:
    text = words(GRID)
    facts = """t (replayed) | heavy8 | 2 x h100 | simulated | SLO 5 x P95 alone | 1 to 3 seeds
        | oracle: plans know the trace | requests per second (rate scale 1 = 1.5) | dedicated (8 GPUs)
        | Not drawn | never end | 95 % interval | 2 runs are stale"""
    for fact in map(str.strip, facts.split("|")):
        assert fact in text, fact
    assert "Rates are scaled by rotate." in fig_compare.full_caption(GRID, "", fig_compare.points(GRID))
    single = words(sweep({"values": values(1.0)}))
    assert "one run, no interval" in single
    assert "Hollow" not in single
    assert "bound" not in single


def test_a_figure_says_which_caps_of_the_engine_bound() -> None:
    shares = ((1.0, 0.0), (2.0, 0.02), (4.0, 0.25))
    text = words(sweep(*({"rate_scale": x, "values": values(1.0, rate=x) | {"cap_bound": y}} for x, y in shares)))
    assert "The engine's batch_cap was reached in more than 1 % of steps: static up to 25 %." in text


def test_fidelities_never_mix_silently() -> None:
    text = words(sweep({"values": values(1.0)}, {"label": "prism", "fidelity": "emulated", "values": values(0.5)}))
    assert "static (simulated)" in text
    assert "prism (emulated)" in text


def xs(line: Line2D) -> list[float]:
    return list(np.asarray(line.get_xdata(), np.float64))


def test_what_has_no_room_is_not_drawn_and_infinite_is_at_the_edge() -> None:
    with style.theme():
        figure = fig_compare.draw(GRID)
    axes = figure.axes
    assert "white" not in {line.get_markerfacecolor() for line in axes[0].lines if xs(line)}
    drawn = {tuple(point) for line in axes[0].lines for point in np.asarray(line.get_xydata()).tolist()}
    assert (1.5, 0.0) not in drawn  # qlm has no room at rate 1
    assert "Not drawn, for their models do not fit: qlm." in words(GRID)
    assert "qlm" not in [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    edge = [line for line in axes[3].lines if line.get_transform() == axes[3].get_xaxis_transform() and xs(line)]
    assert [xs(line) for line in edge] == [[24.0]]


@cases(
    "table",
    [
        sweep({"values": values(1.0)}),
        sweep({"values": values(0.0, math.inf)}),
        sweep({"values": values(0.5)}, {"rate_scale": 2.0, "values": values(math.nan)}),
    ],
)
def test_small_sweeps_are_drawn(tmp_path: Path, table: pa.Table) -> None:
    assert len(fig_compare.render(folder(tmp_path / "s", table), tmp_path / "f", "x")) == 3


def bars(seeds: int) -> list[Axes]:
    runs = [
        {"label": label, "seed": seed, "values": values(both - seed / 100, ttft_s)}
        for label, both, ttft_s in (("prism", 0.8, 0.2), ("muxserve:plusplus", 0.5, math.inf))
        for seed in range(seeds)
    ]
    with style.theme():
        return fig_compare.draw(sweep(*runs)).axes


def test_a_single_rate_has_bars_with_names_and_numbers_from_0_on() -> None:
    first, *_, ttft, _ = bars(1)
    assert [label.get_text() for label in first.get_yticklabels()] == ["muxserve++", "prism"]
    assert [bar.get_width() for bar in first.patches if isinstance(bar, Rectangle)] == pytest.approx([50.0, 80.0])
    assert [text.get_text() for text in first.texts] == ["50", "80"]
    assert [text.get_text() for text in ttft.texts] == ["over 5 % never end", "0.2"]
    assert first.get_xlim()[0] == 0


@cases("seeds", [1, 2, 3, 4])
def test_a_bar_has_an_interval_from_three_seeds_on(seeds: int) -> None:
    assert [len(axis.lines) for axis in bars(seeds)[:3]] == [2 * (seeds >= 3)] * 3


def test_lines_that_lie_on_each_other_are_nested_and_what_is_below_the_axis_is_named() -> None:
    runs = [
        {"label": label, "rate_scale": x, "seed": seed, "values": values(both - x / 100, rate=x)}
        for label, both in (("elastic", 1.0), ("prism", 1.0), ("static", 0.97), ("qlm", 0.5))
        for x in (1.0, 2.0, 4.0)
        for seed in range(3)
    ]
    with style.theme():
        figure = fig_compare.draw(sweep(*runs))
    looks = {look.color: label for label, look in style.SYSTEMS.items()}
    wide = {
        looks[color]: line.get_linewidth()
        for line in figure.axes[0].lines
        if (color := str(line.get_color())) in looks and line.get_linestyle() != "None"
    }
    assert wide["prism"] == wide["elastic"] + fig_compare.EDGE  # elastic lies on it
    assert wide["static"] == wide["elastic"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["below 90 %: qlm"]


def test_nothing_to_draw_is_one_line(tmp_path: Path) -> None:
    skipped = sweep({"skipped": "no torch", "values": {"both": None}})
    with pytest.raises(UserError, match="every run of this sweep was skipped"):
        fig_compare.render(folder(tmp_path, skipped), tmp_path / "f", "x")


# ------------------------------------------------------------------ looks


def test_the_caption_says_how_near_a_synthetic_trace_comes() -> None:
    runs = sweep({"tier": "synthetic", "fit": "off: idle P75 +48 %", "values": values(1.0)}).to_pandas()
    assert style.caption(runs, [5]).startswith("t (synthetic, fit off: idle P75 +48 %) · models: heavy8 · ")
    assert style.caption(sweep({"values": values(1.0)}).to_pandas(), [5]).startswith("t (replayed) · models: heavy8 · ")


def test_the_caption_of_a_simulated_figure_says_that_its_tails_are_optimistic() -> None:
    runs = sweep({"values": values(1.0)}).to_pandas()
    assert set(runs["fidelity"]) == {"simulated"}
    assert style.caption(runs, [5], "A note.").endswith(f". A note. {style.TAILS}")
    assert style.TAILS not in style.caption(runs.assign(fidelity="real"), [5])
