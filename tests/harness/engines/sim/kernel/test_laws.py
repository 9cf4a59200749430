"""Laws of time and work that every world obeys, and queues whose waits are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.engines.costs.coef import COST
from harness.engines.costs.quantities import GpuSpec, HostProfile, Way
from harness.engines.machine import Config, Machine, Served
from harness.engines.sim import kernel, records, state
from harness.engines.sim.engine import Sim
from harness.policy.actions import Action, Admit, Load, Move, Run
from harness.policy.types import Batch, Inst
from tests.cases import cases
from tests.harness.engines.sim.kernel.agree import END_S
from tests.harness.engines.sim.oracle import CAUSES
from tests.harness.engines.sim.world import HEARD, NEVER, SECONDS, SHAPE, World, drive, flat
from tests.harness.engines.sim.worlds import LAYERED, world
from tests.workloads.asked import asked


@cases("seed", range(20))
def test_twice_every_duration_is_twice_every_stamp(seed: int) -> None:
    w = world(seed)
    cost = w.machine.tables.cost.copy()
    for name in SECONDS:
        cost[name] *= 2
    cost["flops"] /= 2
    cost["hbm"] /= 2
    tables = w.machine.tables._replace(cost=cost, gemm=w.machine.tables.gemm * 2, head=w.machine.tables.head * 2)
    spec = w.machine.spec
    links = {k: getattr(spec, k) / 2 for k in ("h2d", "d2h", "nvlink", "net", "disk")}
    ladder = {k: way._replace(fixed_s=2 * way.fixed_s) for k, way in w.machine.ladder.items()}
    slow = replace(
        w,
        machine=w.machine._replace(tables=tables, spec=spec._replace(**links), ladder=ladder),
        jobs=replace(w.jobs, arrival_s=w.jobs.arrival_s * 2),
        script=[(2 * t, a) for t, a in w.script],
    )
    R, R2 = drive(w, 50.0)[0].S.requests, drive(slow, 100.0)[0].S.requests
    for name in ("first", "done", "admit", *CAUSES):
        np.testing.assert_array_equal(2 * R[name], R2[name])


@cases("seed", range(20))
def test_idle_model_with_memory_to_spare_changes_no_stamp(seed: int) -> None:
    w = world(seed)
    t = w.machine.tables
    rows = {k: getattr(t, k) for k in ("cost", "gemm", "head", "dec_rate", "pre_rate")}
    more = t._replace(**{k: np.concatenate([each, each[:1]]) for k, each in rows.items()})
    roomy = w.machine._replace(spec=w.machine.spec._replace(mem_bytes=1 << 40))
    idle = Batch(Inst("idle", (0,)))
    crowded = replace(
        w,
        config=replace(w.config, models=(*w.config.models, Served("idle", SHAPE))),
        machine=roomy._replace(tables=more),
        jobs=replace(w.jobs, models=(*w.jobs.models, "idle")),
        script=[(NEVER, Load(idle.inst)), (NEVER, Run(idle)), (NEVER, Admit("idle", idle)), *w.script],
    )
    R, R2 = drive(replace(w, machine=roomy), END_S)[0].S.requests, drive(crowded, END_S)[0].S.requests
    for name in ("first", "done", *CAUSES):
        np.testing.assert_array_equal(R[name], R2[name])


@cases("seed", range(60))
def test_tokens_pages_waits_and_link_bytes_are_conserved(seed: int) -> None:
    w = world(seed)
    sim, _ = drive(w, END_S)
    R, S = sim.S.requests, sim.S
    ended = R["state"] >= state.DONE
    waited = sum(R[cause] for cause in CAUSES)
    spent = np.where(ended, R["done"], END_S) - R["arrival"]
    np.testing.assert_allclose(waited, spent, atol=1e-9)
    assert (R["made"] <= R["output"]).all()
    assert (R["made"][R["state"] == state.DONE] == R["output"][R["state"] == state.DONE]).all()
    assert (S.gpus["used"] <= S.gpus["cap"]).all() or w.options["memory"] == "unlimited"
    assert (S.insts["blocks"] >= 0).all()
    assert (S.gpus["used"] >= 0).all()
    if ended.all():
        assert (S.insts["blocks"] == 0).all()
        assert (S.insts["holders"] == 0).all()
        assert (S.gpus["kv_bytes"] == 0).all()
        assert (S.batches["count"] == 0).all()
    # decode tokens: what batches count is what requests made beyond the token of each prefill; whoever loses its KV
    # to a preemption, or by order, prefills again
    discards = sum(isinstance(a, Move) and a.to is None for _, a in w.script) * len(R)
    decoded = (R["made"] - 1 - R["preemptions"])[R["made"] > 0].clip(0).sum()
    assert discards or not ended.all() or S.batches["seq_steps"].sum() >= decoded


def prefill_queue(prompt_s: float, rate: float, n: int, *, models: int = 1, cap: int = 1) -> World:
    """Return one-token requests whose prefill takes `prompt_s`, on one GPU; each model alone would use all of it."""
    cost = np.zeros(models, COST)
    cost["pre0"], cost["flops"], cost["hbm"], cost["fl_tok"], cost["pre_slow"] = prompt_s, 1.0, 1.0, 10.0, 1.0
    cost["pre_fill"] = cost["dec_fill"] = cost["passes"] = cost["apart"] = cost["many"] = cost["pre_x"] = 1.0
    t = flat(cost)
    spec = GpuSpec("test", "test", 1 << 40, 100, 2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1 << 50)
    served = tuple(Served(f"m{k}", SHAPE) for k in range(models))
    rng = np.random.default_rng(5)
    arrival_s = np.cumsum(rng.exponential(1 / rate, n))
    jobs = asked((m.name for m in served), arrival_s, rng.integers(0, models, n), 1, 1)
    script: list[tuple[float, Action]] = []
    for m in served:
        b = Batch(Inst(m.name, (0,)))
        script += [(NEVER, Load(b.inst)), (NEVER, Run(b, seqs=cap)), (NEVER, Admit(m.name, b))]
    config = Config(served, batch_cap=cap, chunk_tokens=0, process_bytes=0, mem_fraction=1.0)
    priced = Machine(t, spec, {"host": Way(0.0, "pcie")}, HostProfile(0, 0, 0, 0, False, 1, 1))
    return World(config, priced, {}, jobs, script)


def latency(w: World) -> np.ndarray:
    sim, _ = drive(w)
    assert (sim.S.requests["state"] == state.DONE).all()
    return np.asarray(sim.S.requests["done"] - sim.S.requests["arrival"])


def test_one_server_with_fixed_service_waits_as_m_d_1() -> None:
    S, rho, n = 0.5, 0.8, 100_000
    w = prefill_queue(S, rho / S, n)
    got = latency(w)
    free, want = 0.0, np.empty(n)
    for k, a in enumerate(w.jobs.arrival_s.tolist()):  # Lindley
        free = max(free, a) + S
        want[k] = free - a
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert got.mean() - S == pytest.approx(rho * S / (2 * (1 - rho)), rel=0.05)


def test_models_that_share_a_gpu_share_it_equally() -> None:
    """Many models, each one request at a time and compute-bound: M/G/1 processor sharing, mean S / (1 - rho)."""
    S, rho, n, models = 0.5, 0.5, 20_000, 60
    got = latency(prefill_queue(S, rho / S, n, models=models))
    assert got.mean() == pytest.approx(S / (1 - rho), rel=0.08)


@cases(
    ("layout", "quantum_s", "ends_s"),
    [
        ("model", 0.0, (0.75, 0.75)),  # a round is .25 + .5: one step of each
        ("model", 0.375, (0.875, 0.875)),  # the shorter keeps the GPU for the quantum: .375 + .5
        ("model", 1.0, (2.0, 2.0)),
        ("gpu", 1.0, (0.75, 0.75)),  # one process: its kernels take turns
    ],
)
def test_processes_take_turns_by_step_of_at_least_a_quantum(
    layout: str, quantum_s: float, ends_s: tuple[float, float]
) -> None:
    """Steps of .25 and .5 s begin together; one of .5 s comes when nobody else is left."""
    w = prefill_queue(0.25, 1.0, 3, models=2)
    w.machine.tables.cost["pre0"] = 0.25, 0.5
    jobs = replace(w.jobs, arrival_s=np.array([0.0, 0.0, 5.0]), model=np.array([0, 1, 1], np.int32))
    options = {"sharing": "turns", "process": layout}
    w = replace(w, jobs=jobs, options=options, machine=w.machine._replace(quantum_s=quantum_s))
    sim, _ = drive(w)
    assert sim.S.requests["done"].tolist() == pytest.approx([*ends_s, 5.5])
    waited = [ends_s[0] - 0.25, ends_s[1] - 0.5, 0.0]  # in slices of the other, or beside it in one process
    causes = [sim.S.requests[cause].tolist() for cause in ("time_slice", "contention")]
    assert causes == [pytest.approx(x) for x in ([[0.0] * 3, waited] if layout == "gpu" else [waited, [0.0] * 3])]


def test_a_run_that_says_how_a_gpu_is_shared_says_it_for_all_but_who_leaves_it_out() -> None:
    w = prefill_queue(0.5, 1.0, 2, models=2)
    w = replace(w, jobs=replace(w.jobs, arrival_s=np.zeros(2), model=np.arange(2, dtype=np.int32)))
    w = replace(w, machine=w.machine._replace(quantum_s=2.0))

    def ends_s(asked: Any, **options: str) -> float:
        return float(latency(replace(w, config=replace(w.config, sharing=asked), options=options)).max())

    assert ends_s("own") == ends_s("fluid", sharing="turns") == pytest.approx(1.0)
    assert ends_s("turns") == ends_s("own", sharing="turns") == pytest.approx(4.0)
    assert ends_s("turns", sharing="none") == pytest.approx(0.5)


@cases("part", [0.25, 0.5, 1.0])
def test_a_lane_slows_and_is_slowed_on_a_gpu_that_is_not_its_instances(part: float) -> None:
    """Two lanes on GPUs of their own, of which the first has kernels on the other's as well."""
    w = prefill_queue(0.5, 1.0, 2, models=2)
    sim = Sim(replace(w.config, gpus=2), {}, w.machine)
    for m, g in (("m0", 0), ("m1", 1)):
        b = Batch(Inst(m, (g,)))
        for action in (Load(b.inst), Run(b), Admit(m, b)):
            sim.do(action)
    assert [sim.S.demands["gpu"][sim.S.lanes["demand"][lane]] for lane in range(4)] == [0, 0, 1, 1]
    more = np.zeros(len(sim.S.demands) + 1, records.DEMAND)
    more[:-1] = sim.S.demands
    more[-1] = part, 0.0, 0.0, 0.0, 1, -1
    more["next"][sim.S.lanes["demand"][0]] = len(more) - 1
    sim.S.put(demands=more)
    kernel.tie(sim.S.at, 0, 1)
    zero, two = np.zeros(2), np.arange(2, dtype=np.int32)
    sim.take(replace(w.jobs, arrival_s=zero, model=two))
    sim.begin(HEARD, oracle=False)
    while sim.poll(math.inf) is not None:
        pass
    end_s = 1.0  # a turn each on GPU 1: the first lane's own GPU has room left
    assert sim.S.requests["done"].tolist() == pytest.approx([end_s, end_s])
    gpus = sim.S.gpus
    assert gpus["flop_s"][:2].tolist() == pytest.approx([0.5, 0.5 * (1 + part)])
    assert gpus["busy_s"][:2].tolist() == pytest.approx([end_s, end_s])


