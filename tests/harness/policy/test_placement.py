"""Placements: what a search finds, what is given, and which of them each system starts with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.machine import Config
from harness.engines.sim.engine import Sim
from harness.loop import system
from harness.policy.actions import Load
from harness.policy.events import Woke
from harness.policy.memory import kv_manager
from harness.policy.placement import footprint, one_request, searched, spread
from harness.policy.search import Part, search
from harness.policy.types import GIB, Cluster, Gpus, Infeasible, UserError
from harness.run import floors
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec
from systems.prism import Prism, Ratios
from tests.cases import cases

POOL = round(67.28 * GIB)  # of each H100, as Prism's released configuration gives its engines


def largest(parts: Mapping[str, Part], room: Sequence[float], at: Mapping[str, Gpus]) -> float:
    """Return the largest pressure of a placement; infinite where some GPU lacks room."""
    pressures = [0.0]
    for g, has in enumerate(room):
        here = [part for name, part in parts.items() if g in at[name]]
        fits = sum(part.need for part in here) <= has
        pressures.append(sum(part.d for part in here) / (has - sum(part.w for part in here)) if fits else math.inf)
    return max(pressures)


sizes = st.tuples(st.integers(1, 2), st.integers(1, 30), st.integers(0, 10))


@given(st.lists(sizes, min_size=1, max_size=5), st.integers(2, 3), st.integers(20, 80))
def test_the_search_is_as_good_as_any_placement_of_few_models(
    models: list[tuple[int, int, int]], gpus: int, room: int
) -> None:
    parts = {str(k): Part(tp, w + 1.0, float(w), float(d)) for k, (tp, w, d) in enumerate(models)}
    places = {tp: list(itertools.combinations(range(gpus), tp)) for tp in (1, 2)}
    every = itertools.product(*(places[part.tp] for part in parts.values()))
    best = min(largest(parts, [room] * gpus, dict(zip(parts, at, strict=True))) for at in every)
    placement = search(parts, [float(room)] * gpus, [0] * gpus)
    if best == math.inf:
        assert placement is None
    else:
        assert placement is not None
        assert largest(parts, [room] * gpus, placement) == pytest.approx(best)


@pytest.mark.full
@settings(max_examples=25)  # 0.08 s each
@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.0, 9.0)), min_size=14, max_size=16),
    st.sampled_from([4, 8]),
    st.integers(0, 10**6),
)
def test_local_search_keeps_room_and_is_no_worse_than_what_is_known(
    models: list[tuple[int, float]], gpus: int, where: int
) -> None:
    parts = {str(k): Part(1, w + 1.0, float(w), d) for k, (w, d) in enumerate(models)}
    room = [1.5 * sum(part.need for part in parts.values()) / gpus + 21.0] * gpus
    known = {name: ((where * (k + 7) // 11) % gpus,) for k, name in enumerate(parts)}
    placement = search(parts, room, [0] * gpus, known)
    assert placement is not None
    assert largest(parts, room, placement) <= min(largest(parts, room, known), 1e9) * (1 + 1e-9)
    assert placement == search(parts, room, [0] * gpus, known)


def test_parts_of_a_model_stay_within_a_node() -> None:
    parts = {"a": Part(2, 10.0, 9.0, 1.0), "b": Part(2, 10.0, 9.0, 1.0), "c": Part(1, 5.0, 4.0, 1.0)}
    assert search(parts, [12.0] * 3, [0, 0, 1]) is None  # b's two GPUs would lie in two nodes
    placement = search(parts, [12.0] * 5, [0, 0, 1, 1, 1])
    assert placement is not None
    assert {placement["a"], placement["b"]} <= {(0, 1), (2, 3), (2, 4), (3, 4)}


def test_58_models_on_32_gpus_are_placed() -> None:
    parts = {str(k): Part(1 + (k % 9 == 0), 6.0 + k % 17, 5.0 + k % 17, 1.0 + k % 5) for k in range(58)}
    room = [1.25 * sum(part.need * part.tp for part in parts.values()) / 32 + 5.0] * 32
    placement = search(parts, room, [g // 8 for g in range(32)])
    assert placement is not None
    assert largest(parts, room, placement) < math.inf


# ------------------------------------------------------------------ what systems start with


def heavy8(name: str, **more: object) -> Spec:
    return replace(Spec(name, trace="arena-like", models="heavy8", gpus=2, pool_bytes=POOL), **more)  # type: ignore[arg-type]


def begun(spec: Spec) -> tuple[Mapping[str, Gpus], Cluster]:
    """Return the places that a system's first answer gives models, and the cluster that it knew."""
    setup = Setup(resolve(spec))
    policy, engine = setup.policy, setup.engine
    engine.ready()
    actions = policy.on(Woke("start"), engine.view())
    places = {a.inst.model: a.inst.place for a in actions if isinstance(a, Load) and isinstance(a.inst.place, tuple)}
    return places, engine.cluster


