"""Closed loops: worked cases, and their laws."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from harness.engines.machine import Config, Served
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.loop.system import find
from harness.policy.actions import Admit, Load, Run
from harness.policy.events import Arrived, Event, Finished
from harness.policy.types import Batch, Inst, Jobs, UserError
from harness.rows import record, requests
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Setup, load_models, load_trace
from harness.run.spec import Spec
from tests.cases import cases
from traces import drawing, synthetic
from traces.kept import canonical
from traces.load import sized
from workloads.base import base
from workloads.build import FIRST_S, build, plan
from workloads.models import model_set, shape

INST = Inst("m", (0,))
CONFIG = Config((Served("m", shape("llama-3.1-8b")),))


def jobs(clients: int, requests: int, prompt: Any = 300, output: Any = 40, think_s: float = 0.0) -> Jobs:
    """Return a loop of `clients` that all start at 0."""
    after = np.maximum(np.arange(requests) - clients, -1).astype(np.int32)
    unit, never = np.ones(requests, np.int32), np.full(requests, math.inf)
    arrival_s, think = np.where(after < 0, 0.0, math.inf), np.full(requests, think_s)
    return Jobs(("m",), arrival_s, 0 * unit, prompt * unit, output * unit, never, never, after=after, think_s=think)


def ran(work: Jobs, config: Config = CONFIG, end_s: float = math.inf) -> requests.Rows:
    sim = Sim(config)
    replay(find("dedicated")(sim.cluster), sim, work, end_s=end_s)
    return requests.rows(pa.Table.from_batches(sim.rows()))


# ------------------------------------------------------------------ clients


def test_one_client_takes_the_sum_of_what_its_requests_take_alone() -> None:
    lengths = np.array([300, 17, 1000, 300], np.int32)
    alone = [float(ran(jobs(1, 1, int(n))).e2e_s[0]) for n in lengths]
    rows = ran(jobs(1, 4, lengths, think_s=0.5))
    np.testing.assert_allclose(rows.e2e_s, alone, atol=2e-9)
    starts = np.concatenate([[0.0], np.cumsum(np.array(alone) + 0.5)[:-1]])
    np.testing.assert_allclose(rows.arrival_s, starts, atol=1e-8)


@given(st.integers(1, 12), st.integers(0, 2**31), st.sampled_from([0.0, 0.3]))
@given_settings(max_examples=15)
def test_every_client_has_one_request_or_thinks(clients: int, seed: int, think_s: float) -> None:
    """Little's law at each instant: as many requests in the system, or thought about, as there are clients."""
    draw, n = np.random.default_rng(seed), 5 * clients
    work = jobs(clients, n, draw.integers(1, 2000, n), draw.integers(1, 60, n), think_s)
    rows = ran(work)
    ends_s = rows.arrival_s + rows.e2e_s
    assert work.after is not None
    later = work.after >= 0
    np.testing.assert_allclose(rows.arrival_s[later] - ends_s[work.after[later]], think_s, atol=2e-9)
    if think_s == 0.0:
        at_s = np.linspace(1e-3, ends_s[-clients:].min() - 1e-3, 50)  # until the first client has done its share
        came, went = (np.searchsorted(np.sort(x), at_s, "right") for x in (rows.arrival_s, ends_s))
        assert (came - went == clients).all()


def test_what_cannot_be_served_releases_the_next() -> None:
    small = Config(CONFIG.models, mem_fraction=0.2, process_bytes=1 << 29)  # beside the weights hardly any KV
    rows = ran(jobs(1, 3, np.array([8000, 20, 20], np.int32)), small)
    assert [bool(x) for x in rows.done] == [False, True, True]
    failed_s = float(rows.waits_s[0].sum())
    assert rows.arrival_s[1] == pytest.approx(failed_s + Sim(small)._host.api_out_s, abs=2e-9)


