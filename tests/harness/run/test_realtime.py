"""Forecasts of runs on an engine in real time: told before they begin, and while they go."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.run import realtime, sweep
from harness.run.realtime import Span
from harness.run.resolve import resolve
from harness.run.spec import Spec
from harness.study.bases import ahead
from tests.bench import ok
from tests.cases import cases
from tests.harness.run.test_sweep import Heard

# The simulator as an engine whose seconds are real would say them; what it runs takes none.
REAL = """
from harness.engines.sim.engine import Sim

class Real(Sim):
    wall_clock, exclusive, measured_on = True, True, {"host": "here"}

def make(config, options, machine):
    return Real(config, options, machine)
"""
POOR = """
    made = Real(config, options, machine)
    made.offers = {}
    return made
"""


@pytest.fixture
def real(tmp_path: Path) -> Spec:
    """Return a spec on such an engine."""
    (path := tmp_path / "real.py").write_text(REAL)
    return Spec(
        "static",
        engine=str(path),
        trace="sample",
        models="llama-3.2-1b*2",
        slo="",
        noise=0.0,
        warmup_s=5.0,
        window_s=20.0,
    )


@cases(
    ("spans", "says"),
    [
        ([Span(60, 60, 60)] * 4, "4 runs x (60 s of warm-up + 60 s + up to 60 s of drain): 8 to 12 min"),
        ([Span(0, 30, 0)], "1 run x (30 s): 30 s"),
        ([Span(0, 30, math.inf)] * 2, "2 runs x (30 s + drain): at least 60 s"),
        ([Span(0, 30, 10), Span(0, 60, 20)], "2 runs: 90 s to 2 min"),
        ([Span(5, math.inf, math.inf)], "1 run x (5 s of warm-up + its requests + drain): at least 5 s"),
        ([Span(2, 10, 1024)] * 180, "180 runs x (2 s of warm-up + 10 s + up to 1024 s of drain): 36 min to 51.8 h"),
    ],
)
def test_runs_are_added_up(spans: list[Span], says: str) -> None:
    assert realtime.duration(spans) == says


def test_only_runs_in_real_time_have_a_span(real: Spec) -> None:
    assert realtime.span(resolve(replace(real, engine="sim"))) is None
    ready = resolve(real)
    assert realtime.span(ready) == Span(5.0, 20.0, math.inf)
    assert realtime.span(ready, 8.0) == Span(5.0, 20.0, 8.0)
    assert realtime.span(resolve(replace(real, drain_s=3.0)), 8.0) == Span(5.0, 20.0, 3.0)
    loop = resolve(replace(real, trace="closed+clients=2", window_s=None, warmup_s=None))
    span = realtime.span(loop)
    assert span is not None
    assert (span.window_s, span.most_s) == (math.inf, math.inf)


def test_what_an_engine_lacks_takes_no_time(real: Spec, tmp_path: Path) -> None:
    assert realtime.lacking(resolve(real)) == ""
    text = Path(real.engine).read_text("utf-8")
    (tmp_path / "poor.py").write_text(text.replace("    return Real(config, options, machine)", POOR))
    poor = replace(real, engine=str(tmp_path / "poor.py"), system="elastic")
    assert realtime.lacking(resolve(poor)).startswith("no option ")


def test_a_rule_in_seconds_tells_the_drain_and_one_by_base_runs_their_time(real: Spec, tmp_path: Path) -> None:
    forecast = ahead(real, "absolute:ttft=1,tpot=0.1", tmp_path)
    assert (forecast.drain_s or 0.0) > 10 * 1.0
    assert forecast.bases == []
    two = ahead(real, "5xP95", tmp_path)
    assert (two.drain_s, len(two.bases)) == (None, 5)
    assert ahead(replace(real, engine="sim"), "5xP95", tmp_path).bases == []


def test_a_sweep_in_real_time_tells_each_run(real: Spec, tmp_path: Path) -> None:
    heard, out = Heard(), tmp_path / "out"
    specs = [replace(real, seed=seed, drain_s=15.0) for seed in (0, 1)]
    sweep.sweep([*specs, replace(real, engine="sim")], out, workers=1, teller=heard)
    first, *runs = heard.lines
    assert "2 runs x (5 s of warm-up + 20 s + up to 15 s of drain): 50 to 80 s of real time" in first
    assert [re.sub(r": \d+ s", ": N s", line) for line in runs] == [
        "1 of 2: static at 1 x, seed 0: N s; 25 to 40 s left",
        "2 of 2: static at 1 x, seed 1: N s",
    ]
    again = Heard()
    sweep.sweep(specs, out, workers=1, teller=again)
    assert again.lines == []


def test_a_dry_run_knows_real_windows(real: Spec, tmp_path: Path) -> None:
    common = ("compare", "--systems", "static,chunked", "--engine", real.engine, "--models", real.models, "--trace",
              "sample", "--seeds", "2", "--set", "window_s=60", "--dry-run", "-o", tmp_path / "out")  # fmt: skip
    told = ok(*common, "--rate-scale", "1", "--set", "drain_s=60", "--slo", "absolute:ttft=1,tpot=0.1").splitlines()
    assert told[-1].startswith("4 runs x (60 s of warm-up + 60 s + up to 60 s of drain): 8 to 12 min of real time")
    assert [line.split()[-4:] for line in told[1:3]] == [["4", "to", "6", "min"]] * 2
    told = ok(*common).splitlines()
    assert told[-1].startswith("up to 56 runs x (60 s of warm-up + 60 s + drain): at least 112 min of real time if all")
    assert told[-2].startswith("SLO 5xP95: 5 base runs unless they are stored, 5 runs x (")
    assert not (tmp_path / "out").exists()
