"""Turns of a run: what is recorded, the gaps between them, and the figures drawn of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from harness.policy.actions import Load
from harness.policy.events import TurnEnded
from harness.policy.types import Batch, Inst, UserError
from harness.rows import record
from harness.run import turns
from harness.run.execute import execute, recorded
from harness.run.resolve import resolve
from harness.run.spec import Spec
from plots import fig_switch, fig_turns


def logged() -> turns.Turns:
    log = turns.Turns()
    a, b = (Inst(f"m/{k}", (3,)) for k in (1, 2))
    log.decided(TurnEnded(Batch(a), "decode", "time", 9, 2.0), (Load(b),), 5.0)
    log.decided(TurnEnded(Batch(b, 1), "decode", "empty", 4, 1.5), (Load(a, "naive"), Load(a)), 7.0)
    log.decided(TurnEnded(Batch(b, 1), "decode", "stuck", 0, 0.0), (), 8.0)  # no turn: not a step was done
    log.decided(TurnEnded(Batch(a), "decode", "time", 1, 0.5), (Load(a),), 9.0)
    return log


class Costs:
    """A profile of which only loads are asked for."""

    def load_s(self, inst: Inst, way: str, *, from_disk: bool = False) -> float:
        return {"host": 1.0, "naive": 6.0}[way]


def test_turns_and_gaps_by_hand() -> None:
    log = logged()
    frame = log.table().to_pandas()
    assert frame[["start_s", "end_s"]].to_numpy().tolist() == [[3.0, 5.0], [5.5, 7.0], [8.5, 9.0]]
    assert frame["gpus"].tolist() == ["3"] * 3
    assert frame["why"].tolist() == ["time", "empty", "time"]
    gaps = fig_turns.gaps(frame)
    assert (gaps["model"].tolist(), gaps["gap_s"].tolist()) == (["m/2", "m/1"], [0.5, 1.5])
    seconds = turns.load_s(log.loads, Costs(), {"host": 0.25, "naive": 4.5})  # type: ignore[arg-type]
    assert seconds == {"m/2": (0.25, 0.75), "m/1": (pytest.approx(5 / 3), pytest.approx(1.0))}


def turn(gpus: str, model: str, start_s: float) -> dict[str, Any]:
    """Return the row of a decode turn of a second."""
    when = {"start_s": start_s, "end_s": start_s + 1.0}
    return {"gpus": gpus, "model": model, "phase": "decode", "why": "time", "steps": 1, **when}


def stored(folder: Path, gaps: list[float], preset: str | None = None) -> Path:
    """Record a run of two models in turns of a second with these gaps; a load takes 0.1 s and copies for 0.4 s."""
    rows, now = [], 0.0
    for i, gap in enumerate([*gaps, 0.0]):
        rows.append(turn("0", f"m/{i % 2}", now))
        now += 1.0 + gap
    spec = {"system": "aegaeon", "preset": preset, "trace": "t", "models": "two", "seed": 0}
    spec |= {"gpus": 1, "gpu": "h100", "host": "vllm-graph"}
    facts = {"spec": spec, "load_s": {"m/0": [0.1, 0.4], "m/1": [0.1, 0.4]}}
    record.write_table(folder / turns.FILE, turns.Turns(rows).table(), facts)
    return folder


def test_a_switch_by_stage(tmp_path: Path) -> None:
    runs = [stored(tmp_path / "a", [0.2] * 8), stored(tmp_path / "b", [0.9] * 8, "no-sync")]
    shown = fig_switch.points(runs)
    parts = ["engine start", "weights", "KV and waiting", "hidden"]
    assert shown["system"].to_list() == ["aegaeon", "aegaeon:no-sync"]
    assert shown[parts].to_numpy() == pytest.approx(np.array([[0.1, 0.1, 0.0, 0.3], [0.1, 0.4, 0.4, 0.0]]))
    idle = fig_switch.points([stored(tmp_path / "idle" / "c", [0.9] * 8 + [500.0])])
    assert idle[parts].to_numpy().sum() == pytest.approx(0.9)  # a gap in which nobody had work does not count
    assert fig_switch.draws(tmp_path)
    assert not fig_switch.draws(tmp_path / "idle")  # one run is no comparison
    paths = fig_switch.render(tmp_path, tmp_path / "switch", "x")
    assert paths[0].read_bytes() == fig_switch.render(tmp_path, tmp_path / "again", "x")[0].read_bytes()


def test_turns_are_drawn_of_two_gpus(tmp_path: Path) -> None:
    run = stored(tmp_path / "a", [0.2] * 8)
    assert len(fig_turns.render(run, tmp_path / "turns", "x")) == 3
    many = pd.DataFrame([turn(gpus, "m/1", 1.0) for gpus in ("10", "9", "8")])
    assert fig_turns.points(many)["gpus"].unique().tolist() == ["8", "9"]
    with pytest.raises(UserError, match="no prefill turn"):
        fig_turns.points(many, "prefill")


def test_recording_changes_no_row(tmp_path: Path) -> None:
    spec = resolve(Spec("aegaeon", trace="sample", models="llama-3.2-1b*4", gpus=2, slo=""))
    folder = recorded(spec, tmp_path / "a", "")
    rows = record.read(folder)
    assert rows.equals(record.read(execute(spec, tmp_path / "b", "")))
    frame = pq.read_table(folder / turns.FILE).to_pandas()
    assert set(frame["phase"]) == {"prefill", "decode"}
    assert (frame["start_s"] < frame["end_s"]).all()
    for _, group in frame.sort_values("start_s").groupby("gpus"):
        assert (group["start_s"].to_numpy()[1:] >= group["end_s"].to_numpy()[:-1] - 1e-9).all()  # one at a time
