"""SLOs in seconds: bases of base runs, limits of each request, and what is kept of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.rows import record, requests
from harness.run import slo, sweep
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Setup, load_models, load_trace
from harness.study.bases import TUNING_SEEDS, base_specs, bases, slo_target
from harness.study.study import AA_SEED
from tests.cases import cases
from tests.harness.run.test_sweep import TINY
from workloads.base import DRAWN, RARE
from workloads.build import build


def test_bases_are_the_same_for_every_system_rate_seed_and_gpu_count() -> None:
    specs = base_specs(TINY)
    for change in ({"system": "chunked"}, {"rate_scale": 9.0}, {"seed": 4}, {"gpus": 4}, {"chunk_tokens": 64}):
        assert base_specs(replace(TINY, **change)) == specs
    for other in ({"models": "light8"}, {"trace": "arena-like"}, {"gpu": "a100-80g"}, {"host": "none"}):
        assert base_specs(replace(TINY, **other)) != specs  # type: ignore[arg-type]
    assert [spec.seed for spec in specs] == list(TUNING_SEEDS)
    assert not set(TUNING_SEEDS) & set(range(AA_SEED + 100))
    assert all(
        (spec.system, spec.rate_scale, spec.workload, spec.slo) == ("dedicated", 1.0, "base", "") for spec in specs
    )


def test_rare_models_are_measured_on_drawn_arrivals_at_their_rate() -> None:
    spec = resolve(replace(base_specs(TINY)[0], models="llama-3.2-1b*8"))
    jobs, trace = Setup(spec).jobs(), load_trace("sample")
    assert np.isinf(jobs.ttft_slo_s).all()
    assert np.all(np.diff(jobs.arrival_s) >= 0)
    anew = np.bincount(build(trace, load_models(spec.models), seed=spec.seed, warmup_s=0.0).model)  # drawn anew
    counts: list[float] = []
    pairs = set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    for i in range(8):
        mine = jobs.model == i
        inside = int((mine & (jobs.arrival_s >= 0)).sum())
        if inside != DRAWN:
            assert inside >= RARE
            continue
        drawn = set(zip(jobs.prompt_tokens[mine].tolist(), jobs.output_tokens[mine].tolist(), strict=True))
        assert drawn <= pairs
        counts.append(DRAWN / jobs.arrival_s[mine].max() * 60)
    rare = sorted(n for n in anew if n < RARE)
    assert sorted(counts) == pytest.approx(rare, rel=5 / math.sqrt(DRAWN))


def test_bases_are_the_p95_of_all_runs_together(tmp_path: Path) -> None:
    folders = sweep.sweep(base_specs(TINY), tmp_path, workers=1)
    by_model = bases(folders)
    for model, (ttft_s, tpot_s) in by_model.items():
        rows = [row for f in folders for row in record.read(f).to_pylist() if row["model"] == model]
        rows = [row for row in rows if row["arrival_ns"] >= 0]
        ttft = [(row["first_ns"] - row["arrival_ns"]) / 1e9 for row in rows]
        tpot = [
            (row["done_ns"] - row["first_ns"]) / 1e9 / (row["output_tokens"] - 1)
            for row in rows
            if row["output_tokens"] > 1
        ]
        assert ttft_s == pytest.approx(np.quantile(ttft, 0.95))
        assert tpot_s == pytest.approx(np.quantile(tpot, 0.95))
        assert len(rows) >= 5 * RARE


def test_the_rule_scales_the_bases_and_the_drain_covers_the_longest_request(tmp_path: Path) -> None:
    tight, loose = (slo_target(TINY, f"{x}xP95", tmp_path, workers=1) for x in (1, 5))
    assert tight.seconds is not None
    assert loose.seconds is not None
    for model, (ttft_s, tpot_s) in tight.seconds.items():
        assert loose.seconds[model] == pytest.approx((5 * ttft_s, 5 * tpot_s))
    longest = int(load_trace("sample").output_tokens.max())
    largest = max(ttft_s + (longest - 1) * tpot_s for ttft_s, tpot_s in loose.seconds.values())
    assert 10 * largest <= loose.drain_s < 20 * largest
    assert math.log2(loose.drain_s).is_integer()
    assert loose.spec(replace(TINY, drain_s=3.0)).drain_s == 3.0


def test_a_rule_by_the_requests_own_latency_has_limits_of_each(tmp_path: Path) -> None:
    under = slo_target(TINY, "4xsolo", tmp_path)
    assert under.seconds is None
    assert under.definition == "e2e"
    assert list(tmp_path.iterdir()) == []  # nothing to measure
    (folder,) = sweep.sweep([under.spec(TINY)], tmp_path, workers=1)
    limits = own_limits(folder, "4xsolo")
    jobs = Setup(replace(resolve(under.spec(TINY)), slo="4xsolo")).jobs()  # as a policy that reads them has them
    assert np.array_equal(limits.ttft_s, jobs.ttft_slo_s)
    assert np.array_equal(limits.tpot_s, jobs.tpot_slo_s)
    order = np.argsort(jobs.prompt_tokens, kind="stable")
    assert np.all(np.diff(limits.ttft_s[order]) >= -1e-12)  # one shape: longer prompts get more


def own_limits(folder: Path, rule: str) -> requests.Limits:
    limits = slo.limits(folder, slo.SloTarget(rule, None))
    assert isinstance(limits, requests.Limits)
    return limits


def test_what_requests_take_alone_is_stored_once_for_all_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = sweep.sweep([TINY], tmp_path, workers=1)
    rows = (folder / record.ROWS).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("workloads.build.build", None)  # neither the workload nor its trace is needed
        patch.setattr("traces.load.trace", None)
        two = own_limits(folder, "2xsolo")
    stored = (folder / record.SOLO).stat().st_mtime_ns
    monkeypatch.setattr(Setup, "solo_s", None)  # nor the cost table any more
    four, mixed = own_limits(folder, "4xsolo"), own_limits(folder, "4/2xsolo")
    assert np.array_equal(four.ttft_s, 2 * two.ttft_s)
    assert np.array_equal(four.tpot_s, 2 * two.tpot_s)
    assert np.array_equal(mixed.ttft_s, four.ttft_s)
    assert np.array_equal(mixed.tpot_s, two.tpot_s)
    assert (folder / record.SOLO).stat().st_mtime_ns == stored
    assert (folder / record.ROWS).read_bytes() == rows
    assert sweep.sweep([TINY], tmp_path, workers=1) == [folder]  # still current


@cases("harm", ["another", "fewer"])
def test_what_is_not_of_these_rows_is_derived_anew(harm: str, tmp_path: Path) -> None:
    folder, other = sweep.sweep([TINY, replace(TINY, seed=1)], tmp_path, workers=1)
    limits = own_limits(folder, "1xsolo")
    path = folder / record.SOLO
    whole = path.read_bytes()
    if harm == "another":
        own_limits(other, "1xsolo")
        path.write_bytes((other / record.SOLO).read_bytes())
    else:
        of = json.loads(pq.read_metadata(path).metadata[b"of"])
        record.write_table(path, pq.read_table(path).slice(1), {"of": of})
    assert path.read_bytes() != whole
    again = own_limits(folder, "1xsolo")
    assert np.array_equal(again.ttft_s, limits.ttft_s)
    assert path.read_bytes() == whole


def test_a_run_of_other_sources_takes_what_its_requests_take_alone_with_it(tmp_path: Path) -> None:
    (folder,) = sweep.sweep([TINY], tmp_path, workers=1)
    own_limits(folder, "1xsolo")
    execute(resolve(TINY), tmp_path, "other sources")
    assert not (folder / record.SOLO).exists()
