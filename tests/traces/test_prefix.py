"""Blocks that prompts share: how a trace tells them, what a window keeps of them, and what a cache would find."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.policy.types import Jobs, Prefix, UserError
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec
from harness.study.bases import base_specs
from tests.cases import cases
from tests.there import there
from tests.workloads.test_workloads import SPAN_S, drawn, fixed, inside
from traces import schema
from traces.convert import convert
from traces.load import Trace, of_table, trace
from traces.prefix import numbered, picked, seen_tokens
from traces.stats import stats
from workloads.base import base
from workloads.build import SCALINGS, Scaling, build

BLOCK = 4  # tokens of a block of the traces drawn here
MOONCAKE = {"arrival_s": "timestamp", "prompt_tokens": "input_length", "output_tokens": "output_length"}


def of(prefix: Prefix | None, row: int) -> list[int]:
    """Return the ids of one request."""
    ids, offsets = there(prefix).ids, there(prefix).offsets
    return [int(i) for i in ids[offsets[row] : offsets[row + 1]]]


def talks(rows: Trace, seed: int = 0) -> Trace:
    """Return rows whose prompts begin as that of an earlier row of their stream does, for as long as a draw says."""
    draw = np.random.default_rng(seed)
    chains: dict[int, list[list[int]]] = {}
    fresh = iter(range(10**6))
    every = []
    for tokens, model in zip(rows.prompt_tokens.tolist(), rows.model.tolist(), strict=True):
        earlier = chains.setdefault(model, [[]])
        like = earlier[draw.integers(len(earlier))]
        kept = like[: draw.integers(len(like) + 1)][: tokens // BLOCK]
        every.append(kept + [next(fresh) for _ in range(tokens // BLOCK - len(kept))])
        earlier.append(every[-1])
    offsets = np.cumsum([0, *map(len, every)])
    return replace(rows, prefix=Prefix(BLOCK, offsets, numbered(np.array([i for ids in every for i in ids], np.int64))))


def lru_tokens(prefix: Prefix, prompt_tokens: NDArray[Any], output_tokens: NDArray[Any], blocks: int) -> list[int]:
    """Return the tokens of each prompt that a prefix cache of `blocks` blocks of 16 tokens finds, one by one.

    As vLLM does it (v1/core/kv_cache_manager.py, block_pool.py, single_type_kv_cache_manager.py at 003df29 and
    002f349): hits are leading full blocks, of all tokens but the last. The other blocks are the first of a free queue,
    and lose what they held. At its end a request's blocks go to the queue's end, its last block first. A block that is
    computed though another holds the same takes its name. Blocks are named by (id of the trace's block, place in it).
    """
    free: OrderedDict[Any, None] = OrderedDict((("empty", n), None) for n in range(blocks))
    names = iter(range(10**9))
    each = prefix.block_tokens // 16
    hit_tokens = []
    for r, (prompt, output) in enumerate(zip(prompt_tokens.tolist(), output_tokens.tolist(), strict=True)):
        chain: list[Any] = [(i, part) for i in of(prefix, r) for part in range(each)]
        hits = 0
        while hits < min(len(chain), (prompt - 1) // 16) and chain[hits] in free:
            hits += 1
        for name in chain[:hits]:
            del free[name]
        chain += [("private", next(names)) for _ in range(-(-(prompt + output - 1) // 16) - len(chain))]
        for name in chain[hits:]:
            if name in free:  # its old copy keeps its place, without a name
                free = OrderedDict((("stale", next(names)) if old == name else old, None) for old in free)
        for _ in chain[hits:]:
            free.popitem(last=False)
        free.update(dict.fromkeys(reversed(chain)))
        assert len(free) == blocks
        hit_tokens.append(16 * hits)
    return hit_tokens


# ---------------------------------------------------------------- the cache by itself


def chains(*rows: list[int], block_tokens: int = 32) -> Prefix:
    return Prefix(block_tokens, np.cumsum([0, *map(len, rows)]), np.array([i for row in rows for i in row], np.int64))


@given(st.integers(1, 60), st.integers(0, 99))
def test_a_cache_that_loses_nothing_finds_what_one_without_limit_finds(n: int, seed: int) -> None:
    rows = talks(replace(drawn(n, 1, seed), prompt_tokens=np.arange(1, n + 1, dtype=np.int32) * 7), seed)
    wide = there(rows.prefix)._replace(block_tokens=16 * BLOCK)
    prompt = rows.prompt_tokens * 16
    most = seen_tokens(wide, prompt)
    hit_tokens = [lru_tokens(wide, prompt, rows.output_tokens, 16 * size) for size in (400, 3000)]
    assert hit_tokens[1] == (np.minimum(most, prompt - 1) // 16 * 16).tolist()
    assert (np.array(hit_tokens[0]) <= most).all()


# ---------------------------------------------------------------- how a trace tells them


def lines(path: Path, *rows: tuple[float, int, int, list[int]]) -> Path:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return path


def converted(path: Path, **how: Any) -> pa.Table:
    columns = MOONCAKE | {"prefix_hashes": "hash_ids"}
    usual: dict[str, Any] = {"time_unit": "ms", "model": "m", "block_tokens": 512}
    return convert(path, columns, **(usual | how))


def test_ids_are_of_whole_blocks_and_survive_being_written(tmp_path: Path) -> None:
    big = (1 << 64) - 1  # a hash as it comes
    prompts = [(1024, [big, 7]), (1536, [big, 7, 3]), (1100, [big, 9, 8]), (511, [5])]
    source = lines(tmp_path / "a.jsonl", *((1000 * r, tokens, 1, ids) for r, (tokens, ids) in enumerate(prompts)))
    rows = converted(source)
    assert schema.metadata(rows)["block_tokens"] == 512
    schema.write(rows, tmp_path / "a.parquet")
    for loaded in (of_table(rows, "a"), trace(str(tmp_path / "a.parquet"))):
        first, second, third, fourth = (of(loaded.prefix, r) for r in range(4))
        assert [*map(len, (first, second, third, fourth))] == [2, 3, 2, 0]  # the last of 1,100 and of 511 is not full
        assert first == second[:2]
        assert third[0] == first[0]
        assert third[1] not in second
        assert seen_tokens(there(loaded.prefix), loaded.prompt_tokens).tolist() == [0, 1024, 512, 0]
    plain = of_table(convert(source, MOONCAKE, time_unit="ms", model="m"), "a")
    assert plain.prefix is None
    assert plain.sha256 != loaded.sha256


def test_ids_are_of_one_stream(tmp_path: Path) -> None:
    rows = converted(lines(tmp_path / "a.jsonl", (0, 512, 1, [1]), (1000, 512, 1, [1]), (2000, 512, 1, [1])))
    columns = {name: rows[name] for name in rows.column_names} | {"model": ["a", "b", "a"]}
    other = schema.table(columns, schema.metadata(rows))
    prefix = of_table(other, "a").prefix
    assert of(prefix, 0) == of(prefix, 2) != of(prefix, 1)


@cases(
    ("rows", "says"),
    [
        ([(0, 1024, 1, [1, 2]), (1, 1024, 1, [3, 2])], "has 2 behind other blocks than .*:1: an id must stand for"),
        ([(0, 1024, 1, [1, 1])], "has 1 behind other blocks"),
        ([(0, 1024, 1, [1])], "has 1 ids for 1024 prompt tokens in blocks of 512"),
        ([(0, 1024, 1, [1, 2, 3])], "has 3 ids for 1024 prompt tokens"),
    ],
)
def test_ids_that_are_no_chains_are_named(rows: list[Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f'column "hash_ids" {says}'):
        converted(lines(tmp_path / "a.jsonl", *rows))


def test_rows_with_another_number_of_ids_are_left_out_where_that_is_asked(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", (0, 1024, 1, [1, 2]), (900, 1024, 1, [1]), (1900, 1024, 1, []))
    with pytest.raises(UserError, match=r"1 ids for 1024 prompt tokens .*--drop-bad leaves such rows out"):
        converted(source)
    rows = converted(source, drop_bad=True)
    assert schema.metadata(rows)["dropped"] == {"whose blocks cannot be read": 1}
    assert len(of_table(rows, "a")) == 2


@cases(
    ("text", "says"),
    [
        ('{"timestamp": 0}\n[1]\n', r"a\.jsonl:2: not a JSON object"),
        ('{"timestamp": 0}\n{"timestamp"\n', r"a\.jsonl:2: not JSON"),
        ("", r"a\.jsonl: no rows"),
        ('{"timestamp": 0, "input_length": 3}\n', 'no column "output_length"'),
    ],
)
def test_lines_that_are_no_records_are_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=says):
        converted(tmp_path / "a.jsonl")


def test_ids_and_the_size_of_their_blocks_come_together(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", (0, 512, 1, [1]))
    with pytest.raises(UserError, match="given together"):
        converted(path, block_tokens=None)
    with pytest.raises(UserError, match="given together"):
        convert(path, MOONCAKE, time_unit="ms", model="m", block_tokens=512)
    rows = converted(path)
    bare = {key: value for key, value in schema.metadata(rows).items() if key != "block_tokens"}
    with pytest.raises(UserError, match="without block_tokens"):
        of_table(schema.table({name: rows[name] for name in rows.column_names}, bare), "a")


# ---------------------------------------------------------------- what a window keeps of them


requests = st.builds(drawn, st.integers(1, 80), st.integers(1, 3), st.integers(0, 99))
shared = st.builds(talks, requests, st.integers(0, 99))


def rows_of(jobs: Jobs) -> NDArray[Any]:
    """Return the trace's row of each job: prompts number them."""
    return jobs.prompt_tokens - 1


def seen(rows: Trace | Jobs) -> NDArray[np.int64]:
    """Return tokens that each prompt finds in a cache without limit."""
    return seen_tokens(there(rows.prefix), rows.prompt_tokens)


@given(shared, st.integers(0, 2**40), st.sampled_from(SCALINGS), st.floats(0, 250))
def test_a_prompt_shares_what_its_own_past_holds(rows: Trace, seed: int, scaling: Scaling, warmup_s: float) -> None:
    """Whatever comes before it: never more than in the trace, and never with another model's or copy's."""
    scale = 1.0 if scaling == "none" else 2.5
    models = fixed(len(rows.models))
    jobs = build(rows, models, seed=seed, scaling=scaling, rate_scale=scale, warmup_s=warmup_s, window_s=2 * SPAN_S)
    prefix = there(jobs.prefix)
    assert np.array_equal(np.diff(prefix.offsets), jobs.prompt_tokens // BLOCK)
    each = np.repeat(jobs.model, np.diff(prefix.offsets))
    owner = np.full(prefix.ids.max(initial=0) + 1, -1)
    owner[prefix.ids] = each
    assert np.array_equal(owner[prefix.ids], each)
    if scaling != "clients":  # which are turned apart
        assert (seen(jobs) <= seen(rows)[rows_of(jobs)]).all()
    window = build(rows, models, seed=seed, scaling=scaling, warmup_s=0.0)
    assert seen(window).sum() <= seen(rows).sum()


@given(shared, st.integers(1, 3))
def test_a_trace_at_its_own_stamps_shares_what_it_shares(rows: Trace, copies: int) -> None:
    """Also in the second lap, which begins anew, and in copies at once, none of which shares with another."""
    models = fixed(len(rows.models))
    alone = build(rows, models, scaling="none", warmup_s=10.0, window_s=2 * SPAN_S)
    assert np.array_equal(seen(alone)[inside(alone)], seen(rows)[rows_of(alone)][inside(alone)])
    many, once = (build(rows, models, scaling="replicate", rate_scale=n, warmup_s=0.0) for n in (copies, 1))
    assert len(np.unique(there(many.prefix).ids)) == copies * len(np.unique(there(once.prefix).ids))
    assert seen(many).sum() == copies * seen(once).sum()


def test_models_that_use_one_stream_share_nothing() -> None:
    rows = talks(drawn(60, 1))
    first = fixed(1).members[0]
    models = replace(fixed(1), members=(first, replace(first, name="again", shift_s=30.0)))
    jobs = build(rows, models, scaling="none", warmup_s=0.0)
    mine, other = (set(picked(there(jobs.prefix), np.flatnonzero(jobs.model == m)).ids.tolist()) for m in (0, 1))
    assert mine
    assert not mine & other
    late = rows.arrival_s + 30.0 >= SPAN_S  # of the second model these come first, and are of the lap before
    row = rows_of(jobs)[jobs.model == 1]
    tokens = seen(jobs)[jobs.model == 1]
    before = picked(there(rows.prefix), np.flatnonzero(late))
    assert np.array_equal(tokens[late[row]], seen_tokens(before, rows.prompt_tokens[late]))
    assert np.array_equal(tokens[~late[row]], seen(rows)[row][~late[row]])


def test_the_first_requests_keep_their_blocks() -> None:
    jobs = build(talks(drawn(30)), fixed(), warmup_s=0.0)
    first = there(jobs.first(7).prefix)
    assert [of(first, r) for r in range(7)] == [of(jobs.prefix, r) for r in range(7)]
    assert len(first.offsets) == 8
    assert len(first.ids) == first.offsets[-1]


def test_a_trace_without_ids_has_none() -> None:
    assert build(drawn(30), fixed()).prefix is None
    assert trace("sample").prefix is None
    assert stats(trace("sample"))["hit_share"] is None


def test_stand_ins_for_rare_models_share_nothing() -> None:
    """Of models below a hundred requests, SLO bases are measured on prompts drawn one by one."""
    rows = talks(drawn(130, 2))
    rows = replace(rows, model=(np.arange(130) >= 120).astype(np.int32))
    jobs = base(rows, fixed(2), 0)
    count = np.diff(there(jobs.prefix).offsets)
    assert np.array_equal(count[jobs.model == 0], jobs.prompt_tokens[jobs.model == 0] // BLOCK)
    assert (jobs.model == 1).sum() == 1000
    assert not count[jobs.model == 1].any()


# ---------------------------------------------------------------- Mooncake


@pytest.fixture(scope="module")
def conversation(traces_dir: Path) -> Trace:
    return trace("mooncake-conversation")


def test_mooncakes_conversations(conversation: Trace) -> None:
    s = stats(conversation)
    assert (s["requests"], s["models"], s["block_tokens"]) == (12031, 1, 512)
    assert s["span_s"] == pytest.approx(3537.3, abs=0.05)
    assert s["over_8192_share"] == pytest.approx(0.463, abs=5e-4)
    assert s["prompt_tokens"]["mean"] == pytest.approx(12035, abs=0.5)
    assert s["output_tokens"]["p50"] == 350
    assert s["hit_share"] == pytest.approx(0.3734, abs=5e-5)
    assert {of(conversation.prefix, r)[0] for r in range(len(conversation))} == {0}  # all begin with one block
    assert (conversation.prompt_tokens + conversation.output_tokens).max() == 126_527


def test_mooncakes_synthetic_trace(traces_dir: Path) -> None:
    synthetic = trace("mooncake-synthetic")
    s = stats(synthetic)
    assert (synthetic.tier, s["requests"], s["block_tokens"]) == ("synthetic", 3993, 512)
    assert s["hit_share"] == pytest.approx(0.6504, abs=5e-5)


# ---------------------------------------------------------------- requests of any length


def test_what_is_served_is_what_the_model_can_and_the_trace_needs(traces_dir: Path) -> None:
    spec = Spec("static", trace="mooncake-conversation", models="llama-3.1-8b", gpus=1)
    assert [m.shape.max_tokens for m in Setup(spec).config.models] == [131072]  # for 126,527
    assert len(Setup(resolve(replace(spec, warmup_s=0.0, plan="trace"))).jobs()) == 12031
    arena = Spec("static", trace="arena-chat", models="llama-3.1-8b*2,phi-2")
    assert [m.shape.max_tokens for m in Setup(arena).config.models] == [2048] * 3  # for 1,657
    assert [m.shape.max_tokens for m in Setup(replace(arena, served=8192)).config.models] == [8192, 8192, 2048]
    for short, says in (
        (replace(spec, models="qwen-2.5-7b"), "exceed the 32768 of .*; --trace mooncake-conversation.max_tokens=32768"),
        (replace(spec, served=8192), r"exceed the 8192 of .*\(5570 such rows; --served raises it, to 131072 at most"),
    ):
        with pytest.raises(UserError, match=says):
            Setup(resolve(short)).jobs()


def test_slo_bases_serve_what_the_run_serves() -> None:
    assert {spec.served for spec in base_specs(Spec("static", served=4096))} == {4096}
    assert {spec.served for spec in base_specs(Spec("static"))} == {None}
