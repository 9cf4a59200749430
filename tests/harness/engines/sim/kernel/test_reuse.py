"""The prefix cache of the simulator: worked cases, its laws, and what a run says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines import wallclock
from harness.engines.costs import profile
from harness.engines.costs.shapes import kv_token_bytes
from harness.engines.machine import Config, Served, machine
from harness.engines.sim import state
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.loop.system import find
from harness.policy.actions import Action, Admit, Evict, Limit, Load, Move, Run
from harness.policy.types import GIB, Batch, Inst, Jobs, Prefix, Unsupported, UserError
from harness.rows import record, requests
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec, as_dict
from harness.study.bases import base_specs
from tests.cases import cases
from tests.harness.engines.sim.kernel.agree import END_S, M0
from tests.harness.engines.sim.kernel.test_corners import ADMIT, FAR, OTHER, SERVE, agreed, small
from tests.harness.engines.sim.oracle import CAUSES
from tests.harness.engines.sim.world import SHAPE, World, drive
from tests.harness.engines.sim.worlds import WILD, world
from tests.there import there
from tests.traces.test_prefix import chains, converted, lines, lru_tokens
from tests.workloads.asked import asked
from traces import schema
from traces.load import trace
from traces.prefix import seen_tokens
from workloads.models import shape

INST = Inst("m", (0,))
CONFIG = Config((Served("m", shape("llama-3.1-8b")),))


def alike(
    rows: Sequence[Sequence[int]], prompt: Any, output: Any, *, block_tokens: int = 16, turns: bool = False
) -> Jobs:
    """Return requests, one a second or each at the end of the one before; `rows` are the ids of their prompts."""
    n = len(rows)
    after = np.arange(-1, n - 1, dtype=np.int32)
    when = np.where(after < 0, 0.0, math.inf) if turns else np.arange(n, dtype=np.float64)
    prefix = chains(*map(list, rows), block_tokens=block_tokens)
    loop: dict[str, Any] = {"after": after, "think_s": np.zeros(n)} if turns else {}
    return asked("m", when, 0, prompt, output, prefix=prefix, **loop)


def served(work: Jobs, config: Config = CONFIG, limit: int | None = None) -> Sim:
    """Serve a workload to its end, on one GPU."""
    sim = Sim(config)
    for action in (Load(INST), Limit("m", 0, limit), Run(Batch(INST)), Admit("m", Batch(INST))):
        sim.do(action)
    sim.take(work)
    sim.begin(frozenset(), oracle=False)
    assert sim.poll(math.inf) is None
    assert (sim.S.requests["state"] == state.DONE).all()
    return sim


def ran(work: Jobs) -> requests.Rows:
    """Return the rows of a workload on `dedicated`."""
    sim = Sim(CONFIG)
    replay(find("dedicated")(sim.cluster), sim, work)
    return requests.rows(pa.Table.from_batches(sim.rows()))


# ---------------------------------------------------------------- one request after the other


def lru(work: Jobs, blocks: int) -> list[int]:
    """Return the tokens that the reference finds in a pool of so many blocks."""
    return lru_tokens(there(work.prefix), work.prompt_tokens, work.output_tokens, blocks)


def isolated(work: Jobs, blocks: int) -> list[int]:
    """Return the tokens that the simulator finds in an account of so many blocks."""
    size = 16 * kv_token_bytes(CONFIG.models[0].shape)
    sim = served(work, replace(CONFIG, watermark=0.0), blocks * size)
    assert sim.S.insts["blocks"].tolist() == [0, 0]
    assert sim.S.insts["cached"].max() <= blocks
    hit_tokens: list[int] = sim.S.requests["found"].tolist()
    return hit_tokens


@cases(("blocks", "hits"), [(20, [0, 64, 0, 64]), (9, [0, 64, 0, 64]), (8, [0, 64, 0, 48]), (7, [0, 64, 0, 32])])
def test_the_tail_of_a_chain_is_the_first_to_go(blocks: int, hits: list[int]) -> None:
    """a, then a and more, then others, then a again: the third takes what it needs from the tail of the second."""
    work = alike([[0, 1], [0, 1, 2], [3, 4], [0, 1]], np.array([65, 97, 65, 65]), 1, block_tokens=32, turns=True)
    assert isolated(work, blocks) == lru(work, blocks) == hits


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(30, 300), st.sampled_from([16, 32, 64]))
def test_one_request_after_the_other_finds_what_an_lru_has(seed: int, blocks: int, block_tokens: int) -> None:
    """To the token; no prompt ends with its last block, of which vLLM would have a second copy."""
    draw, fresh = np.random.default_rng(seed), iter(range(10**6))
    rows: list[list[int]] = [[]]
    for _ in range(60):
        like = rows[draw.integers(max(0, len(rows) - 6), len(rows))]
        new = int(draw.integers(0, 400 // block_tokens))
        rows.append([*like[: draw.integers(len(like) + 1)], *(next(fresh) for _ in range(new))][: 400 // block_tokens])
    prompt = np.array([block_tokens * len(row) for row in rows]) + draw.integers(1, 15, len(rows))
    work = alike(rows, prompt, draw.integers(1, 60, len(rows)), block_tokens=block_tokens, turns=True)
    assert isolated(work, blocks) == lru(work, blocks)


def test_mooncakes_conversations_in_50_gib_find_what_an_lru_has(traces_dir: Path) -> None:
    """The number of the reference (test_prefix.py): 4.39 % of 144,793,823 tokens."""
    log = trace("mooncake-conversation")
    work = replace(alike([[]] * len(log), log.prompt_tokens, log.output_tokens, turns=True), prefix=there(log.prefix))
    sim = served(work, replace(CONFIG, watermark=0.0), 50 * GIB)
    assert int(sim.S.requests["found"].sum()) == 6_362_656
    assert sim.stats()["hit_share"] == pytest.approx(0.0439, abs=5e-5)
    assert sim.S.insts["cached"].max() == 25_600


# ---------------------------------------------------------------- many at a time


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from([0, 256, 2048]), st.booleans())
def test_where_memory_never_runs_short_the_order_of_arrival_decides(seed: int, chunk: int, burst: bool) -> None:
    draw = np.random.default_rng(seed)
    rows = [[0, *(10 * k + np.arange(draw.integers(0, 8)))] for k in draw.integers(1, 6, 40)]
    work = alike(rows, np.array([64 * len(row) for row in rows]) + draw.integers(0, 60, 40), 20, block_tokens=64)
    if burst:
        work = replace(work, arrival_s=0.01 * work.arrival_s)
    hit_tokens = served(work, replace(CONFIG, chunk_tokens=chunk)).S.requests["found"]
    most = seen_tokens(there(work.prefix), work.prompt_tokens)
    assert hit_tokens.tolist() == (np.minimum(most, work.prompt_tokens - 1) // 16 * 16).tolist()


def test_hits_are_attended_to_but_not_computed() -> None:
    """The first token takes one step: of the tokens that are no hits, each of which attends to all before it."""
    priced = machine(CONFIG)
    host, row = priced.host, profile.row(priced.tables, 0)
    for prompt, computed in ((1000, 8), (1008, 16), (1009, 1)):  # a whole prompt is computed from its last block on
        rows = ran(alike([range(prompt // 16)] * 3, prompt, 30))
        for first_s, tokens in zip(rows.ttft_s, (prompt, computed, computed), strict=True):
            area = tokens * (prompt - tokens + tokens / 2)
            step_s = profile.step_s(row, p=tokens, n=1, area=area, out=1)
            assert first_s == pytest.approx(host.api_in_s + step_s + host.api_out_s, rel=1e-6)
        np.testing.assert_allclose(requests.tpot_s(rows), requests.tpot_s(rows)[0], rtol=1e-6)


def with_ids(w: World, *rows: Sequence[int]) -> World:
    """Return a world of blocks of 4 tokens whose prompts have these ids."""
    return replace(w, jobs=replace(w.jobs, prefix=chains(*map(list, rows), block_tokens=4)))


def test_a_prompt_finds_what_the_same_step_is_to_compute_and_takes_no_memory_for_it() -> None:
    # three blocks for each of 9 tokens and one more: two of them are the same
    w = small([(0.0, 0, 9, 1), (0.0, 0, 9, 1)], SERVE, blocks=4)
    R, _ = agreed(with_ids(w, [0, 1], [0, 1]))
    assert (R["found"].tolist(), R["kv"].tolist(), R["done"].tolist()) == ([0, 8], [0.0, 0.0], [0.25, 0.25])
    R, _ = agreed(w)
    assert (R["kv"].tolist(), R["done"].tolist()) == ([0.0, 0.125], [0.125, 0.25])


def test_of_a_block_that_two_compute_the_cache_has_one() -> None:
    # in pieces of a block, side by side in two batches: the second finds the first block and is ahead from then on
    script = [*ADMIT, (-math.inf, Run(M0, chunk_tokens=4)), (0.0, Run(OTHER, chunk_tokens=4)), (0.0, Admit(1, OTHER))]
    rows = [(0.0, 0, 21, 1), (0.0, 0, 21, 1), (5.0, 0, 21, 1)]
    w = with_ids(small(rows, script), *[range(5)] * 3)
    R, _ = agreed(w)
    assert R["found"].tolist() == [0, 4, 20]
    sim, _ = drive(w)
    assert sim.S.entries["blocks"][3:].tolist() == [1] * 5


def test_a_request_that_lost_its_kv_finds_what_is_left_of_its_prompt() -> None:
    # both need a third block of five when they have 9 tokens: the second loses its own, and computes 9 again, or 5
    w = small([(0.0, 0, 7, 9), (0.0, 0, 7, 9)], SERVE, blocks=5)
    for case, again in ((w, 9), (with_ids(w, [0], [1]), 5)):
        R, _ = agreed(case)
        assert R["preemptions"].tolist() == [0, 1]
        assert drive(case)[0].S.batches["prefilled"].tolist() == [14 + again]


def test_what_nobody_holds_goes_with_the_weights_and_with_the_limit() -> None:
    block = 4 * kv_token_bytes(SHAPE)
    rows = [(0.0, 0, 9, 1), (5.0, 0, 9, 1)]
    leave: list[tuple[float, Action]] = [(1.0, Evict(M0.inst)), (2.0, Load(M0.inst))]

    def cut(blocks: int) -> list[tuple[float, Action]]:
        return [(1.0, Limit("m0", 0, blocks * block)), (2.0, Limit("m0", 0, None))]

    for more, hits in (([], 8), (leave, 0), (cut(2), 8), (cut(1), 4), (cut(0), 0)):
        R, _ = agreed(with_ids(small(rows, [*SERVE, *more]), [0, 1], [0, 1]))
        assert R["found"].tolist() == [0, hits]


def test_a_prefill_instance_keeps_the_prompts_whose_kv_moves_on() -> None:
    away: list[tuple[float, Action]] = [(0.5, Admit(0, FAR)), (0.5, Move(0, (1,)))]
    script = [*ADMIT, (-math.inf, Run(M0, "prefill")), (-math.inf, Load(FAR.inst)), (-math.inf, Run(FAR, "decode"))]
    R, done = agreed(with_ids(small([(0.0, 0, 9, 3), (5.0, 0, 9, 1)], [*script, *away], gpus=2), [0, 1], [0, 1]))
    assert done[0][2]
    assert R["found"].tolist() == [0, 8]
    assert (R["state"] == state.DONE).all()


@cases("first", [0, 20, WILD, WILD + 20])
def test_prompts_without_ids_run_as_without_a_cache(first: int) -> None:
    for seed in range(first, first + 20):
        w = replace(world(seed), end_s=END_S)
        if w.options["kv"] == "elastic":  # with a cache, pages count as packed
            continue
        none = Prefix(w.config.block_tokens, np.zeros(len(w.jobs) + 1, np.int64), np.zeros(0, np.int64))
        bare, cache = (drive(x)[0] for x in (w, replace(w, jobs=replace(w.jobs, prefix=none))))
        for name in ("state", "admit", "first", "done", "made", "preemptions", *CAUSES):
            np.testing.assert_array_equal(bare.S.requests[name], cache.S.requests[name])
        assert cache.stats() == {**bare.stats(), "hit_share": 0.0}


# ---------------------------------------------------------------- what a run says


def test_blocks_of_an_id_are_whole_blocks_of_the_engine() -> None:
    sim = Sim(CONFIG)
    sim.take(alike([[0]], 30, 1, block_tokens=24))
    with pytest.raises(ValueError, match="block_tokens, 16, is no divisor of the 24 that an id stands for"):
        sim.begin(frozenset(), oracle=False)


def test_an_engine_in_real_time_says_that_it_has_none() -> None:
    engine = wallclock.WallClock.__new__(wallclock.WallClock)
    with pytest.raises(Unsupported, match=r"a prefix cache \(--no-prefix-cache\)"):
        engine.take(alike([[0]], 30, 1))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a trace with ids: ten turns of each of four conversations, each turn 512 tokens longer."""
    folder = tmp_path_factory.mktemp("trace")
    turns = [
        (1000.0 * (4 * k + c), 512 * (k + 1) + 100, 50, [100 * c + i for i in range(k + 1)] + [100 * c + 50 + k])
        for k in range(10)
        for c in range(4)
    ]
    schema.write(converted(lines(folder / "talks.jsonl", *turns)), folder / "talks.parquet")
    return str(folder / "talks.parquet")


