"""Machines that were measured whole: their tables' form, and what the simulator makes of them, reckoned by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest

from harness.engines import sim
from harness.engines.costs import quantities, shapes
from harness.engines.machine import Config, Served, machine
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Event, Woke
from harness.policy.types import Batch, Experts, Inst, UserError
from harness.policy.view import View
from harness.rows import requests
from harness.run.resolve import resolve
from harness.run.spec import Spec
from tests.cases import cases
from tests.harness.engines.costs import whole_table
from tests.workloads.asked import asked
from workloads.models import shape

API_S = 0.0005


def seconds(m: int) -> float:
    """Return seconds by the table's own lines."""
    return 0.002 + 0.001 * m if m <= 8 else 0.010 + 0.0005 * (m - 8)


def step_s(B: int, C: int, prompts: Iterable[int] = ()) -> float:
    """Return a step's seconds, by the formula at the head of whole.py."""
    tokens = list(prompts)
    area = sum(p * p / 2 for p in tokens)
    model_s = 0.00025 * (B + len(tokens)) + 2**-6 * 1e-3 * C + 2**-10 * 1e-3 * area
    return seconds(B + sum(tokens)) + model_s


class Serve:
    """A policy that runs models where they are put."""

    uses = frozenset({"Load", "Run", "Admit"})
    hears = frozenset({Woke})
    options: ClassVar = {"kv": "paged"}

    def __init__(self, models: Iterable[str]) -> None:
        self.models = tuple(models)

    def on(self, event: Event, view: View) -> Iterable[Action]:
        for m in self.models:
            batch = Batch(Inst(m, (0,)))
            yield from (Load(batch.inst), Run(batch), Admit(m, batch))


def ran(path: str, arrivals: list[tuple[float, int, int, int]], models: int = 1) -> requests.Rows:
    """Replay (seconds, model, prompt, output)."""
    names = tuple(f"m{k}" for k in range(models))
    served = tuple(Served(m, shape("llama-tiny")) for m in names)
    config = Config(served, gpu="desk", table=path, block_tokens=256, batch_cap=4, pool_bytes=1 << 28, chunk_tokens=512)
    engine = sim.make(config, {"kv": "paged"}, machine(config))
    replay(Serve(names), engine, asked(names, *zip(*arrivals, strict=True)))  # type: ignore[arg-type]
    return requests.rows(pa.Table.from_batches(engine.rows()))


def test_a_request_alone_takes_its_prefill_and_a_step_a_token(tmp_path: Path) -> None:
    rows = ran(whole_table.write(tmp_path), [(0.0, 0, 100, 5)])
    ttft_s = API_S + step_s(0, 0, [100])
    assert ttft_s == pytest.approx(0.0005 + 0.056 + 0.00025 + 5000 / 1024 * 1e-3)
    assert rows.ttft_s == pytest.approx([ttft_s], abs=2e-9)
    decodes_s = sum(step_s(1, 100 + k) for k in (1, 2, 3, 4))
    assert rows.e2e_s == pytest.approx([ttft_s + decodes_s], abs=2e-9)


def test_blocks_of_256_tokens_are_counted_one_by_one(tmp_path: Path) -> None:
    """More of them than a record of the kernel has room for are refused: they would be counted in other memory."""
    path = whole_table.write(tmp_path)
    config = Config((Served("m", shape("llama-tiny")),), table=path, block_tokens=256, batch_cap=4, pool_bytes=1 << 28)
    engine = sim.make(config, {"kv": "paged"}, machine(config))
    replay(Serve("m"), engine, asked("m", [0.0], 0, 300, 1))  # type: ignore[arg-type]
    assert engine.stats()["kv_byte_s"] == pytest.approx(2 * 256 * 4096 * step_s(0, 0, [300]), rel=1e-6)
    with pytest.raises(UserError, match="block_tokens is 257: the simulator takes at most 256"):
        sim.make(replace(config, block_tokens=257), {}, machine(config))


def test_a_prompt_steps_together_with_a_decode(tmp_path: Path) -> None:
    """The second one comes within the first one's first decode step, and joins the next."""
    first_s = API_S + step_s(0, 0, [100])
    rows = ran(whole_table.write(tmp_path), [(0.0, 0, 100, 3), (first_s, 0, 20, 1)])
    joined_s = first_s + step_s(1, 101) + step_s(1, 102, [20])
    assert rows.e2e_s[0] == pytest.approx(joined_s, abs=2e-9)
    assert rows.e2e_s[1] == pytest.approx(joined_s - first_s, abs=2e-9)


@cases(
    ("share", "factor", "models", "times"),
    [
        (1.0, 1.0, 3, 3.0),
        (1.0, 1.5, 2, 2.5),
        (1.0, 1.5, 3, 4.0),
        (0.5, 1.0, 2, 1.0),
        (0.5, 1.0, 3, 1.5),
        (0.625, 1, 2, 1.25),
    ],
)
def test_servers_side_by_side_slow_each_other_down_as_measured(
    tmp_path: Path, share: float, factor: float, models: int, times: float
) -> None:
    path = whole_table.write(tmp_path, co_run=whole_table.beside(share, factor))
    rows = ran(path, [(0.0, k, 100, 1) for k in range(models)], models)
    assert rows.ttft_s == pytest.approx([API_S + times * step_s(0, 0, [100])] * models, abs=2e-9)


