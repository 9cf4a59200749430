"""Statistics of a trace, and the synthetic one that it is most like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plots import fig_trace
from traces import resembles, schema
from traces.load import Trace, of_table, trace
from traces.stats import stats
from traces.synthetic import SIZED


def regime(name: str, models: int, span_s: float = 1800.0) -> str:
    facts = stats(trace(f"{name}+models={models}+span_s={span_s:g}" if name in SIZED else name))
    return resembles.likenesses(facts)[0].regime


def test_a_draw_resembles_its_own_regime() -> None:
    assert regime("hyperbolic-like", 8).startswith("hyperbolic-like")
    assert regime("aegaeon-like", 8) == "aegaeon-like"
    assert regime("arena-like", 27) == "arena-like"
    facts = stats(trace("sample"))
    assert resembles.sentence(facts, resembles.likenesses(facts)) == "compared with no regime: under 600 s"


def composed(arrival_s: list[float], model: list[str], span_s: float) -> Trace:
    n = len(arrival_s)
    columns = {
        "request_id": np.arange(n),
        "arrival_s": arrival_s,
        "model": model,
        "prompt_tokens": np.ones(n, int),
        "output_tokens": np.ones(n, int),
    }
    return of_table(schema.table(columns, {"span_s": span_s}), "x")


def test_returns_are_together_within_ten_seconds_of_another_models() -> None:
    times = [0.0, 0.0, 500.0, 505.0, 900.0, 950.0]
    loaded = composed(times, ["a", "b", "a", "b", "a", "b"], 1000.0)
    assert stats(loaded)["returns_together"] == 0.5  # at 500 and 505, not at 900 and 950


def test_drift_is_the_share_that_changes_hands_between_hours() -> None:
    times = [100.0, 200.0, 300.0, 400.0, 3700.0, 3800.0]
    loaded = composed(times, ["a", "a", "a", "b", "a", "b"], 7200.0)
    facts = stats(loaded)
    assert facts["drift_per_hour"] == pytest.approx(0.25)  # a has 3/4, then 1/2
    assert facts["peak_hour"] == pytest.approx(4 / 3)


def test_a_trace_is_drawn_with_its_counts(tmp_path: Path) -> None:
    loaded = composed([0.0, 1.0, 2.0, 119.5], ["b", "a", "a", "a"], 120.0)
    arrays = {key: getattr(loaded, key) for key in ("arrival_s", "model", "prompt_tokens", "output_tokens", "span_s")}
    paths = fig_trace.render(arrays, loaded.models, "caption", tmp_path / "fig", "bench trace stats x")
    assert [path.suffix for path in paths] == [".pdf", ".png", ".csv"]
    counted = fig_trace.points(loaded.arrival_s, loaded.model, loaded.models, loaded.span_s)
    assert counted.groupby("model", sort=False)["requests"].sum().to_dict() == {"a": 3, "b": 1}
