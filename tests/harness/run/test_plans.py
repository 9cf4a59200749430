"""Plans: no part of what is replayed informs them; who gets which stream; one placement for all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.engines.sim.engine import Sim
from harness.policy.actions import Load
from harness.policy.events import Woke
from harness.policy.types import GIB, Infeasible, Unsupported, UserError
from harness.rows import record
from harness.run.execute import execute
from harness.run.forecast import reads_plan
from harness.run.placement import homes
from harness.run.resolve import resolve
from harness.run.setup import Failed, Setup, load_models, load_trace
from harness.run.spec import Spec
from tests.bench import bench, ok
from tests.cases import cases
from traces import drawing
from workloads.build import PLAN_SEED, build, plan, requests_seen
from workloads.picking import FOLDED_S, window_fold

MODELS = "llama-3.2-1b*4"


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    """Return a spec of four streams on disk, replayed, not drawn anew: a generator's rows, without its name."""
    table = drawing.table("hyperbolic-like+models=4", 3)
    meta = {key: value for key, value in table.schema.metadata.items() if key != b"maker"}
    path = tmp_path / "mine.parquet"
    pq.write_table(table.replace_schema_metadata(meta), path)
    return Spec("static", trace=str(path), models=MODELS, gpus=2, warmup_s=0.0, scaling="none")


def counts(spec: Spec) -> list[int]:
    jobs = Setup(resolve(spec)).jobs()
    return [int((jobs.model[jobs.arrival_s >= 0] == k).sum()) for k in range(len(jobs.models))]


def told(spec: Spec) -> list[int]:
    """Return requests that a plan stands for."""
    spec = resolve(spec)
    seen_s = {"held-out": 300.0, "window": 300.0, "trace": 600.0, "prefix": 60.0}[spec.plan]
    return [round(planned.rate_rps * seen_s / spec.rate_scale) for planned in Setup(spec).config.plan.values()]


def test_the_folds_are_the_trace_and_a_plan_is_of_the_other_one(spec: Spec) -> None:
    whole = counts(replace(spec, plan="trace"))
    even, odd = counts(spec), counts(replace(spec, seed=1))
    assert [a + b for a, b in zip(even, odd, strict=True)] == whole
    assert told(spec) == odd
    assert told(replace(spec, seed=1)) == even
    assert resolve(spec).window_s == 300.0
    trace = load_trace(spec.trace)
    first = np.bincount(trace.model[trace.arrival_s < 300.0], minlength=4).tolist()
    assert told(spec) == first  # even seeds plan from the earlier half
    assert told(replace(spec, plan="trace")) == whole


def test_a_window_holds_each_row_of_its_fold_once_at_any_offset(spec: Spec) -> None:
    turned = replace(spec, scaling="rotate")
    for seed in (0, 1, 2, 7):
        both = (replace(turned, seed=seed), replace(spec, seed=seed % 2))
        mine, plain = (Setup(resolve(each)).jobs() for each in both)
        pairs = (
            Counter(zip(x.model.tolist(), x.prompt_tokens.tolist(), x.output_tokens.tolist(), strict=True))
            for x in (mine, plain)
        )
        assert next(pairs) == next(pairs)
        assert 0 <= mine.arrival_s.min() <= mine.arrival_s.max() < 300.0


def test_the_oracle_knows_the_window_that_others_replay(spec: Spec) -> None:
    oracle = resolve(replace(spec, preset="oracle"))
    assert oracle.plan == "window"
    assert counts(oracle) == counts(spec)
    assert told(oracle) == counts(spec)
    assert resolve(replace(spec, preset="oracle", plan="prefix")).plan == "trace"


def test_a_long_trace_is_planned_from_an_earlier_period_by_every_seed(spec: Spec) -> None:
    trace = load_trace(spec.trace)
    assert [window_fold(trace, seed, "held-out") for seed in range(4)] == [1, 0, 1, 0]
    long = replace(trace, span_s=FOLDED_S)
    assert [window_fold(long, seed, "window") for seed in range(4)] == [1, 1, 1, 1]
    assert window_fold(trace, 0, "trace") is None