def test_a_policy_knows_nothing_of_what_is_not_sent_yet() -> None:
    sim = Sim(CONFIG)
    for action in (Load(INST), Run(Batch(INST))):
        sim.do(action)
    sim.take(jobs(2, 4))
    sim.begin(frozenset({Arrived, Finished}), oracle=False)
    told: list[Event] = []
    while (event := sim.poll(math.inf)) is not None:
        told.append(event)
        if isinstance(event, Arrived):
            assert event.request.arrival_s == pytest.approx(sim.view().now_s - sim._host.api_in_s)
            sim.do(Admit(event.request.id, Batch(INST)))
        seen = {e.request.id for e in told if isinstance(e, Arrived)}
        for rid in set(range(5)) - seen:
            with pytest.raises(KeyError):
                sim.view().request(rid)
            assert sim.orders.gone(rid) == ("never", f"no request {rid}")
    assert [e.request.id for e in told if isinstance(e, Arrived)] == [0, 1, 2, 3]


def test_what_was_never_sent_stands_at_the_end_of_the_run() -> None:
    rows = ran(jobs(1, 6, output=200, think_s=1.0), end_s=2.0)
    sent = rows.arrival_s < 2.0
    assert 1 <= sent.sum() < 5
    assert (rows.arrival_s[~sent] == 2.0).all()
    assert not rows.done[~sent].any()
    assert not rows.waits_s[~sent].any()


@cases("after", [[-1, 0, 0], [-1, 2, 0], [0, -1, -1], [-1, 1, 0]])
def test_a_loop_that_is_none_is_refused(after: list[int]) -> None:
    broken = replace(jobs(1, 3), after=np.array(after, np.int32))
    sim = Sim(CONFIG)
    sim.take(broken)
    with pytest.raises(ValueError, match="closed loop"):
        sim.begin(frozenset(), oracle=False)


# ------------------------------------------------------------------ as a workload


def test_a_closed_loop_by_name() -> None:
    p = synthetic.preset("closed+clients=4+requests=10+think_s=0.5")
    assert str(p) == "closed+models=1+clients=4+requests=10+think_s=0.5"
    assert (p.prompt, p.output, p.sent) == (1024, 256, 10)
    assert p.span_s == 3 * (0.5 + 256 * synthetic.NOMINAL_TPOT_S)
    drawn = drawing.draw(str(p), 1)
    assert [round(x / p.nominal_s) for x in drawn.arrival_s] == [0] * 4 + [1] * 4 + [2] * 2
    assert set(drawn.prompt_tokens.tolist()) == {1024}
    laws = [drawing.draw("closed+lengths=sharegpt+max_tokens=4096", seed).prompt_tokens for seed in (1, 1, 2)]
    assert np.array_equal(laws[0], laws[1])
    assert not np.array_equal(laws[0], laws[2])