def test_a_spec_has_a_prefix_cache_where_the_trace_has_ids(told: str) -> None:
    spec = Spec("dedicated", trace=told, models="llama-3.1-8b")
    on, off = resolve(spec), resolve(replace(spec, prefix_cache=False))
    assert (on.prefix_cache, off.prefix_cache) == (True, False)
    assert resolve(on) == on
    assert on.hash8 != off.hash8
    assert Setup(on).jobs().prefix is not None
    assert Setup(off).jobs().prefix is None
    assert {spec.prefix_cache for spec in base_specs(off)} == {False}
    for wanted in (None, True, False):  # without ids there is nothing to choose, and names stay
        bare = resolve(Spec("dedicated", trace="sample", prefix_cache=wanted))
        assert bare.prefix_cache is None
        assert "prefix_cache" not in as_dict(bare)
        assert Setup(bare).jobs().prefix is None
    with pytest.raises(UserError, match=r"block_tokens is 48, no divisor of the 512 .* \(--no-prefix-cache\)"):
        Setup(resolve(replace(spec, block_tokens=48))).jobs()


def test_a_run_tells_its_share_of_hits(told: str, tmp_path: Path) -> None:
    spec = Spec("dedicated", trace=told, models="llama-3.1-8b", warmup_s=0.0, scaling="none", plan="trace")
    on, off = (execute(resolve(replace(spec, prefix_cache=x)), tmp_path, "") for x in (True, False))
    tokens = sum(512 * (k + 1) + 100 for k in range(10))
    assert record.meta(on)["stats"]["hit_share"] == pytest.approx(sum(512 * k for k in range(10)) / tokens)
    assert "hit_share" not in record.meta(off)["stats"]
    ttft_s = [requests.rows(record.read(folder)).ttft_s.mean() for folder in (on, off)]
    assert ttft_s[0] < 0.5 * ttft_s[1]
