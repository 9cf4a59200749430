"""ServerlessLLM by hand: where a request starts soonest, tiers, the oracle's order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.check.trial import Stand
from harness.engines.machine import Config, Served
from harness.engines.sim import state
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Evict, Load, Run
from harness.policy.events import Arrived, Event, Finished, Woke
from harness.policy.types import GIB, Batch, Cluster, Gpu, Host, Inst, Model, Plan, Request
from systems.serverlessllm import ServerlessLlm
from systems.serverlessllm_released import ServerlessLlmReleased
from tests.systems.by_hand import Flat
from tests.workloads.asked import asked
from workloads.models import shape

HOST_S, DISK_S = 2.0, 20.0
S = 0.1 + 49 * 0.02  # a prefill of 100 tokens and 49 steps


FLAT = Flat(0.02, HOST_S, token=1e-3, disk=DISK_S)


class Still:
    """A view of a world in which nothing moves, whose requests make as many tokens as their id says."""

    now_s = 0.0

    def __init__(self, hosts: Mapping[int, str] | None = None) -> None:
        self.hosts = hosts or {}  # each node holds these models in memory

    def weights(self, inst: Inst) -> str:
        assert isinstance(inst.place, Host)
        return "in" if inst.model in self.hosts[inst.place.node] else "out"

    def oracle_tokens(self, rid: int) -> int:
        return rid


def cluster(gpus: int, models: str, nodes: int = 1, host_bytes: int | None = None) -> Cluster:
    """Return models of 1 GiB, a hottest."""
    kinds = tuple(Gpu("flat", k * nodes // gpus, 3 * GIB, 100, ()) for k in range(gpus))
    served = {m: Model(1, 1, GIB, 1, 1, 400, 1.0, 0.1) for m in models}
    plan = {m: Plan(10.0 - k, 100, 50, "test") for k, m in enumerate(models)}
    return Cluster(kinds, served, plan, FLAT, host_bytes=host_bytes)


def policy(gpus: int = 2, models: str = "abc", **fields: Any) -> ServerlessLlm:
    """Return a policy after its start, at which instance k has the k-th model."""
    made = ServerlessLlm(cluster(gpus, models), **fields)
    tell(made, Woke("start"))
    return made


def tell(made: ServerlessLlm, event: Event) -> list[Action]:
    return list(made.on(event, Still()))  # type: ignore[arg-type]


def arrive(made: ServerlessLlm, *requests: tuple[int, str]) -> list[list[tuple[str, list[int]]]]:
    """Tell of requests (id, model); return the jobs of each instance."""
    for rid, model in requests:
        tell(made, Arrived(Request(rid, model, 0.0, 100, 1.0, 0.1)))
    return jobs_of(made)


def jobs_of(made: ServerlessLlm) -> list[list[tuple[str, list[int]]]]:
    return [[(j.model, list(j.rids)) for j in x.jobs] for x in made.all]


def end(made: ServerlessLlm, rid: int) -> list[Action]:
    x, job = made.where[rid]
    return tell(made, Finished(rid, x.batch(job.model), "done"))


def test_a_request_starts_where_it_is_soonest() -> None:
    made = policy()  # a and b are in
    assert made.S["a"] == pytest.approx(S)
    assert arrive(made, (0, "a"), (1, "b"), (2, "b")) == [[("a", [0])], [("b", [1, 2])]]
    assert arrive(made, (3, "c")) == [[("a", [0]), ("c", [3])], [("b", [1, 2])]]  # both S + load: the first
    assert arrive(made, (4, "c")) == [[("a", [0]), ("c", [3, 4])], [("b", [1, 2])]]  # with it
    assert arrive(made, (5, "a"))[1] == [("b", [1, 2]), ("a", [5])]  # S + load, not 2 S + 2 loads
    assert made.all[0].behind_s == pytest.approx(S + HOST_S)


def test_a_full_job_is_a_reason_to_load_elsewhere() -> None:
    made = policy(most=2, models="abcd")
    made.S = dict.fromkeys("abcd", 3.0)
    assert arrive(made, *((k, "a") for k in range(3))) == [[("a", [0, 1])], [("a", [2])]]
    made = policy(most=2)  # but not where a load takes longer
    assert arrive(made, *((k, "a") for k in range(3))) == [[("a", [0, 1, 2])], []]


def test_a_model_keeps_its_gpu_until_its_requests_are_done() -> None:
    made = policy(1)
    arrive(made, (0, "a"), (1, "a"), (2, "b"))
    assert end(made, 0) == []
    a, b = (Batch(Inst(m, (0,))) for m in "ab")
    assert end(made, 1) == [Evict(a.inst), Load(b.inst), Run(b), Admit(2, b)]


def test_a_load_takes_longer_where_the_host_has_not_the_weights() -> None:
    made = ServerlessLlm(cluster(2, "abc", nodes=2, host_bytes=GIB))
    assert made.uses == policy().uses  # it asks for its own rung, wherever the weights are
    view: Any = Still({0: "ab", 1: "c"})
    list(made.on(Woke("start"), view))
    list(made.on(Arrived(Request(0, "c", 0.0, 100, 1.0, 0.1)), view))
    assert jobs_of(made) == [[], [("c", [0])]]
    assert made.all[1].jobs[0].cost_s == pytest.approx(S + HOST_S)
    view.hosts = {0: "", 1: ""}
    view.now_s = 5.0
    for k, m in enumerate("bb"):  # instances hold a and c by now
        list(made.on(Arrived(Request(1 + k, m, 5.0, 100, 1.0, 0.1)), view))
    assert jobs_of(made) == [[("b", [1, 2])], [("c", [0])]]
    assert made.all[0].jobs[0].cost_s == pytest.approx(S + DISK_S)
    assert made.disk_until_s == {0: 5.0 + DISK_S}


def test_a_load_from_disk_waits_for_those_ordered_before_on_its_node() -> None:
    made = ServerlessLlm(cluster(2, "abcd", host_bytes=GIB))
    view: Any = Still({0: ""})
    list(made.on(Woke("start"), view))
    for rid, (now_s, m) in enumerate([(1.0, "c"), (3.0, "d")]):
        view.now_s = now_s
        list(made.on(Arrived(Request(rid, m, now_s, 100, 1.0, 0.1)), view))
    assert jobs_of(made) == [[("c", [0])], [("d", [1])]]
    first, second = (x.jobs[0].cost_s - S for x in made.all)
    assert (first, second) == pytest.approx((DISK_S, DISK_S - 2.0 + DISK_S))
    assert made.disk_until_s == {0: pytest.approx(1.0 + 2 * DISK_S)}
    view.now_s, view.hosts = 5.0, {0: "a"}
    assert made.loading_s(made.all[0], "a", view) == HOST_S  # memory waits for no disk


def test_plus_takes_the_shortest_job() -> None:
    made = policy(1, "abc", **ServerlessLlm.presets["plus"])
    assert "view.oracle_tokens" in made.uses
    arrive(made, (50, "a"), (300, "b"), (20, "c"), (30, "c"), (90, "a"))
    assert jobs_of(made) == [[("a", [50, 90]), ("b", [300]), ("c", [20, 30])]]
    end(made, 50)
    end(made, 90)
    assert jobs_of(made) == [[("c", [20, 30]), ("b", [300])]]


def test_a_tie_goes_to_the_instance_that_has_been_idle_longest_and_to_a_busy_one_last() -> None:
    made = policy(3, "abcd")
    arrive(made, (0, "a"), (1, "b"), (2, "c"))
    end(made, 2)  # at 0 s: instance 2 is idle, the others run their first request, which ends late
    later = Still()
    later.now_s = 100.0
    list(made.on(Arrived(Request(3, "d", 100.0, 100, 1.0, 0.1)), later))  # type: ignore[arg-type]
    assert jobs_of(made) == [[("a", [0])], [("b", [1])], [("d", [3])]]  # all start after a load
    made = policy(3, "abcd")
    for x, used_s in zip(made.all, (3.0, 1.0, 2.0), strict=True):
        x.used_s = used_s
    assert arrive(made, (0, "d")) == [[], [("d", [0])], []]


# ------------------------------------------------------------------ in the simulator

SHAPE = shape("llama-3.2-1b")._replace(max_tokens=2048)


def simulated(
    rows: list[tuple[float, int, int, int]],
    models: int,
    gpus: int,
    refuse: int = 0,
    make: Any = ServerlessLlm,
    host_bytes: int | None = None,
    **fields: Any,
) -> tuple[Any, Any, Sim]:
    """Serve rows of (arrival, model, prompt, output)."""
    served = tuple(Served(f"m{k}", SHAPE) for k in range(models))
    plan = {s.name: Plan(1.0, 200.0, 60.0, "test") for s in served}
    world = Config(served, gpus=gpus, host="none", plan=plan, host_bytes=host_bytes)
    work = asked((s.name for s in served), *zip(*sorted(rows), strict=True))
    engine = Sim(world)
    made = make(engine.cluster, **fields)
    engine = Sim(world, made.options)
    stand: Any = Stand(engine, refuse, lambda law, what: pytest.fail(f"{law}: {what}"))
    replay(made, stand, work, end_s=500.0)
    return engine.S.requests, made, engine


def test_one_request_behind_another_model_in_time() -> None:
    R, made, engine = simulated([(1.0, 0, 200, 50), (1.0, 1, 200, 50)], 2, 1)
    p = engine.cluster.profile
    inst = Inst("m0", (0,))
    first = 1.0 + p.prefill_s(inst, 200)
    done = first + sum(p.step_s(inst, 1, 201 + k) for k in range(49))
    assert R["first"][0] == pytest.approx(first, rel=1e-9)
    assert R["done"][0] == pytest.approx(done, rel=1e-9)
    assert R["first"][1] == pytest.approx(done + made.load_s["m1"] + p.prefill_s(inst, 200), rel=1e-9)


PAPER = {
    "make": st.just(ServerlessLlm),
    "place": st.sampled_from(["startup", "fewest"]),
    "order": st.sampled_from(["fcfs", "sjf"]),
    "host_bytes": st.sampled_from([None, 0, 3 * GIB, 6 * GIB]),
}
RELEASED = {"make": st.just(ServerlessLlmReleased), "order": st.sampled_from(["fcfs", "srtf"])}
ALIKE = {"gpus": st.integers(1, 3), "refuse": st.sampled_from([0, 3]), "most": st.integers(1, 8)}
ROW = st.tuples(st.floats(0, 2), st.integers(0, 3), st.integers(1, 900), st.integers(1, 300))


@settings(max_examples=80)
@given(
    rows=st.lists(ROW, min_size=1, max_size=25),
    parts=st.one_of(st.fixed_dictionaries(PAPER | ALIKE), st.fixed_dictionaries(RELEASED | ALIKE)),
)
def test_no_request_is_lost(rows: list[tuple[float, int, int, int]], parts: dict[str, Any]) -> None:
    R, _, engine = simulated(rows, 4, **parts)
    assert (R["state"] == state.DONE).all()
    assert not engine.S.insts["blocks"].any()
