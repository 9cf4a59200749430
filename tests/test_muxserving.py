"""MuxServe's study: rates, models and systems are the release's; floors fit; gains and the printed answer."""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path

import pytest

from harness.answers.ledger import driven
from harness.policy.placement import footprint, one_request
from harness.policy.types import UserError
from harness.run.setup import Setup, load_models
from harness.study import muxserving
from harness.study.muxserving import ALPHAS, BUSY, CALM, SYSTEMS, Measured, Run, first_fit, held, rates
from tests.cases import cases

CLAIMS = tomllib.loads(muxserving.CLAIMS.read_text("utf-8"))["claim"]
SCALES = (*CALM, *BUSY)


def flat(**by_system: float) -> muxserving.Results:
    """Return results in which a system serves requests at a rate, and meets SLOs up to a tenth of it as scale."""
    return {
        (name, alpha, scale, seed): Measured(rps, rps, 1.0 if scale <= rps / 10 else 0.5)
        for (name, rps), alpha, scale, seed in product(by_system.items(), ALPHAS, SCALES, range(2))
    }


def test_rates_are_a_power_law_under_the_most_popular() -> None:
    """MuxServe 2249cfa, benchmark/end_to_end/bench_end_to_end_muxserve.py: gen_power_law_dis, then get_real_rate."""
    assert (ALPHAS, BUSY, muxserving.TOP_RPS) == ((0.7, 0.9, 1.3, 1.7, 2.1), (0.5, 0.75, 1.0, 1.25), 40)
    law = [(x + 1) ** -1.3 for x in range(19)]
    ratios = [x / sum(law) for x in law]
    scaled = 40 * 0.75 / ratios[0]
    assert rates(1.3, 0.75) == pytest.approx([x * scaled for x in ratios])


def test_models_are_the_releases_in_its_order() -> None:
    """The same file: model2num, and model2placement of gen_spatial_cfg_from_muxserve_cfg (1 x 16, 4, 4, 8: 32 GPUs)."""
    members = load_models(muxserving.MODELS).members
    kinds = [(member.shape.name, member.tp) for member in members]
    assert kinds == [("llama-7b", 1)] * 12 + [("llama-13b", 1)] * 4 + [("llama-30b", 4)] * 2 + [("llama-65b", 8)]
    assert muxserving.names() == [member.name for member in members]
    assert sum(member.tp for member in members) == 32


def test_every_claim_has_a_measure_or_lacks_a_datum() -> None:
    assert all(("measure" in claim) != ("lacks" in claim) for claim in CLAIMS)
    kinds = {tuple(claim["measure"].split("_")) for claim in CLAIMS if "measure" in claim}
    assert kinds == set(product(muxserving.GAINS, ("spatial", "temporal")))


def test_the_runs_are_counted_without_one() -> None:
    assert muxserving.count(3) == 3 * len(SYSTEMS) * len(ALPHAS) * len(SCALES)


def test_the_profile_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROFILES_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"no file muxserve/llama-a100-sm-share.json in PROFILES_DIR"):
        muxserving.profile()
    monkeypatch.delenv("PROFILES_DIR")
    with pytest.raises(UserError, match="not set"):
        muxserving.profile()


# ---------------------------------------------------------------- gains


def test_the_rate_within_slos_lies_where_attainment_falls_below_the_level() -> None:
    shares = dict(zip(SCALES, [1.0, 0.995, 0.985, 0.999, 0.9, 0.5, 0.1], strict=True))
    results = {("muxserve", 0.7, scale, 0): Measured(1.0, 1.0, share) for scale, share in shares.items()}
    assert held(results, "muxserve", 0.7, 0) == pytest.approx(0.125 * 2**0.5)  # half-way; what holds later counts not
    for share, scale in ((1.0, SCALES[-1]), (0.5, SCALES[0])):
        same = {key: Measured(1.0, 1.0, share) for key in results}
        assert held(same, "muxserve", 0.7, 0) == scale


def test_gains_are_the_greatest_of_all_exponents_and_rates() -> None:
    results = {**flat(muxserve=9.0, spatial=6.0), ("muxserve", 1.3, 0.75, 0): Measured(15.0, 15.0, 0.5)}
    assert muxserving.throughput_gain(results, "spatial", 0) == 2.5
    assert muxserving.throughput_gain(results, "spatial", 1) == 1.5
    assert muxserving.held_gain(results, "spatial", 0) > 1.0


def test_the_answer_and_its_caption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = flat(**{name: 9.0 if name == "muxserve" else 6.0 for name in SYSTEMS})
    monkeypatch.setattr(muxserving, "ran", lambda *_: results)
    first, setting, degrees, *rest = driven(muxserving.parts(2, tmp_path))
    assert first == "MuxServe's throughput is 1.50 to 1.50 times spatial's, 1.50 to 1.50 times temporal's"
    assert setting.startswith("simulated, 32 x a100-80g, vllm-0.6; policies see MuxServe's profile")
    assert degrees.startswith(
        "own degrees of parallelism: alpaserve, first-fit, muxserve, random, temporal; all others"
    )
    assert sum(line.startswith("up to") for line in rest) == 4
    assert len(rest) + 3 <= 30
    assert max(map(len, (first, setting, *rest))) <= 100


# ---------------------------------------------------------------- runs


@cases("name", list(SYSTEMS))
def test_each_system_is_a_spec_of_the_same_requests(name: str, profiles_dir: Path, tmp_path: Path) -> None:
    assert profiles_dir.is_dir()
    spec, other = (Run(x, 2.1, 0.125).spec(1, tmp_path) for x in (name, "spatial"))
    assert (spec.trace, spec.models, spec.gpus, spec.profile) == (other.trace, other.models, 32, other.profile)
    assert bool(spec.homes) == (name in muxserving.FLOORS)


def test_floors_fit(profiles_dir: Path, tmp_path: Path) -> None:
    assert profiles_dir.is_dir()
    spec = Run("muxserve", 0.7, 0.125).spec(0, tmp_path)
    cluster = Setup(spec).engine.cluster
    placed = {"first": first_fit(cluster), **{str(seed): muxserving.random(cluster, seed) for seed in range(3)}}
    for homes in placed.values():
        assert list(homes) == list(cluster.models)
        for m, at in homes.items():
            assert len(at) in cluster.models[m].degrees
            assert len({cluster.gpus[g].node for g in at}) == 1
        for g, gpu in enumerate(cluster.gpus):
            here = [cluster.models[m].at(len(at)) for m, at in homes.items() if g in at]
            assert sum(footprint(m, elastic=False) + one_request(m) for m in here) <= gpu.mem_bytes
    assert placed["0"] == muxserving.random(cluster, 0)
    assert placed["0"] != placed["1"] != placed["2"]
    assert placed["first"]["llama-7b/1"] == (0,)
    assert len(placed["first"]["llama-65b/1"]) == 4  # the least degree at which it was measured


@pytest.mark.full
def test_short_runs(profiles_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a low rate all serve what comes, and all but the floors within SLOs."""
    assert profiles_dir.is_dir()
    for name, value in (("ALPHAS", (2.1,)), ("CALM", (0.0625,)), ("BUSY", (0.125,)), ("WINDOW_S", 20.0)):
        monkeypatch.setattr(muxserving, name, value)
    muxserving.written.cache_clear()
    results = muxserving.ran(1, tmp_path, workers=1)
    muxserving.written.cache_clear()
    for (name, alpha, scale, _), result in results.items():
        total = sum(rates(alpha, scale))
        assert result.done_rps == pytest.approx(total, rel=0.6), name
        assert result.within > 0.9 or name in muxserving.FLOORS, name
