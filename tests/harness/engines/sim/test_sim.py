"""The simulator as an engine: rows, token times, pages, and the bases that Prism released."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.engines.machine import Config, Served
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.loop.system import find
from harness.policy.types import Jobs, Plan
from harness.rows.record import SCHEMA
from harness.rows.record import WAITS as CAUSES
from harness.run.spec import Spec
from harness.study.bases import slo_target
from tests.cases import cases
from tests.harness.engines.sim.oracle import Oracle
from tests.harness.engines.sim.world import drive
from tests.harness.engines.sim.worlds import world
from tests.there import there
from tests.workloads.asked import asked
from workloads.models import model_set, shape

WAITS = [f"{c}_ns" for c in CAUSES]


def drawn(models: str, n: int, span_s: float, *slo_s: float) -> Jobs:
    """Return requests at any time and of any model."""
    rng = np.random.default_rng(0)
    when, model = np.sort(rng.uniform(0, span_s, n)), rng.integers(0, len(models), n)
    return asked(models, when, model, rng.integers(1, 1500, n), rng.integers(1, 300, n), *slo_s)


@cases("first", range(0, 30, 15))
def test_token_times_rebuilt_from_spans_are_the_oracles(first: int) -> None:
    for seed in range(first, first + 15):
        w = world(seed)
        want = Oracle(w.setup()).run(w.jobs, w.script, 60.0).requests
        sim, _ = drive(w, 60.0)
        table = pa.Table.from_batches(list(sim.rows()), SCHEMA)
        for q, ns in zip(want, table.column("token_ns").to_pylist(), strict=True):
            made = np.array(ns) / 1e9 + w.jobs.arrival_s[q.id]
            np.testing.assert_allclose(made, q.token_s, atol=2e-9)


@cases(
    ("name", "options", "causes"),
    [
        ("static", {"sharing": "turns"}, "compute time_slice"),
        ("prism", {}, "compute contention"),
        ("aegaeon", {}, "compute load transfer queue"),
        ("pdmux", {}, "compute contention queue"),
        ("disaggregated", {}, "compute transfer queue"),
    ],
)
def test_waits_of_the_longest_gap_sum_to_it(name: str, options: dict[str, str], causes: str) -> None:
    served = tuple(Served(m, shape("llama-3.2-1b"), 1, 1.0, 0.05) for m in "abcd")
    plan = {m.name: Plan(1.0, 500, 150, "trace") for m in served}
    gpus = 8 if name == "disaggregated" else 2
    config = Config(served, gpus=gpus, noise=0.05, token_times=True, mem_fraction=0.21, plan=plan)
    jobs = drawn("abcd", 200, 20.0, 1.0, 0.05)
    sim = Sim(config, options | dict(find(name)(Sim(config).cluster).options))
    replay(find(name)(sim.cluster), sim, jobs, end_s=19.0)  # some have not ended
    table, waited = pa.Table.from_batches(list(sim.rows()), SCHEMA).to_pylist(), Counter[str]()
    for row in table:
        gaps_ns, parts = np.diff(row["token_ns"]), {wait: row[f"gap_{wait}"] for wait in WAITS}
        if not len(gaps_ns):
            assert set(parts.values()) == {None}
            continue
        assert sum(parts.values()) == gaps_ns.max()
        assert min(parts.values()) >= -1
        assert all(part <= row[wait] + 8 for wait, part in parts.items())
        waited.update(parts)
    assert {row["state"] for row in table} > {"done"}
    assert {wait for wait, ns in waited.items() if ns > 1000} == {f"{cause}_ns" for cause in causes.split()}


def test_rows_sum_and_name_where_they_ran() -> None:
    served = (Served("a", shape("llama-3.2-1b")), Served("b", shape("llama-3.1-8b"), 2))
    config = Config(served, gpus=3, noise=0.05, plan={m.name: Plan(1.0, 100, 50, "trace") for m in served})
    sim = Sim(config)
    replay(find("dedicated")(sim.cluster), sim, drawn("ab", 300, 60.0))
    t = pa.Table.from_batches(list(sim.rows()), SCHEMA)
    total = sum(t.column(w).to_numpy() for w in WAITS)
    np.testing.assert_array_equal(total, t.column("done_ns").to_numpy() - t.column("arrival_ns").to_numpy())
    first = [t.column(f"ttft_{w}").to_numpy() for w in WAITS]
    np.testing.assert_array_equal(sum(first), t.column("first_ns").to_numpy() - t.column("arrival_ns").to_numpy())
    for wait, part in zip(WAITS, first, strict=True):
        assert ((part >= 0) & (part <= t.column(wait).to_numpy())).all()
    assert set(t.column("state").to_pylist()) == {"done"}
    places = zip(*(t.column(c).to_pylist() for c in ("model", "gpus")), strict=True)
    assert set(places) == {("a", "0"), ("b", "1+2")}
    assert (t.column("first_ns").to_numpy() <= t.column("done_ns").to_numpy()).all()


def test_slo_bases_of_light8_are_near_the_released_ones(traces_dir: Path, tmp_path: Path) -> None:
    """P95 on dedicated GPUs under the host costs of the released runs, by shape: within 30 %.

    Single models cannot all be: the four 1B models run the same shape, and their released TTFT bases range from 21.9
    to 39.9 ms (of 2 to 22 requests each). We give all four 32 to 33 ms.
    """
    spec = Spec("dedicated", models="light8", trace="arena-chat", host="sglang-eager-2024", gpu="h100")
    ours = there(slo_target(spec, "1xP95", tmp_path, workers=1).seconds)
    by_shape: dict[str, list[tuple[float, float]]] = {}
    for m in model_set("light8").members:
        ttft_s, tpot_s = there(m.released_s)
        by_shape.setdefault(m.shape.name, []).append((ours[m.name][0] / ttft_s, ours[m.name][1] / tpot_s))
    counts = {name: len(pairs) for name, pairs in by_shape.items()}
    assert counts == {"llama-3.1-8b": 3, "llama-3.2-3b": 1, "llama-3.2-1b": 4}
    for pairs in by_shape.values():
        for k in (0, 1):
            assert 0.7 <= statistics.geometric_mean(p[k] for p in pairs) <= 1.3
    single = [r for pairs in by_shape.values() for pair in pairs for r in pair]
    assert sum(0.7 <= r <= 1.3 for r in single) >= 13