def test_a_view_shows_the_last_boundary_and_advancing_in_pieces_changes_nothing() -> None:
    for seed in range(30):
        w = world(seed)
        whole = drive(w, END_S)[0].S.requests
        sim = w.begun(frozenset())
        view, todo = sim.view(), [x for x in w.script if x[0] > NEVER]
        made = 0
        for at in np.linspace(0.0, END_S, 97):
            while todo and todo[0][0] <= at:
                while sim.poll(todo[0][0]) is not None:
                    pass
                sim.do(todo.pop(0)[1])
            while sim.poll(float(at)) is not None:
                pass
            now = sum(view.request(r).made_tokens for r in range(int(sim.S.s["arrived"])))
            assert now >= made
            made = now
            for g in range(w.config.gpus):
                assert view.free_bytes(g) >= 0 or w.options["memory"] == "unlimited" or sim.S.gpus[g]["waiting"] > 0
        sim.finish()
        for name in ("first", "done"):
            np.testing.assert_allclose(whole[name], sim.S.requests[name], atol=1e-9)


@cases("seed", [LAYERED + 6 * k + kind for k in range(4) for kind in range(6)])
def test_slices_of_all_layers_are_none(seed: int) -> None:
    def stored(slice_layers: int | None) -> list[bytes]:
        def order(a: Action) -> Action:
            return replace(a, slice_layers=slice_layers) if isinstance(a, Run) and a.phase == "prefill" else a

        w = world(seed)
        script, rota = [(t, order(a)) for t, a in w.script], [[order(a) for a in entry] for entry in w.rota]
        sim, _ = drive(replace(w, script=script, rota=rota), 30.0)
        return [np.ascontiguousarray(sim.S.requests[name]).tobytes() for name in records.REQUEST.names or ()]

    assert stored(8) == stored(20) == stored(None)