def test_a_prefill_and_a_decode_side_by_side_are_each_slowed_by_their_own_factor(tmp_path: Path) -> None:
    """They ask for 1.5 machines, so the same work takes each 1.5 times as long, but for their factors."""
    co_run = {"prefill": whole_table.beside(0.5, 3.0)["prefill"], "decode": whole_table.beside(1.0, 1.5)["decode"]}
    prefill_s = step_s(0, 0, [100])
    first_s = API_S + prefill_s
    rows = ran(whole_table.write(tmp_path, co_run=co_run), [(0.0, 0, 100, 2), (first_s - API_S, 1, 100, 1)], 2)
    beside_s = (1 + 1.5 * 0.5) * step_s(1, 101)
    assert rows.e2e_s[0] == pytest.approx(first_s + beside_s, abs=4e-9)
    alone_s = prefill_s - beside_s / (1 + 3.0 * 0.5)
    assert rows.ttft_s[1] == pytest.approx(API_S + beside_s + alone_s, abs=4e-9)


def test_beyond_the_last_tokens_seconds_go_on_as_they_were(tmp_path: Path) -> None:
    config = Config((Served("m", shape("llama-tiny")),), table=whole_table.write(tmp_path))
    profile = sim.make(config, {}, machine(config)).cluster.profile
    assert profile.prefill_s(Inst("m", (0,)), 1024) == pytest.approx(step_s(0, 0, [1024]))
    assert profile.step_s(Inst("m", (0,)), 4, 1000) == pytest.approx(step_s(4, 1000))
    assert profile.load_s(Inst("m", (0,)), "cold") == pytest.approx(0.5 + 9_417_216 / 1e8)


def test_kernels_have_the_parts_of_their_weights(tmp_path: Path) -> None:
    dims = shape("llama-tiny")
    config = Config((Served("m", dims),), table=whole_table.write(tmp_path))
    profile = sim.make(config, {}, machine(config)).cluster.profile
    *kernels, head = profile.kernels_s(Inst("m", (0,)), 4, 1000)
    qkv, attention, out, up, down = kernels[:5]
    assert (len(kernels), head) == (5 * dims.layers, 0.0)  # the LM head is in the layers
    assert sum(kernels) == pytest.approx(profile.step_s(Inst("m", (0,)), 4, 1000) - 4 * 0.00025)
    assert attention == profile.attend_s(Inst("m", (0,)), 4, 1000)
    ffn = dims.ffn
    assert (up / down, out / down) == pytest.approx((2.0, dims.q_heads * dims.head_dim / ffn))
    assert qkv / out == pytest.approx((dims.q_heads + 2 * dims.kv_heads) / dims.q_heads)


def test_parts_of_a_mixture_are_those_of_the_experts_of_a_token() -> None:
    moe = Experts(layers=1, routed=8, top=2, ffn=64, shared_ffn=32)
    mixed = shape("llama-small")._replace(layers=2, hidden=128, q_heads=2, kv_heads=2, head_dim=64, ffn=96, experts=moe)
    before, after = shapes.parts_by_weights(mixed)
    square, width = 128 * 128, 128 * (96 + 2 * 64 + 32) / 2  # a dense layer, and one of experts
    whole = 4 * square + 3 * width
    assert [*before, *after] == pytest.approx([3 * square / whole, square / whole, 2 * width / whole, width / whole])


def test_a_run_takes_the_machine_and_its_settings_from_the_table(tmp_path: Path) -> None:
    path = whole_table.write(tmp_path)
    asked = Spec("static", models="llama-tiny*2", trace="sample", table=path, gpus=1)
    spec = resolve(asked)
    assert (spec.gpu, spec.host, spec.noise, spec.control_s) == ("desk", "desk", 0.0, API_S)
    assert (spec.batch_cap, spec.block_tokens, spec.pool_bytes, spec.sharing) == (4, 256, 1 << 28, "fluid")
    assert resolve(replace(asked, batch_cap=8)).batch_cap == 8
    assert resolve(spec) == spec
    with pytest.raises(UserError, match=r'gpu is "l40s", and cost table .*desk.toml is of desk'):
        resolve(replace(asked, gpu="l40s"))
    with pytest.raises(UserError, match=r'desk has no steps."llama-3.1-8b" \(measured were: llama-tiny\)'):
        resolve(replace(asked, models="llama-3.1-8b"))


def test_every_number_says_where_it_comes_from(tmp_path: Path) -> None:
    sources = quantities.sources([], "desk", "desk", whole_table.write(tmp_path))
    named = {"host desk", "desk.co_run.decode", 'desk.steps."llama-tiny"', "desk.mem_bytes"}
    assert {s.quantity for s in sources} >= named
    assert all(s.source and s.formula and s.error for s in sources)