def test_a_synthetic_trace_is_planned_from_what_another_seed_draws() -> None:
    name, models = "hyperbolic-like+models=4", load_models(MODELS)
    trace = load_trace(name)
    assert window_fold(trace, 0, "held-out") is None
    other = drawing.draw(name, PLAN_SEED + 3)
    assert requests_seen(trace, models, "held-out", seed=3) == np.bincount(other.model, minlength=4).tolist()
    window = build(trace, models, seed=3, scaling="none", warmup_s=0.0)
    seen = plan(trace, models, origin="window", seed=3).values()
    assert [round(planned.rate_rps * 600.0) for planned in seen] == np.bincount(window.model, minlength=4).tolist()


@pytest.mark.parametrize("span_s", [1800.0, 3600.0])
def test_a_long_window_of_a_fitted_trace_has_a_warm_up_and_a_plan_from_another_seed(span_s: float) -> None:
    spec = resolve(Spec("static", trace=f"hyperbolic-like+span_s={span_s:g}", models="light8", rate_scale=2.0, seed=3))
    assert (spec.window_s, spec.warmup_s, spec.plan) == (span_s, 0.05 * span_s, "held-out")
    each = np.bincount(drawing.draw("hyperbolic-like", 0).model) * (span_s / 600)
    jobs = Setup(spec).jobs()
    counted = jobs.arrival_s >= 0
    assert np.bincount(jobs.model[counted]).tolist() == (2 * each).tolist()  # two copies, each row once
    assert jobs.arrival_s[0] >= -0.05 * span_s
    assert (~counted).sum() == pytest.approx(0.05 * counted.sum(), rel=0.2)
    other = drawing.draw(spec.trace, PLAN_SEED + 3)
    assert not np.isin(other.arrival_s, drawing.draw(spec.trace, 3).arrival_s).any()
    rates = [planned.rate_rps * span_s / 2 for planned in Setup(spec).config.plan.values()]
    assert rates == pytest.approx(np.bincount(other.model).tolist())


def test_a_model_without_requests_in_the_plan_gets_the_prior_of_one(spec: Spec) -> None:
    trace = load_trace(spec.trace)
    models = load_models(MODELS)
    late = trace.arrival_s >= 300.0
    rare = replace(trace, model=np.where((trace.model == 3) & ~late, 0, trace.model).astype(np.int32))
    assert requests_seen(rare, models, "held-out", seed=0)[3] == 0
    planned = plan(rare, models, 2.0, "held-out", 0)
    assert planned[models.names[3]].rate_rps == pytest.approx(2.0 / 300.0)
    early = np.flatnonzero(~late)
    assert planned[models.names[3]].prompt_tokens == pytest.approx(trace.prompt_tokens[early].mean())


def test_shuffled_streams_are_a_permutation_that_the_seed_draws_for_all_systems(spec: Spec) -> None:
    spec = replace(spec, plan="trace")
    released = counts(spec)
    shuffled = [counts(replace(spec, assign="shuffled", seed=seed)) for seed in range(6)]
    assert all(sorted(streams) == sorted(released) for streams in shuffled)
    assert len({tuple(streams) for streams in shuffled}) > 2
    for system in ("elastic", "unshared"):
        assert counts(replace(spec, system=system, assign="shuffled", seed=4)) == shuffled[4]
    plans = told(replace(spec, assign="shuffled", seed=4))
    assert plans == shuffled[4]


def test_a_shift_goes_with_its_stream(traces_dir: Path) -> None:
    assert traces_dir
    trace, models = load_trace("arena-chat"), load_models("prism18")
    a = build(trace, models, seed=5, scaling="none", warmup_s=0.0)
    b = build(trace, models, seed=5, scaling="none", warmup_s=0.0, assign="shuffled")
    assert np.array_equal(a.arrival_s, b.arrival_s)
    assert sorted(np.bincount(a.model).tolist()) == sorted(np.bincount(b.model).tolist())
    assert not np.array_equal(a.model, b.model)


# ------------------------------------------------------------------ one placement


def loads(spec: Spec) -> dict[str, tuple[int, ...]]:
    setup = Setup(spec)
    policy, engine = setup.policy, setup.engine
    engine.ready()
    answer = policy.on(Woke("start"), engine.view())
    places = {a.inst.model: a.inst.place for a in answer if isinstance(a, Load) and isinstance(a.inst.place, tuple)}
    engine.close()
    return places


