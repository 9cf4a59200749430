"""MuxServe's placement that chooses degrees of parallelism: worked numbers of its estimator, and its laws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.actions import Load, Run
from harness.policy.events import Woke
from harness.policy.types import Cluster, Infeasible, Inst, Sizes
from systems.muxserve import Estimator, Llm, MuxServe, meshes, on_meshes, published
from tests.cases import cases
from tests.systems.by_hand import told
from tests.systems.test_muxserve import KB, Flat, cluster, started


def gpus_of(inst: Inst) -> int:
    return len(inst.place) if isinstance(inst.place, tuple) else 1


class Wide(Flat):
    """`Flat` on one GPU, and in proportion faster on more."""

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        return super().prefill_s(inst, tokens, sms) / gpus_of(inst)

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        return super().step_s(inst, seqs, ctx_tokens, sms) / gpus_of(inst)


def divisible(
    rates: Mapping[str, float], gpus: int, *, degrees: Iterable[int] = (1, 2, 4), weight: int = 400, mem: int = 11_000
) -> Cluster:
    """Return the models of `cluster` at several degrees; a part of each has its part of the bytes, `weight` in KB."""
    world = cluster(rates, gpus=gpus, mem=mem * KB, weight=weight * KB)
    sizes = tuple(Sizes(tp, weight * KB // tp, KB // tp, 10 * KB // tp) for tp in degrees)
    models = {m: model._replace(sizes=sizes) for m, model in world.models.items()}
    return Cluster(world.gpus, models, world.plan, Wide())


def original(world: Cluster, **fields: Any) -> tuple[MuxServe, list[dict[int, Llm]]]:
    """Return a policy that chooses degrees, and the candidates of its models."""
    policy = MuxServe(world, **{**MuxServe.presets["original"], **fields})
    return policy, [dict(policy.candidates(m)) for m in world.models]


# By hand: a model alone serves B / (0.006 B + 40 (0.01 + 0.001 B)) on a GPU, twice that on two. On a mesh are a and b:
# rates, batches that serve each alone (a tenth, at most half a request, is forgiven), and what stays unserved as the
# batch of the one that is served least grows by one at a time.
MESHES = {
    1: ((10.0, 5.0), (7, 3), [(10 - 7 / (0.06 + 0.4 + 0.28), 0.0), (0.0, 0.0)]),  # 9.46; 8 / (0.066 + 0.72) = 10.2
    2: ((20.0, 10.0), (8, 3), [(0.0, 0.0)]),  # 8 / (0.033 + 0.2 + 0.16) = 20.4, 3 / (0.033 + 0.2 + 0.06) = 10.2
    4: (
        (60.0, 20.0),
        (19, 3),
        [
            (60 - 19 / (0.033 + 0.1 + 0.19), 20 - 3 / (0.033 + 0.1 + 0.03)),  # 58.8 and 18.4: b lacks more
            (60 - 19 / (0.0345 + 0.1 + 0.19), 0.0),  # 4 / (0.0345 + 0.1 + 0.04) = 22.9
            (0.0, 0.0),  # 20 / (0.036 + 0.1 + 0.2) = 59.5, and half a request is forgiven
        ],
    ),
}


@cases("mesh", sorted(MESHES))
def test_the_estimator_by_hand_on_three_meshes_of_two_models(mesh: int) -> None:
    (W_a, W_b), batches, unserved = MESHES[mesh]
    world = divisible({"a": W_a, "b": W_b}, gpus=4)
    estimator = Estimator(world, by_degree=True)
    unit = [model[mesh]._replace(dec_sms=None) for model in original(world)[1]]
    assert tuple(estimator.alone(m, 256) for m in unit) == batches
    steps = [(lacks["a"], lacks["b"]) for lacks in estimator.tried(unit)]
    assert steps == [pytest.approx(step) for step in unserved]


def test_algorithm_2_has_a_candidate_a_degree_on_the_fewest_sms() -> None:
    """20 requests/s are too many for a GPU at 90 % of its SMs, and take 50 % of two and 30 % of four."""
    world = divisible({"a": 20.0}, gpus=4)
    (a,) = original(world)[1]
    assert [(tp, m.tp, m.share, m.weight, m.seq) for tp, m in a.items()] == [
        (1, 1, 90, 400 * KB, 100 * KB),
        (2, 2, 50, 200 * KB, 50 * KB),
        (4, 4, 30, 100 * KB, 25 * KB),
    ]


def test_batches_of_a_mesh_are_as_large_as_they_were_profiled() -> None:
    (a,) = original(divisible({"a": 1.0}, gpus=4))[1]
    assert [Estimator(divisible({"a": 1.0}, gpus=4), by_degree=True).most(m) for m in a.values()] == [256, 512, 1024]
    assert [Estimator(divisible({"a": 1.0}, gpus=4)).most(m) for m in a.values()] == [256, 256, 256]


def test_a_model_that_a_gpu_cannot_serve_gets_more() -> None:
    """One GPU serves fewer than 22 requests/s of any model, two twice as many."""
    world = divisible({"b": 1.0, "hot": 30.0}, gpus=3, degrees=(1, 2))
    assert published(world, original(world)[1]) == {"hot": (0, 1), "b": (2,)}


def test_no_more_meshes_than_models_and_the_whole_of_each() -> None:
    """Of four GPUs two models have meshes of four, or two of two: the rest would stay empty."""
    world = divisible({"a": 1.0, "b": 1.0}, gpus=4)
    homes = published(world, original(world)[1])
    assert set(homes.values()) <= {(0, 1, 2, 3), (0, 1), (2, 3)}
    alone = divisible({"a": 1.0}, gpus=4, degrees=(1, 2))  # two meshes at least, for one model
    assert published(alone, original(alone)[1]) == {"a": (0, 1)}


def test_models_without_a_candidate_of_a_size_never_get_that_mesh() -> None:
    world = divisible({"a": 1.0, "b": 1.0}, gpus=4)
    (a, b) = original(world)[1]
    estimator = Estimator(world, by_degree=True)
    assert on_meshes(estimator, [a, {4: b[4]}], [(0, 1), (2, 3)]) == (float("inf"), float("inf"), {})
    assert on_meshes(estimator, [a, {2: b[2]}], [(0, 1), (2, 3)])[2] == {"a": (0, 1), "b": (2, 3)}


def test_the_degree_that_is_chosen_is_served() -> None:
    """The hot model lives on two GPUs, at half of its bytes on each; quotas and lanes go by that degree."""
    world = divisible({"b": 1.0, "hot": 30.0}, gpus=3, degrees=(1, 2))
    policy, _ = original(world)
    actions = told(policy, Woke("start"))
    assert {x.inst.model: x.inst.place for x in actions if isinstance(x, Load)} == {"b": (2,), "hot": (0, 1)}
    assert policy.Q == {0: {"hot": 10_800 * KB}, 1: {"hot": 10_800 * KB}, 2: {"b": 10_600 * KB}}
    assert [x.seqs for x in actions if isinstance(x, Run)] == [106, 216]
    assert "Cluster.degrees" in policy.uses
    assert "Cluster.degrees" not in started(world, **MuxServe.presets["plusplus"])[0].uses


def test_a_given_placement_gives_the_degree() -> None:
    world = divisible({"b": 1.0, "hot": 30.0}, gpus=3, degrees=(1, 2))
    given = Cluster(world.gpus, world.models, world.plan, world.profile, {"b": (0, 1), "hot": (2,)})
    policy, _ = original(given)
    told(policy, Woke("start"))
    assert policy.home == {"b": (0, 1), "hot": (2,)}
    assert {m: policy.llms[m].tp for m in policy.home} == {"b": 2, "hot": 1}


def test_no_mesh_has_room() -> None:
    world = divisible({"a": 1.0, "b": 1.0}, gpus=1, degrees=(1,), weight=800, mem=1_000)
    with pytest.raises(Infeasible, match=r"of 2 models .* decode shares within 120 %"):
        published(world, original(world)[1])
    big = divisible({"a": 1.0}, gpus=1, degrees=(1,), weight=2_000, mem=1_000)
    with pytest.raises(Infeasible, match="a alone takes"):
        told(original(big)[0], Woke("start"))


@given(
    rates=st.lists(st.floats(0, 60), min_size=1, max_size=3),
    gpus=st.integers(1, 4),
    weight=st.sampled_from([100, 400, 900, 1_500]),
)
def test_chosen_placements_fit_and_cost_at_least_the_best(rates: list[float], gpus: int, weight: int) -> None:
    """Each model is on one mesh, where weights, requests and shares fit; the best of all leaves no more unserved."""
    world = divisible(dict(zip("abc", rates, strict=False)), gpus=gpus, weight=weight, mem=3_000)
    models, estimator = original(world)[1], Estimator(world, by_degree=True)
    try:
        homes = published(world, models)
    except Infeasible:
        return
    named = dict(zip(world.models, models, strict=True))
    assert sorted(homes) == sorted(world.models)

    def cost(at: Mapping[str, tuple[int, ...]]) -> float:
        total = 0.0
        for mesh in dict.fromkeys(at.values()):
            unit = [named[m][len(mesh)] for m in sorted(at) if at[m] == mesh and len(mesh) in named[m]]
            fits = sum(m.weight + m.floor for m in unit) <= 3_000 * KB and sum(m.share for m in unit) <= 120
            if not fits or len(unit) < list(at.values()).count(mesh):
                return float("inf")
            total += sum(estimator.unserved(unit).values())
        return total

    assert cost(homes) < float("inf")
    groups = [cut for cut in meshes(world, (1, 2, 4)) if len(cut) <= len(models)]
    every = (dict(zip(named, at, strict=True)) for cut in groups for at in product(cut, repeat=len(models)))
    assert cost(homes) >= min((cost(at) for at in every), default=0.0) - 1e-9
    assert published(world, models) == homes