@cases(
    ("name", "why"),
    [
        ("closed+clients=0", "clients is 0, below 1"),
        ("closed+think_s=-1", "think_s is -1.0, below 0"),
        ("closed+prompt=8000+output=500", "8000 + 500 tokens are above max_tokens, 8192"),
        ("closed+clients=8+requests=8", "8 requests of 8 clients: the first of each is only warm-up"),
        ("closed+span_s=60", '"+span_s=60" is not +FIELD=VALUE of closed (fields: models, clients'),
        ("closed+clients=x", 'clients is "x", not a number'),
        ("closed+range_ratio=1", "range_ratio is 1, not a share from 0 to below 1"),
        ("closed+range_ratio=0.2+lengths=arena", "range_ratio is of fixed lengths, and lengths is arena"),
        ("closed+prompt=4000+output=4000+range_ratio=0.1", "4400 + 4400 tokens are above max_tokens, 8192"),
    ],
)
def test_what_is_no_closed_loop(name: str, why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        synthetic.preset(name)


def test_lengths_of_a_closed_loop_have_a_range(tmp_path: Path) -> None:
    """vllm-project/vllm PR 44594: 450 prompts of 128 clients, 1,000 tokens in and 5,000 out, both within 20 %."""
    name = "closed+clients=128+requests=450+prompt=1000+output=5000+range_ratio=0.2"
    rows = drawing.draw(name, 3)
    for tokens, mean in ((rows.prompt_tokens, 1000), (rows.output_tokens, 5000)):
        assert 0.8 * mean <= tokens.min() < 0.83 * mean
        assert 1.17 * mean < tokens.max() <= 1.2 * mean
        assert tokens.mean() == pytest.approx(mean, rel=0.03)
    assert synthetic.preset(name).longest_tokens == 1200 + 6000
    few = drawing.draw("closed+clients=9+requests=90000+prompt=3+output=2+range_ratio=0.5", 0)
    assert np.bincount(few.prompt_tokens)[2:] == pytest.approx(30_000, rel=0.03)  # each of 2, 3 and 4 as often
    assert set(few.output_tokens) == {1, 2, 3}
    same = drawing.draw(name.replace("=0.2", "=0"), 3)
    assert {*same.prompt_tokens} == {1000}
    spec = Spec(
        "chunked", trace=name, models="qwen-2.5-7b", gpu="b200", gpus=1, served=8192, slo="absolute:ttft=60,tpot=1"
    )
    ran_ = record.read(execute(resolve(spec), tmp_path, ""))
    assert set(ran_["state"].to_pylist()) == {"done"}
    assert ran_.num_rows == 450


def test_rows_of_a_run_are_a_trace(tmp_path: Path) -> None:
    spec = Spec(
        "dedicated", trace="sample", models="llama-3.2-1b*8", gpus=8, rate_scale=4.0, window_s=20.0, warmup_s=5.0
    )
    run = execute(resolve(spec), tmp_path, "")
    rows = [row for row in record.read(run).to_pylist() if row["arrival_ns"] >= 0]
    read = load_trace(str(run / "requests.parquet"))
    assert read.arrival_s == pytest.approx([row["arrival_ns"] / 1e9 for row in rows])
    for column in ("prompt_tokens", "output_tokens"):
        assert getattr(read, column).tolist() == [row[column] for row in rows]
    assert [read.models[k] for k in read.model] == [row["model"] for row in rows]
    assert read.name == run.name
    assert "of the warm-up" in str(read.notice)
    path, report = canonical(run / "requests.parquet", tmp_path / "traces")
    assert path.parent == tmp_path / "traces"
    assert "read as a log of bench" in report


def test_each_model_has_clients_of_its_own() -> None:
    models = model_set("llama-3.2-1b*3")
    trace = load_trace(sized("closed+clients=4+requests=10", len(models.members)))
    work = build(trace, models, slo={"llama-3.2-1b/2": (1.0, 0.1)})
    assert work.after is not None
    assert len(work) == 30
    first = work.after < 0
    assert first.sum() == 12
    assert (work.arrival_s[first] == -FIRST_S).all()
    assert np.isinf(work.arrival_s[~first]).all()
    assert (work.model[~first] == work.model[work.after[~first]]).all()
    assert len(set(work.after[~first].tolist())) == 18
    assert np.isfinite(work.ttft_slo_s[work.model == 1]).all()
    assert np.isinf(work.ttft_slo_s[work.model == 0]).all()
    assert len(base(trace, models, 3)) == 30  # the SLO base is the loop itself
    forecast = plan(trace, models)
    assert forecast["llama-3.2-1b/1"].rate_rps == pytest.approx(10 / trace.span_s)


def test_the_rate_scale_is_one_of_clients() -> None:
    models = model_set("llama-3.2-1b")
    trace = load_trace("closed+clients=4+requests=20")
    for scale, clients in ((0.5, 2), (1.0, 4), (3.0, 12), (0.01, 1)):
        work = build(trace, models, rate_scale=scale)
        assert work.after is not None
        assert ((work.after < 0).sum(), len(work)) == (clients, 5 * clients)
    for scaling in ("time", "replicate"):
        with pytest.raises(UserError, match=f"--scaling {scaling} has no stamps to scale"):
            build(trace, models, scaling=scaling)


def test_a_run_of_a_closed_loop(tmp_path: Path) -> None:
    spec = resolve(Spec("dedicated", trace="closed+clients=3+requests=12+prompt=100+output=20", models="llama-3.2-1b"))
    assert (spec.window_s, spec.warmup_s, spec.scaling) == (None, FIRST_S, "clients")
    assert len(Setup(spec).jobs()) == 12
    assert Setup(spec).config.models[0].shape.max_tokens == 128
    folder = execute(spec, tmp_path, "")
    rows = requests.rows(record.read(folder))
    counted = requests.in_window(rows, math.inf)
    assert counted.tolist() == [False] * 3 + [True] * 9  # all but the first wave
    assert rows.done.all()
    assert (np.diff(rows.arrival_s) >= 0).all()
    assert record.read(execute(spec, tmp_path / "again", "")).equals(record.read(folder))
    assert load_models(spec.models).names == rows.models