@cases("system", ["static", "static:equal", "elastic", "chunked", "unshared"])
def test_a_placement_given_is_where_models_are(system: str, spec: Spec, tmp_path: Path) -> None:
    file = tmp_path / "there.toml"
    given = {m: (k % 2,) for k, m in enumerate(load_models(MODELS).names)}
    file.write_text("".join(f'"{m}" = {list(at)}\n' for m, at in given.items()))
    name, _, preset = system.partition(":")
    config = resolve(replace(spec, system=name, preset=preset or None, placement=str(file)))
    assert dict(config.homes) == given
    assert loads(config) == given


def test_a_placement_is_that_with_which_a_system_starts(spec: Spec) -> None:
    start = loads(resolve(spec))
    assert dict(resolve(replace(spec, system="elastic", placement="static")).homes) == start


BROKEN = '''
"""Places nothing: it fails, at a line of its own."""


class Broken:
    presets = {}
    hears = frozenset()
    uses = frozenset()
    options = {}

    def __init__(self, cluster):
        WHEN_MADE

    def on(self, event, view):
        AT_START
'''


@pytest.mark.parametrize(("at", "line"), [("WHEN_MADE", 12), ("AT_START", 15)])
def test_a_placement_whose_policy_fails_is_a_mistake_at_its_line(
    at: str, line: int, spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Sim] = []

    def close(sim: Sim) -> None:
        closed.append(sim)

    monkeypatch.setattr(Sim, "close", close)
    file = tmp_path / "mine.py"
    file.write_text(BROKEN.replace(at, "raise KeyError('m9')").replace("WHEN_MADE", "pass").replace("AT_START", "pass"))
    with pytest.raises(UserError) as caught:
        homes(Setup(replace(spec, placement=str(file))))
    assert not isinstance(caught.value, Failed)  # the systems that are compared did nothing wrong
    assert str(caught.value).startswith(f"placement mine: KeyError at mine.py:{line} ('m9'); bench check ")
    assert len(closed) == (at == "AT_START")  # what was made ready is closed


def test_who_places_by_itself_is_skipped_with_the_reason(spec: Spec, tmp_path: Path) -> None:
    lone = resolve(replace(spec, system="dedicated", placement="static", gpus=4))
    with pytest.raises(Unsupported, match=r"Cluster\.homes"):
        _ = Setup(lone).policy
    folder = execute(lone, tmp_path, "")
    assert record.meta(folder)["skipped"].startswith("Cluster.homes")


@cases(
    ("text", "says"),
    [
        ('"llama-3.2-1b/1" = [0]', "llama-3.2-1b/2 has no GPU in it"),
        ('"llama-3.2-1b/9" = [0]', 'no model "llama-3.2-1b/9"'),
        ("".join(f'"llama-3.2-1b/{k}" = [2]\n' for k in (1, 2, 3, 4)), "of which there are 2, from 0"),
    ],
)
def test_a_mistake_in_a_placement_is_named(text: str, says: str, spec: Spec, tmp_path: Path) -> None:
    file = tmp_path / "there.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        homes(Setup(replace(spec, placement=str(file))))
    assert says in str(caught.value)
    assert "there.toml" in str(caught.value)


def test_a_placement_that_does_not_fit_is_infeasible(spec: Spec, tmp_path: Path) -> None:
    file = tmp_path / "there.toml"
    file.write_text("".join(f'"{m}" = [0]\n' for m in load_models(MODELS).names))
    full = resolve(replace(spec, placement=str(file), pool_bytes=8 * GIB))
    with pytest.raises(Infeasible, match=r"^\d\.\d GiB short on GPU 0: the placement takes \d+\.\d of its 8\.0$"):
        loads(full)


# ------------------------------------------------------------------ memory for weights and KV


def test_a_pool_is_for_weights_and_kv_alone(spec: Spec) -> None:
    pool = round(67.28 * GIB)
    inside, beside = Setup(resolve(spec)).cluster, Setup(resolve(replace(spec, pool_bytes=pool))).cluster
    assert [gpu.mem_bytes for gpu in beside.gpus] == [pool, pool]
    weights = {m.weight_bytes for m in beside.models.values()}
    assert all(1 <= size / (1.235e9 * 2) < 1.01 for size in weights)  # 1.24 billion parameters in bf16, nothing else
    assert min(m.weight_bytes for m in inside.models.values()) > max(weights)
    with pytest.raises(UserError, match="pool_bytes is"):
        resolve(replace(spec, pool_bytes=100 * GIB))


