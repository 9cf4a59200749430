"""The assignment of streams to models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.workloads.test_workloads import SPAN_S, drawn, fixed, inside
from traces.load import trace as load
from workloads.build import build, plan
from workloads.models import ModelSet, model_set


def test_a_stream_used_again_turns_with_its_first_use() -> None:
    rows = drawn(200)
    first, *rest = fixed().members
    again = ModelSet("again", (first, *rest, replace(first, name="m9", shift_s=10.0)))
    for scaling, scale in (("rotate", 1.0), ("time", 4.0)):
        jobs = build(rows, again, seed=3, warmup_s=0, rate_scale=scale, scaling=scaling)  # type: ignore[arg-type]
        mine = {m: jobs.model == m for m in (0, 3)}
        at = {m: dict(zip(jobs.prompt_tokens[of], jobs.arrival_s[of], strict=True)) for m, of in mine.items()}
        assert sorted(jobs.prompt_tokens[mine[3]]) == sorted(jobs.prompt_tokens[mine[0]])
        later = np.array([(at[3][token] - at[0][token]) % (SPAN_S / scale) for token in at[0]])
        assert later == pytest.approx(10.0)  # after the scaling of time
    earlier = ModelSet("again", (first, *rest, replace(first, name="m9", shift_s=-10.0)))
    jobs = build(rows, earlier, seed=3, warmup_s=0)
    mine = rows.arrival_s[rows.model == 0]
    late = build(rows, fixed(), seed=3, warmup_s=0)
    assert len(jobs) == len(late) + len(mine)  # what would come before 0 comes at 0
    assert sorted(jobs.prompt_tokens[jobs.model == 3]) == (np.flatnonzero(rows.model == 0) + 1).tolist()
    assert plan(rows, again)["m9"] == plan(rows, again)["m0"]


def test_an_ordered_trace_gives_its_kth_stream_to_the_kth_model() -> None:
    rows = replace(drawn(300, streams=5), ordered=True)
    models = model_set("llama-3.2-1b*3")
    for seed in range(3):
        jobs = build(rows, models, seed=seed, warmup_s=0)
        assert np.array_equal(rows.model[jobs.prompt_tokens - 1], jobs.model)


def test_arena_on_the_released_sets(traces_dir: Path) -> None:
    rows = load("arena-chat")
    for name in ("light8", "heavy8"):
        jobs = build(rows, model_set(name), seed=1)
        counts = np.bincount(jobs.model[inside(jobs)])
        assert counts.tolist() == [296, 22, 22, 262, 120, 19, 11, 2]
        rates = plan(rows, model_set(name))
        assert [round(planned.rate_rps * 600) for planned in rates.values()] == counts.tolist()
    whole = build(rows, model_set("prism18"), seed=1)
    assert inside(whole).sum() == 2059