@cases("name", ["elastic", "muxserve", "static", "prism"])
def test_heavy8_is_placed_on_two_gpus_of_the_released_pool(name: str) -> None:
    places, cluster = begun(heavy8(name))
    assert len(places) == 8
    for g, gpu in enumerate(cluster.gpus):
        here = [cluster.models[m] for m, at in places.items() if g in at]
        assert sum(footprint(m, name != "static") + one_request(m) for m in here) <= gpu.mem_bytes


def test_a_greedy_placement_that_fits_stays_and_one_that_does_not_is_searched() -> None:
    cluster = Sim(Config((), gpus=2), {}).cluster
    assert spread(cluster) == {}
    roomy, cluster = begun(heavy8("elastic", fields=(("placement", "pressure"),), pool_bytes=None, gpus=4))
    assert roomy == spread(cluster, elastic=True)
    with pytest.raises(Infeasible, match="no placement found of 8 models"):
        spread(begun(heavy8("elastic"))[1].__class__(cluster.gpus[:1], cluster.models, cluster.plan, cluster.profile))


@cases("name", ["static", "elastic"])
def test_searched_has_the_lowest_pressure_and_rate_the_fewest_requests_on_the_busiest_gpu(name: str) -> None:
    places = {by: begun(heavy8(name, fields=(("placement", by),)))[0] for by in ("pressure", "rate", "searched")}
    cluster = begun(heavy8(name))[1]
    plan, models, elastic = cluster.plan, cluster.models, name == "elastic"
    room = [gpu.mem_bytes for gpu in cluster.gpus]

    def of(by: str, *, rate: bool) -> float:
        parts = {}
        for m, x in models.items():
            held, bytes_ = footprint(x, elastic), (plan[m].prompt_tokens + plan[m].output_tokens) * x.kv_token_bytes
            d = plan[m].rate_rps * (1.0 if rate else bytes_)
            parts[m] = Part(1, held + one_request(x), 0 if rate else held, d)
        return largest(parts, room, places[by])

    assert of("searched", rate=False) <= min(of(by, rate=False) for by in places)
    assert of("rate", rate=True) <= min(of(by, rate=True) for by in places)


def test_prism_starts_as_asked() -> None:
    starts = {start: begun(heavy8("prism", fields=(("start", start),))) for start in ("alg1", "searched")}
    cluster = starts["alg1"][1]
    prism = Prism(cluster, start="alg1")
    list(prism.begin(0.0))
    tenants = list(prism.models.values())
    for tenant in tenants:
        tenant.home = None
    assert starts["alg1"][0] == prism.place(tenants)
    searched_, alg1_ = (Ratios(cluster.gpus, tenants, starts[start][0]).largest[0] for start in ("searched", "alg1"))
    assert searched_ <= alg1_
    assert starts["searched"][0] == searched(
        cluster, {m.name: m.d for m in tenants}, elastic=True, known=starts["alg1"][0]
    )


# ------------------------------------------------------------------ memory for KV of models that share a GPU