# ---------------------------------------------------------------- a log at its own stamps


def as_log(path: Path, *stamps: float) -> Path:
    rows = "".join(f"{at},{'ab'[k % 2]},{100 + k},20\n" for k, at in enumerate(stamps))
    path.write_text(f"timestamp,model,prompt_tokens,completion_tokens\n{rows}")
    return path


LOG_MODELS = '[[model]]\nname = "a"\nshape = "llama-3.2-1b"\n[[model]]\nname = "b"\nshape = "llama-3.2-1b"\n'


def asked_of(tmp_path: Path, systems: str, *more: str) -> tuple[str, list[dict[str, Any]]]:
    """Compare on a log of 40 requests in 20.5 s with --scaling none; return line 2 and the rows of all runs."""
    log, models = as_log(tmp_path / "log.csv", *(0.5 * k + 0.25 for k in range(40))), tmp_path / "own.toml"
    models.write_text(LOG_MODELS)
    load_models.cache_clear()
    output = ok("compare", "--systems", systems, "--trace", log, "--models", models, "--scaling", "none", "--gpus", "2",
                "--slo", "absolute:ttft=1,tpot=1", "--no-plot", "--all", "-o", tmp_path / "out", *more)  # fmt: skip
    runs = [record.read(path).to_pylist() for path in sorted((tmp_path / "out").glob("*-*")) if record.exists(path)]
    return next(line for line in output.splitlines() if line.startswith("log · ")), [row for run in runs for row in run]


def test_a_log_from_which_nobody_plans_is_replayed_once_and_whole(tmp_path: Path) -> None:
    line, rows = asked_of(tmp_path, "dedicated")
    assert "replayed: all of it once, as it came" in line
    assert "plan" not in line
    assert [row["arrival_ns"] for row in rows] == [round(1e9 * (0.5 * k + 0.25)) for k in range(40)]
    assert [row["prompt_tokens"] for row in rows] == list(range(100, 140))  # each once, none before the window


def test_a_log_from_which_systems_plan_is_replayed_in_halves_each_once(tmp_path: Path) -> None:
    line, rows = asked_of(tmp_path, "static")
    assert "replayed: even seeds its second half, odd ones its first" in line
    assert "planners saw other requests than these" in line
    assert "before the window" not in line
    assert sorted(row["prompt_tokens"] for row in rows) == list(range(100, 140))
    assert min(row["arrival_ns"] for row in rows) >= 0
    line, rows = asked_of(tmp_path, "static", "--plan", "trace")
    assert "oracle: plans know the trace" in line
    assert "all of it once" in line


def test_a_warm_up_is_made_where_it_is_asked_for_and_said(tmp_path: Path) -> None:
    line, rows = asked_of(tmp_path, "dedicated", "--set", "warmup_s=5")
    assert "before the window 5 s run that are not counted, the last of the same" in line
    assert sum(row["arrival_ns"] < 0 for row in rows) == 10


def test_a_half_without_requests_is_named(tmp_path: Path) -> None:
    as_log(tmp_path / "log.csv", 0.25, 1.25, 2.25, 100.25)
    ok("trace", "convert", tmp_path / "log.csv", "-o", tmp_path / "log.parquet", "--span-s", "300")
    (tmp_path / "own.toml").write_text(LOG_MODELS)
    asked = "compare --systems static --scaling none --slo absolute:ttft=1,tpot=1 --no-plot".split()
    files = ("--trace", tmp_path / "log.parquet", "--models", tmp_path / "own.toml", "-o", tmp_path / "out")
    common = (*asked, *files)
    refused = bench(*common)
    assert refused.exit_code == 2
    assert "log: its second half, of 150 s, has no request" in refused.stderr
    assert "all of it once" in ok(*common, "--plan", "trace")


def test_a_system_plans_where_its_file_names_forecasts_or_its_start_reads_them() -> None:
    spec = Spec("", trace="sample", models="llama-3.2-1b*2", gpus=2)
    told = {name: reads_plan(replace(spec, system=name)) for name in ("dedicated", "unshared", "static", "chunked")}
    assert told == {"dedicated": False, "unshared": False, "static": True, "chunked": True}
