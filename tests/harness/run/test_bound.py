"""The bound: no run lies above it, whatever system, world and definition; and small cases come near to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from harness.engines.costs import coefficients
from harness.engines.costs.coef import Tables
from harness.engines.costs.least import CUTS, least
from harness.engines.machine import Config, Served, machine
from harness.engines.sim.kernel import cost
from harness.engines.sim.kernel.rates import SWEEPS
from harness.loop import system
from harness.loop.replay import replay
from harness.policy import fields
from harness.policy.actions import Run
from harness.policy.types import Infeasible, Jobs, Prefix, Unsupported
from harness.rows import requests
from harness.rows.definitions import DEFINITIONS
from harness.rows.requests import Limits
from harness.run import bound
from harness.run.resolve import resolve
from harness.run.setup import Setup, load_models
from harness.run.spec import Spec
from harness.study.bound import line, searched
from harness.study.compare import comparison, summary
from harness.study.measure import measure
from tests.cases import cases
from tests.harness.engines.sim import world as drawing
from tests.harness.engines.sim import worlds
from tests.harness.engines.sim.world import drive

WORLDS = "TURNED WILD CUT SLICED SHARED LAYERED LENT BESIDE MEASURED MIXED RESERVED HOSTED"
KINDS: tuple[int, ...] = (0, *(getattr(worlds, name) for name in WORLDS.split()))
SETS = tuple(
    ("llama-3.1-8b llama-3.1-8b*2 llama-3.2-1b*2,llama-3.1-8b llama-3.2-3b*4 qwen-2.5-14b,llama-3.2-1b*2").split()
)


def limits(rng: np.random.Generator, jobs: Jobs) -> Limits:
    """Draw limits by model, some without end."""
    scale_s = rng.choice([0.03, 0.1, 0.3, 1.0, 3.0])
    ttft_s, tpot_s = (scale_s * rng.choice([0.1, 0.3, 1.0, 3.0, math.inf], len(jobs.models)) for _ in range(2))
    return Limits(ttft_s[jobs.model], 0.1 * tpot_s[jobs.model])


def under(jobs: Jobs, slo: Limits) -> Jobs:
    return replace(jobs, ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)


def above(
    prices: bound.Prices, jobs: Jobs, table: pa.Table, slo: Limits, spans_s: tuple[float, float], sharing: bound.Sharing
) -> Iterator[str]:
    """Yield the definitions by which a run lies above the bound of its world; `spans_s`: of its window, of all."""
    rows = requests.rows(table)
    offered = (rows.arrival_s >= 0) & (rows.arrival_s < spans_s[0])
    for definition in bound.BOUNDED:
        scores = DEFINITIONS[definition].score(rows, slo)
        assert scores is not None
        most = bound.share(prices, under(jobs, slo), definition, *spans_s, sharing)
        assert most.offered == offered.sum()
        if most.offered and scores[offered].mean() > most.met + 1e-9:
            yield f"{definition}: {scores[offered].mean():.4f} > {most.met:.4f}"


# ------------------------------------------------------------------ any run


@cases("kind", KINDS)
def test_no_script_of_a_random_world_lies_above_the_bound(kind: int) -> None:
    drawn(range(kind, kind + 4))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_no_script_of_many_random_worlds_lies_above_the_bound(kind: int) -> None:
    drawn(range(kind + 4, kind + 100))


def drawn(seeds: Iterable[int]) -> None:
    """Hold the scripts of random worlds against the bound."""
    for seed in seeds:
        w = worlds.world(seed)
        if w.options["sharing"] == "none" or w.options["memory"] == "unlimited":
            continue
        sim, _ = drive(w)
        orders = [action for _, action in w.script] + [action for entry in w.rota for action in entry]
        parted = any(isinstance(order, Run) and order.sms is not None for order in orders)
        slo, window_s = limits(np.random.default_rng(seed), w.jobs), float(w.jobs.arrival_s[-1]) + 1.0
        sharing = bound.Sharing(parted, w.options["sharing"] == "turns")
        prices, table = bound.prices(w.config, w.machine), pa.Table.from_batches(list(sim.rows()))
        assert not list(above(prices, w.jobs, table, slo, (window_s, w.end_s), sharing)), seed


def every_system() -> list[str]:
    """List all systems with all presets that run on the GPUs of this world: `unshared` does not."""
    named = [(name, system.find(name).presets) for name in system.names() if name != "unshared"]
    return [f"{name}:{preset}" if preset else name for name, presets in named for preset in (None, *presets)]


def small(seed: int) -> Spec:
    """Draw a small world without its system: models, GPUs, a trace at a load from little to far too much."""
    rng = np.random.default_rng(seed)
    extra: dict[str, Any] = {"sharing": "turns"} if rng.random() < 0.15 else {}
    return Spec(
        "elastic",
        models=str(rng.choice(SETS)),
        gpus=int(rng.choice([1, 1, 2, 2, 4])),
        gpu=str(rng.choice(["h100", "h100", "a100-80g", "h200"])),
        host=str(rng.choice(["vllm-0.15", "vllm-0.12"])),
        trace=f"{rng.choice(['hyperbolic-like', 'arena-like'])}+span_s=40",
        seed=int(rng.integers(1000)),
        rate_scale=float(rng.choice([2, 8, 20, 40])),
        warmup_s=2.0,
        drain_s=30.0,
        noise=float(rng.choice([0.0, 0.05])),
        **extra,
    )


@cases("world", range(15))
def test_no_system_lies_above_the_bound(world: int) -> None:
    served(world, 6)


@pytest.mark.full
@pytest.mark.parametrize("part", range(57))
def test_no_system_of_many_worlds_lies_above_the_bound(part: int) -> None:
    for world in range(5 * part + 15, 5 * part + 20):  # with those above, 300
        served(world, 16)


def served(world: int, some: int) -> None:
    """Hold so many systems in a random small world against the bound."""
    spec, every = small(world), every_system()
    for name in [every[(world * some + k) % len(every)] for k in range(some)]:  # all of them come, world after world
        asked = fields.asked(name)
        setup = Setup(
            resolve(replace(spec, system=asked.name, preset=asked.preset, fields=tuple(asked.fields.items())))
        )
        jobs = setup.jobs()
        try:
            policy, engine = setup.policy, setup.engine
            replay(policy, engine, setup.jobs(), end_s=setup.end_s)
        except (Infeasible, Unsupported):
            continue
        sliced = "turns" in (setup.spec.sharing, policy.options.get("sharing"))
        table, window_s = pa.Table.from_batches(list(engine.rows())), setup.spec.window_s
        slo, sharing = limits(np.random.default_rng(world), jobs), bound.Sharing("Run.sms" in policy.uses, sliced)
        assert window_s is not None
        prices = bound.prices(setup.config, setup.machine)
        assert not list(above(prices, jobs, table, slo, (window_s, setup.end_s), sharing)), name


# ------------------------------------------------------------------ least costs


def step(t: Tables, k: int, p: int, ends: int, decodes: int, context: float, area: float) -> tuple[float, float]:
    """Return the kernel seconds of a step by the formula of coef.py, and the part of the GPU that they keep."""
    c, m = t.cost[k], p + decodes
    slope = [(f[k][-1] - f[k][-2]) / (t.grid[-1] - t.grid[-2]) for f in (t.gemm, t.head)]
    at = [
        np.interp(x, t.grid, f[k]) + s * max(0, x - t.grid[-1]) if x else 0.0
        for x, f, s in zip((m, ends + decodes), (t.gemm, t.head), slope, strict=True)
    ]
    kernels = sum(at) + (c["pre0"] * max(1, ends) + c["pre1"] * p + c["pre2"] * area if p else 0.0)
    if decodes:
        kernels += max(c["att0"] + c["att1"] * decodes, c["dec0"] + c["dec1"] * decodes + c["dec2"] * context)
    w = 1.0 if p > 0 and p >= c["many"] else max(0.0, (p - c["few"]) / (c["many"] - c["few"])) if p > c["few"] else 0.0
    duty = min([1.0, *(float(c[name]) for name in ("pre_duty", "dec_duty") if c[name] > 0)])
    return float(kernels) * duty, float(c["dec_fill"] + w * (c["pre_fill"] - c["dec_fill"]))


def some_tables() -> dict[str, Tables]:
    shapes = [(m.shape, tp) for m in load_models("light8").members[:3] for tp in (1, 2)]
    kinds = {kind: coefficients.tables(shapes, kind, "vllm-0.15") for kind in ("h100", "a100-80g")}
    return kinds | {f"random {seed}": drawing.tables(np.random.default_rng(seed), 4) for seed in range(6)}


@cases("name", sorted(some_tables()))
def test_no_step_costs_less_than_the_sum_of_its_parts(name: str) -> None:
    t, cap, rng = some_tables()[name], 64, np.random.default_rng(0)
    for k in range(len(t.cost)):
        low = least(t, k, 1, cap)
        nearest = math.inf
        for _ in range(400):
            decodes, p = int(rng.integers(0, cap + 1)), int(rng.choice([0, 1, 3, 20, 90, 400, 1000, 5000, 40000]))
            ends = int(rng.integers(0, min(p, cap - decodes) + 1))
            if p + decodes == 0:
                continue
            context, area = float(rng.integers(decodes, 3000 * decodes + 1)), float(rng.integers(p, 3000 * p + 1))
            kernels, fill = step(t, k, p, ends, decodes, context, area)
            members = ends + decodes
            top = int(rng.integers(members, cap + 1))
            attention = low.decode_s[0] * decodes + low.decode_s[1] * context
            attention += low.piece_s[0] * max(1, ends) * (p > 0) + low.piece_s[1] * p + low.piece_s[2] * area
            for cut, part in enumerate(CUTS):
                each = (low.member_s[cut][max(1, top)] + low.head_s) * members
                assert fill * kernels >= part * low.token_s * (p - ends) + each + attention - 1e-12
            nearest = min(nearest, fill * kernels / (low.token_s * (p + decodes)))
        assert nearest >= 1.0 - 1e-12
    assert name.startswith("random") or nearest < 1.6  # attention and sampling are in the step, not in the tokens


def test_a_token_costs_the_least_that_a_step_gives_it() -> None:
    t = drawing.even(drawing.tables(np.random.default_rng(1), 1))
    t.cost["dec_fill"] = t.cost["pre_fill"] = 1.0
    low = least(t, 0, 2, 8)
    assert low.token_s == 2 * 128 / 4096 / 512  # on both GPUs; beyond 34 tokens each takes 128 / 512 of 1 / 4096 s
    assert low.member_s[-1][[1, 2, 4]].tolist() == [2 * 4 / 4096, 2 * 5 / 4096 / 2, 2 * (5 + 2 * 8 / 32) / 4096 / 4]


def test_noise_is_never_below_its_least() -> None:
    drawn = [cost.noise(0.1, seed, 0, slot, 1, index) for seed in range(20) for slot in range(4) for index in range(99)]
    assert bound.least_factor(0.1) < min(drawn) < 1 - 0.25  # 2.5 of 3.5 standard deviations


def test_kernels_that_take_turns_keep_a_gpu_for_at_most_all_of_the_time() -> None:
    rng = np.random.default_rng(0)
    assert SWEEPS == 3  # what the docstring counts with
    for _ in range(3000):
        n = int(rng.integers(1, 60))
        f, u, w = rng.uniform(0.3, 1, n), rng.uniform(rng.uniform(0.02, 1), 1, n), rng.exponential(1, n)
        s = np.ones(n)
        for _ in range(SWEEPS):  # kernel/rates.py, take_turns
            rounds = u * s / (1 - u + u * s) * f * w
            s = np.maximum(1.0, f + (rounds.sum() - rounds) / w) if n > 1 else s
        used = (f * u / (1 - u + u * s)).sum()
        assert used <= 1 / (1 - (1 - u.min()) ** 3) + 1e-9


# ------------------------------------------------------------------ windows, prefixes, the program


def test_overlaps_are_the_most_windows_at_one_instant_of_each() -> None:
    rng = np.random.default_rng(3)
    for n in (1, 2, 5, 40, 130):
        begin = np.sort(rng.integers(0, 30, n).astype(float))
        end = begin + rng.choice([0.0, 1.0, 7.0, math.inf], n)
        at = [
            [int(((begin <= t) & (t <= end)).sum()) for t in begin if a <= t <= b]
            for a, b in zip(begin, end, strict=True)
        ]
        assert bound._overlaps(begin, end).tolist() == [max(counts) for counts in at]


def few(arrival: list[float], prompt: list[int], ttft_s: list[float], **more: Any) -> Jobs:
    ones, no_limit_s = np.ones(len(arrival), np.int32), np.full(len(arrival), math.inf)
    tokens = (np.array(prompt, np.int32), ones)
    return Jobs(("m",), np.array(arrival), 0 * ones, *tokens, np.array(ttft_s), no_limit_s, **more)


def test_what_a_prefix_may_spare_is_what_another_request_of_the_model_has_too() -> None:
    prefix = Prefix(4, np.array([0, 2, 5, 7, 7]), np.array([1, 2, 1, 2, 3, 4, 5]))
    jobs = few([0.0, 1.0, 2.0, 3.0], [8, 14, 9, 5], [1.0] * 4, prefix=prefix)
    assert bound._spared(jobs, 4).tolist() == [4.0, 8.0, 0.0, 0.0]  # the last token is computed in any case


def one_gpu() -> tuple[Config, Any]:
    """Return an 8B model on one H100, whose steps have no noise."""
    (m,) = load_models("llama-3.1-8b").members
    config = Config((Served("m", m.shape),), pool_bytes=70 * 2**30)
    return config, machine(config)


def test_an_interval_has_room_for_its_seconds_of_work() -> None:
    config, priced = one_gpu()
    at = bound.prices(config, priced)
    each = least(priced.tables, 0, 1, config.batch_cap)
    n, tokens = 400, 2000
    work_s = each.token_s * (tokens - 1) + each.member_s[0][256] + each.head_s
    work_s += each.piece_s[0] + each.piece_s[1] * tokens + each.piece_s[2] * tokens**2 / 2
    jobs = few([0.0] * n, [tokens] * n, [4.0] * n)
    got = bound.share(at, jobs, "ttft", 1.0, math.inf)
    assert got.met * n == pytest.approx(4.0 / work_s, rel=1e-6)
    assert got.met * n < n
    assert bound.share(at, few([0.0], [tokens], [0.01]), "ttft", 1.0, math.inf).met == 0.0  # alone too slow
    assert bound.share(at, jobs, "tpot", 1.0, math.inf).met == 1.0
    assert bound.share(at, jobs, "ttft", 1.0, 0.0).met == 0.0  # the run ends before anything is done


def test_a_closed_loop_and_definitions_by_token_have_no_bound() -> None:
    at = bound.prices(*one_gpu())
    jobs = few([0.0, math.inf], [9, 9], [1.0, 1.0], after=np.array([-1, 0], np.int32), think_s=np.zeros(2))
    with pytest.raises(ValueError, match="closed loops"):
        bound.share(at, jobs, "both", 1.0, 9.0)
    with pytest.raises(ValueError, match="no bound by itl"):
        bound.share(at, few([0.0], [9], [1.0]), "itl", 1.0, 9.0)


def test_the_bound_is_near_the_best_order_of_prompts() -> None:
    """One lane on one GPU serves prompts one by one: the best of all orders meets nearly what the bound allows."""
    config, priced = one_gpu()
    at = bound.prices(config, priced)
    rng, gaps = np.random.default_rng(5), []
    for _ in range(60):
        n = int(rng.integers(3, 8))
        prompt = rng.choice([1024, 1536, 2048], n)
        arrival = np.sort(rng.uniform(0, 0.1, n))
        alone_s = np.array([step(priced.tables, 0, int(p), 1, 0, 0.0, p * p / 2)[0] for p in prompt])
        ttft_s = alone_s * rng.uniform(1.2, 4.0, n)
        best = 0
        for order in permutations(range(n)):
            t, met = 0.0, 0
            for r in order:
                done = max(t, arrival[r]) + alone_s[r]
                if done <= arrival[r] + ttft_s[r]:
                    t, met = done, met + 1
            best = max(best, met)
        most = bound.share(at, few(arrival.tolist(), prompt.tolist(), ttft_s.tolist()), "ttft", 1.0, 9.0)
        gaps.append(math.floor(most.met * n + 1e-9) - best)
    assert min(gaps) >= 0
    assert max(gaps) <= 2
    assert gaps.count(0) >= 0.3 * len(gaps)


def test_the_crossing_is_bracketed_within_two_percent() -> None:
    for knee in (0.06, 0.9, 1.0, 37.0):

        def share(x: float, seed: int, knee: float = knee) -> bound.Share:
            return bound.Share(min(1.0, knee * (1 + 0.05 * seed) / x), int(100 * x) + 1)

        got = searched(share, (0, 1), 0.5)
        assert got is not None
        pooled = knee * 1.025 / 0.5
        assert pooled * 0.999 <= got <= pooled * 1.021
    assert searched(lambda x, _: bound.Share(1.0, int(1000 * x)), (0,), 0.99) is None
    assert searched(lambda x, _: bound.Share(0.5, int(1000 * x)), (0,), 0.99) is None


# ------------------------------------------------------------------ comparisons


def test_a_comparison_has_the_rate_of_its_systems_in_percent_of_the_bound(tmp_path: Path) -> None:
    setting = {"models": "llama-3.2-1b*2", "gpus": 1, "trace": "hyperbolic-like+span_s=40", "drain_s": 20.0}
    rule = "absolute:ttft=0.5,tpot=0.05"
    asked = comparison(["elastic", "dedicated"], setting, rates=(32.0, 512.0), seeds=2, rule=rule)
    measured = measure(asked, tmp_path, workers=1)
    most = measured.about.bound
    assert most is not None
    assert (most["definition"], most["gpus"]) == ("both", 1)
    shown = summary(measured.table, measured.about, "both")
    elastic, dedicated = (system.values for system in shown.systems)
    rate, part = elastic["rate_99"], elastic["of_bound"]
    assert rate is not None
    assert part is not None
    unit_rps = measured.about.panels[0]["unit_rps"]
    assert part.mean == pytest.approx(100 * rate.mean / (most["rate_scale"] * unit_rps), rel=1e-3)
    assert 0 < part.mean <= 100
    assert dedicated["of_bound"] is None  # a control, on other GPUs
    words = line(measured.about)
    assert words is not None
    assert words.startswith("bound: no policy on 1 GPU serves more than ")
    (kept,) = (tmp_path / "bounds").iterdir()
    kept.write_text(kept.read_text().replace(f'"rate_scale":{most["rate_scale"]}', '"rate_scale":1234.5'))
    single = replace(asked, systems={"elastic": "elastic"})  # of the same setting: it is not searched again
    again = measure(single, tmp_path, workers=1).about.bound
    assert again is not None
    assert again["rate_scale"] == 1234.5


def test_the_bound_of_systems_that_cut_gpus_is_no_lower(tmp_path: Path) -> None:
    setting = {"models": "llama-3.1-8b", "gpus": 1, "trace": "hyperbolic-like+span_s=40", "drain_s": 20.0}
    rule = "absolute:ttft=0.5,tpot=0.05"
    rates = {}
    for name in ("chunked", "pdmux"):
        asked = comparison([name], setting, rates=(8.0, 16.0), seeds=1, rule=rule)
        most = measure(asked, tmp_path, workers=1).about.bound
        assert most is not None
        rates[name] = most["rate_scale"]
    assert rates["chunked"] < rates["pdmux"]