SHARING = ("chunked", "pdmux", "disaggregated")  # published for one model: which KV memory is used with more is ours


@cases("name", SHARING)
def test_models_that_share_a_gpu_share_its_kv_memory_in_pages(name: str) -> None:
    several, single = (f"llama-3.2-1b*{n}" for n in (4, 1))
    kv = {m: Setup(resolve(heavy8(name, models=m, gpus=2))).policy.options["kv"] for m in (several, single)}
    assert kv == {several: "elastic", single: "paged"}
    asked = heavy8(name, models=several, gpus=2, fields=(("kv", "paged"),))
    assert Setup(resolve(asked)).policy.options["kv"] == "paged"


def test_places_that_share_any_gpu_take_pages() -> None:
    assert kv_manager("auto", [(0, 1), (2,), (1,)]) == "elastic"
    assert kv_manager("auto", [(0, 1), (2,), (3,)]) == "paged"


# ------------------------------------------------------------------ a placement that is given

HOMING = [name for name in system.names() if "Cluster.homes" in Setup(resolve(heavy8(name, gpus=8))).policy.uses]


@cases("name", [name for name in HOMING if name not in {"qlm", "swap"}])  # not all models are in
def test_a_given_placement_is_kept(name: str) -> None:
    homes = begun(heavy8("elastic", seed=3, assign="shuffled"))[0]
    spec = heavy8(name, homes=tuple(homes.items()))
    assert begun(spec)[0] == homes


def test_a_given_placement_that_does_not_fit_is_infeasible() -> None:
    homes = dict.fromkeys(begun(heavy8("elastic"))[0], (0,))
    for name in ("prism", "muxserve", "static", "elastic"):
        with pytest.raises(Infeasible, match="on GPU 0"):
            begun(heavy8(name, homes=tuple(homes.items())))


def test_a_queue_serves_the_models_that_live_on_its_gpu() -> None:
    homes = begun(heavy8("elastic"))[0]
    policy = Setup(resolve(heavy8("qlm", homes=tuple(homes.items())))).policy
    for m, at in homes.items():
        assert [policy.queues[k].gpus for k in policy.fits[m]] == [at]  # type: ignore[attr-defined]
    crossed = {**homes, next(iter(homes)): (0, 1)}
    with pytest.raises(Infeasible, match="overlap"):
        _ = Setup(resolve(heavy8("qlm", homes=tuple(crossed.items())))).policy


# ------------------------------------------------------------------ floors


def test_floors_fit_and_random_ones_are_the_seeds() -> None:
    models = "llama-7b*12,llama-13b*4,llama-30b:tp=4*2,llama-65b:tp=8"
    spec = Spec(
        "muxserve",
        preset="original",
        models=models,
        trace="power-law+models=19+rate_rps=1",
        gpu="a100-80g",
        gpus=32,
        served=2048,
    )
    cluster = Setup(spec).engine.cluster
    placed = {"first": floors.first_fit(cluster), **{str(k): floors.random(cluster, k) for k in range(3)}}
    for homes in placed.values():
        assert list(homes) == list(cluster.models)
        for m, at in homes.items():
            assert len(at) in cluster.models[m].degrees
            assert len({cluster.gpus[g].node for g in at}) == 1
        for g, gpu in enumerate(cluster.gpus):
            here = [cluster.models[m].at(len(at)) for m, at in homes.items() if g in at]
            assert sum(footprint(m, elastic=False) + one_request(m) for m in here) <= gpu.mem_bytes
    assert placed["0"] == floors.random(cluster, 0)
    assert placed["0"] != placed["1"] != placed["2"]
    assert placed["first"]["llama-7b/1"] == (0,)
    for name, key in (("first-fit", "first"), ("random", "2")):
        assert dict(resolve(replace(spec, placement=name, seed=2)).homes) == placed[key]
    with pytest.raises(UserError, match=r"placement random: no room is left for llama-13b"):
        resolve(replace(spec, placement="random", models="llama-13b*3", trace="sample", gpus=1))
