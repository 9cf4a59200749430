"""The simulator as an engine: rows, token times, pages, and the bases that Prism released."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.engines.costs import shapes
from harness.engines.costs.quantities import gpu
from harness.engines.machine import Config, Served, granule_bytes
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.loop.system import find
from harness.policy.actions import Admit, Drop, Evict, Load, Move, Run
from harness.policy.events import Arrived
from harness.policy.types import MIB, Batch, Inst, Jobs, Plan
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


def test_a_page_of_an_8b_is_128_mib() -> None:
    config = Config((Served("m", shape("llama-3.1-8b")),))
    assert granule_bytes(config, config.models[0], elastic=True) == 128 * MIB
    assert Sim(config, {"kv": "elastic"}).cluster.models["m"].page_bytes == 128 * MIB
    assert Sim(config).cluster.models["m"].page_bytes == 16 * shapes.kv_token_bytes(config.models[0].shape)


def test_elastic_memory_is_taken_in_whole_pages_and_given_back() -> None:
    config = Config((Served("m", shape("llama-3.1-8b")),))
    sim = Sim(config, {"kv": "elastic"})
    batch = Batch(Inst("m", (0,)))
    for action in (Load(batch.inst), Run(batch), Admit("m", batch)):
        sim.do(action)
    sim.take(asked("m", [0.0] * 8, 0, 600, 600))
    sim.begin(frozenset({Arrived}), False)
    used = []
    for t in (0.5, 1.0, math.inf):
        while sim.poll(t) is not None:
            pass
        used.append(sim.view().kv("m", 0).used_bytes)
    need = 8 * 608 * shapes.kv_token_bytes(config.models[0].shape)
    assert all(x % (128 * MIB) == 0 for x in used)
    assert need <= used[0] <= used[1] <= 3 * need
    assert used[2] == 0


def test_a_view_tells_what_waits_for_memory_from_what_is_on_its_way() -> None:
    llama, weights = shape("llama-3.1-8b"), shapes.weight_bytes(shape("llama-3.1-8b"))
    room = 2 * weights + 512 * MIB  # of a GPU: two models, and half of the KV of the longest request
    fraction = (room + 1) / gpu("h100").mem_bytes
    sim = Sim(Config(tuple(Served(m, llama) for m in "abc"), gpus=2, process_bytes=0, mem_fraction=fraction))
    view, here, there = sim.view(), Batch(Inst("a", (0,))), Inst("a", (1,))
    for action in (Load(here.inst), Run(here, "prefill"), Admit("a", here), Load(there), Load(Inst("b", (1,)))):
        sim.do(action)
    sim.take(asked("abc", [0.0], 0, 8000, 100))
    sim.begin(frozenset(), False)

    def seen(at_s: float) -> tuple[str, int, int, str]:
        while sim.poll(at_s) is not None:
            pass
        batch = view.batch(here)
        return view.request(0).transit, batch.away, batch.waiting_to_move, view.weights(Inst("c", (1,)))

    assert seen(10.0) == ("none", 0, 0, "out")  # its prompt is done, and no lane decodes
    sim.do(Move(0, (1,)))
    sim.do(Load(Inst("c", (1,))))
    assert seen(11.0) == ("waiting", 1, 1, "waiting")
    assert view.request(0).home == (0,)
    sim.do(Evict(Inst("b", (1,))))  # the KV goes first, and leaves no room for c
    assert seen(11.0 + 1e-6) == ("moving", 1, 0, "waiting")
    assert seen(12.0) == ("none", 1, 0, "waiting")  # its batch is elsewhere
    assert view.request(0).home == (1,)
    sim.do(Drop(0))
    assert seen(12.0 + 1e-6)[3] == "loading"
    assert seen(13.0)[3] == "in"


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
