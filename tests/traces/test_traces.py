"""Traces: golden statistics, conversion, and every way in which a table can be wrong."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.types import UserError
from harness.run.setup import load_trace
from tests.cases import cases
from traces import readers, schema, synthetic
from traces.convert import convert, table
from traces.load import Trace, listing, manifest, of_table, present, sized, trace
from traces.stats import stats

COLUMNS = {"arrival_s": "t", "prompt_tokens": "in", "output_tokens": "out", "model": "m"}


def csv(path: Path, rows: Sequence[str], header: str = "t,in,out,m") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def converted(path: Path, rows: Sequence[str], columns: Mapping[str, str] = COLUMNS, **how: Any) -> Trace:
    return of_table(convert(csv(path / "my.csv", rows), columns, **how), "my.csv")


def refusal(path: Path, rows: Sequence[str], columns: Mapping[str, str] = COLUMNS, **how: Any) -> str:
    """Return the one line of a refusal, from the file's name on."""
    with pytest.raises(UserError) as caught:
        converted(path, rows, columns, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}{os.sep}")


# ---------------------------------------------------------------- the real trace


@pytest.fixture(scope="module")
def real(traces_dir: Path) -> Trace:
    arena = trace("arena-chat")
    assert arena.notice is None, "TRACES_DIR is set but holds no Arena-Chat"
    return arena


def test_arena_statistics(real: Trace) -> None:
    s = stats(real)
    assert (s["requests"], s["models"], s["span_s"]) == (1500, 27, 600.0)
    assert real.arrival_s[[0, -1]].tolist() == [0.0, 600.0]
    for column, golden in {
        "prompt_tokens": {"mean": 136.265, "p50": 40, "p99": 902.27, "max": 1021, "min": 2},
        "output_tokens": {"mean": 256.198, "p50": 211, "p99": 785, "max": 977, "min": 2},
    }.items():
        assert s[column] == pytest.approx(golden, abs=6e-4)
    assert s["one_token_outputs"] == 0
    assert (real.output_tokens == 2).sum() == 13
    assert s["iat_cv"] == pytest.approx(1.1044, abs=5e-5)
    assert s["minute_cv"] == pytest.approx(0.1318, abs=5e-5)
    assert s["top1_share"] == pytest.approx(0.1973, abs=5e-5)
    assert s["bottom60_share"] == pytest.approx(0.174, abs=5e-4)
    assert s["minute_cv_models"] == pytest.approx([0.631, 0.926, 1.725], abs=5.1e-4)
    assert s["active_fraction"] == pytest.approx(0.615, abs=5e-4)
    assert (real.tier, real.licence) == ("replayed", "Apache-2.0")
    assert real.where(0).endswith("arena_vtc_real_trace.csv:2")


def test_another_file_under_the_name_of_the_real_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csv(tmp_path / "arena_vtc_real_trace.csv", ["0,0,a,1,1"], "req_id,req_time,adapter_dir,prompt_len,output_len")
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    with pytest.raises(UserError, match="sha256 differs"):
        trace("arena-chat")


# ---------------------------------------------------------------- samples and the stand-in


@cases("name", ["arena-like", "sample"])
def test_samples_are_what_the_generator_draws(name: str) -> None:
    kept = schema.read(Path(str(present(name))))
    again = synthetic.table(name)
    assert kept.column_names == again.column_names
    for column in again.column_names:
        if column == "arrival_s":  # another libm may differ in the last bit
            np.testing.assert_allclose(kept[column].to_numpy(), again[column].to_numpy(), rtol=1e-12)
        else:
            assert kept[column].combine_chunks().to_pylist() == again[column].combine_chunks().to_pylist()
    assert schema.metadata(kept) == schema.metadata(again)


@cases("name", sorted(synthetic.PRESETS))
def test_the_manifest_tells_the_truth_of_what_is_drawn(name: str) -> None:
    loaded, entry = load_trace(name), manifest()[name]
    facts = (loaded.tier, loaded.licence, len(loaded.models), len(loaded), loaded.span_s)
    assert facts == tuple(entry[key] for key in ("tier", "licence", "models", "requests", "span_s"))


def test_without_the_real_trace_the_fitted_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    if present("arena-chat") is not None:
        pytest.skip("traces/data/ holds the real one")
    stand_in = trace("arena-chat")
    assert (stand_in.name, stand_in.tier) == ("arena-like", "synthetic")
    assert stand_in.notice is not None
    assert "synthetic" in stand_in.notice
    assert "VTC-artifact" in stand_in.notice
    assert "\n" not in stand_in.notice


def test_the_stand_in_is_like_the_real_one() -> None:
    drawn = [stats(of_table(synthetic.table("arena-like", seed), "x")) for seed in range(5)]
    mean = {
        key: np.mean([np.ravel(s[key]) for s in drawn], axis=0)
        for key in ("iat_cv", "minute_cv", "top1_share", "bottom60_share", "minute_cv_models", "active_fraction")
    }
    assert all(s["requests"] == 1500 and s["models"] <= 27 for s in drawn)
    assert mean["iat_cv"] == pytest.approx(1.1044, rel=0.1)
    assert mean["minute_cv"] == pytest.approx(0.1318, rel=0.3)
    assert mean["top1_share"] == pytest.approx(0.1973, rel=0.1)
    assert mean["bottom60_share"] == pytest.approx(0.174, rel=0.1)
    assert mean["minute_cv_models"] == pytest.approx([0.631, 0.926, 1.725], rel=0.3)
    assert mean["active_fraction"] == pytest.approx(0.615, rel=0.15)
    for column, golden in (("prompt_tokens", (136.3, 40, 902)), ("output_tokens", (256.2, 211, 785))):
        for key, value in zip(("mean", "p50", "p99"), golden, strict=True):
            assert np.mean([s[column][key] for s in drawn]) == pytest.approx(value, rel=0.1)


def test_the_listing_says_what_is_here() -> None:
    rows = {row["name"]: row for row in listing()}
    assert rows.keys() == manifest().keys()
    assert rows["sample"]["here"].is_file()
    assert "VTC-artifact" in rows["arena-chat"]["fetch"]


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean arena-chat"):
        trace("arena-caht")


# ---------------------------------------------------------------- Aegaeon's released workloads

RELEASED = [
    "Request Time,Model Name,Input Length,Output Length",
    "00:00:00.250,synth_model_02,93,233",
    "00:01:00.500,synth_model_00,5000,100",
    "00:01:01.000,synth_model_02,7,16",
]


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    (tmp_path / "aegaeon_synth").mkdir()
    (tmp_path / "aegaeon_synth" / "synth-4-0.1-1.0-1.0.csv").write_text("\n".join(RELEASED) + "\n")
    return "aegaeon-synth/4-0.1-1.0-1.0"


def test_a_released_workload_is_read_as_it_is(released: str) -> None:
    loaded = load_trace.__wrapped__(released)
    assert (loaded.name, loaded.tier, loaded.span_s, loaded.ordered) == (released, "synthetic", 120.0, True)
    assert loaded.models == tuple(f"synth_model_{k:02d}" for k in range(4))  # two of them idle
    assert loaded.arrival_s.tolist() == [0.25, 60.5, 61.0]
    assert loaded.model.tolist() == [2, 0, 2]
    assert (loaded.prompt_tokens.tolist(), loaded.output_tokens.tolist()) == ([93, 5000, 7], [233, 100, 16])
    cut = load_trace.__wrapped__(f"{released}+max_tokens=4096")
    assert (cut.prompt_tokens.tolist(), cut.output_tokens.tolist()) == ([93, 3996, 7], [233, 100, 16])
    assert "1 prompts cut" in cut.note
    assert cut.sha256 != loaded.sha256


@cases(
    ("name", "generator"),
    [
        ("40-0.5-2.0-1.0", "aegaeon-like+models=40+rate_rps=0.5+lengths=sharegpt-ix2"),
        ("8-0.1-1.0-2.0+max_tokens=2048", "aegaeon-like+models=8+rate_rps=0.1+lengths=sharegpt-ox2+max_tokens=2048"),
    ],
)
def test_without_a_released_workload_its_kind_is_drawn(released: str, name: str, generator: str) -> None:
    loaded = load_trace.__wrapped__(f"aegaeon-synth/{name}")
    assert loaded.notice is not None
    assert f"using {generator}; for the real one" in loaded.notice
    assert loaded.maker == str(synthetic.preset(generator))
    assert sized(f"aegaeon-synth/{name}", 8) == generator
    assert sized(released, 8) == released


def test_the_name_of_a_released_workload_is_checked(released: str) -> None:
    for name, says in {
        "aegaeon-synth": "is a family",
        "aegaeon-synth/forty": "not M-RATE-IN-OUT",
        f"{released}+span_s=4": "is not \\+max_tokens=N",
    }.items():
        with pytest.raises(UserError, match=says):
            load_trace.__wrapped__(name)


def test_the_released_workloads_are_what_the_notes_say(traces_dir: Path) -> None:
    assert present("aegaeon-synth"), f"{traces_dir} holds none"
    plain, long = (trace(f"aegaeon-synth/{x}-1.0") for x in ("80-0.1-1.0", "40-0.1-2.0"))
    assert (len(plain), len(plain.models), plain.span_s) == (839, 80, 120.0)
    assert plain.prompt_tokens.mean() == pytest.approx(714, abs=0.5)
    assert plain.output_tokens.mean() == pytest.approx(302.5, abs=0.5)
    assert (long.prompt_tokens.mean(), long.output_tokens.mean()) == pytest.approx((1379.7, 287.5), abs=0.1)
    counts = np.bincount(plain.model, minlength=80)
    assert counts.min() > 0
    assert counts.max() <= 12  # its generator draws 12 gaps a model and stops at 120 s: 10.5 on average, not Poisson


@cases("lengths", ["sharegpt-ix2", "sharegpt-ox2"])
def test_doubled_lengths_are_doubled(lengths: str) -> None:
    plain, doubled = (synthetic.draw(f"aegaeon-like+max_tokens=99999{more}", 3) for more in ("", f"+lengths={lengths}"))
    x, y = (2, 1) if lengths.endswith("ix2") else (1, 2)
    np.testing.assert_allclose(doubled.prompt_tokens, x * plain.prompt_tokens, atol=1)
    np.testing.assert_allclose(doubled.output_tokens, y * plain.output_tokens, atol=1)
    np.testing.assert_array_equal(plain.arrival_s, doubled.arrival_s)


# ---------------------------------------------------------------- conversion


def test_times_of_a_clock(tmp_path: Path) -> None:
    rows = ["00:00:01.500,3,4,a", "00:01:03.25,3,4,a"]
    assert converted(tmp_path, rows, time_unit="clock").arrival_s.tolist() == [1.5, 63.25]
    rows[1] = "1:62:03,3,4,a"
    assert refusal(tmp_path, rows, time_unit="clock").startswith('my.csv:3: column "t" is "1:62:03", not HH:MM:SS')


def test_a_trace_is_greedy_where_every_row_is(tmp_path: Path) -> None:
    def loaded(*words: str) -> Trace:
        path = csv(tmp_path / "my.csv", [f"{k},5,7,a,{word}" for k, word in enumerate(words)], "t,in,out,m,how")
        return of_table(convert(path, COLUMNS | {"sampling": "how"}, time_unit="s"), "my.csv")

    assert loaded("greedy", "greedy").greedy
    assert not loaded("greedy", "checkpoint").greedy
    assert not converted(tmp_path, ["0,3,4,a", "1,3,4,a"], time_unit="s").greedy  # nothing is said
    with pytest.raises(UserError, match=r'my\.csv:3: sampling is "beam", not greedy or checkpoint'):
        loaded("greedy", "beam")


def test_units_ids_and_optional_columns(tmp_path: Path) -> None:
    rows = ["x1,0,5,7,a,u1", "x2,500,6,8,b,u2", "x3,2500,1,1,a,u1"]
    path = csv(tmp_path / "my.csv", rows, "id,t,in,out,m,who")
    table = convert(path, COLUMNS | {"request_id": "id", "tenant": "who"}, time_unit="ms")
    loaded = of_table(table, "my.csv")
    assert loaded.arrival_s.tolist() == [0.0, 0.5, 2.5]
    assert [loaded.models[i] for i in loaded.model] == ["a", "b", "a"]
    assert loaded.tenant is not None
    assert loaded.tenant.tolist() == [0, 1, 0]
    assert loaded.prompt_tokens.tolist() == [5, 6, 1]
    assert loaded.span_s == pytest.approx(2.5 + 1.25)
    assert loaded.where(1) == "my.csv:3"
    assert table.schema.field("arrival_s").nullable is False
    assert table.schema.field("tenant").nullable is True
    assert set(table.column_names) == {*schema.REQUIRED, "tenant", "src_row"}


def test_one_trace_from_csv_gzip_parquet_and_written_canonical_form(tmp_path: Path) -> None:
    rows = ["0.25,5,7,a", "1.5,6,8,b", "2,1,1,a"]
    plain = converted(tmp_path, rows)
    packed = tmp_path / "my.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "my.csv").read_bytes()))
    arrow = tmp_path / "my.parquet"
    pq.write_table(pa.table({"t": [0.25, 1.5, 2.0], "in": [5, 6, 1], "out": [7, 8, 1], "m": ["a", "b", "a"]}), arrow)
    written = tmp_path / "canonical.parquet"
    schema.write(convert(packed, COLUMNS), written)
    others = [of_table(convert(packed, COLUMNS), "x"), of_table(convert(arrow, COLUMNS), "x"), trace(str(written))]
    assert {other.sha256 for other in others} == {plain.sha256}


def test_dates_and_one_model_for_all(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    columns = {"arrival_s": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}
    path = csv(tmp_path / "my.csv", rows, "TIMESTAMP,ContextTokens,GeneratedTokens")
    loaded = of_table(convert(path, columns, time_unit="datetime", model="conv"), "my.csv")
    assert loaded.arrival_s.tolist() == pytest.approx([0.0, 4.314579], abs=1e-9)
    assert loaded.models == ("conv",)


def test_an_epoch_counts_from_the_first_row(tmp_path: Path) -> None:
    loaded = converted(tmp_path, ["1700000000123,1,1,a", "1700000001623,1,1,a"], time_unit="ms")
    assert loaded.arrival_s.tolist() == [0.0, 1.5]


def test_whole_seconds_are_spread_by_a_seeded_draw_and_flagged(tmp_path: Path) -> None:
    rows = [f"{i // 2},1,1,a" for i in range(20)]
    first, same, other = (converted(tmp_path, rows, jitter_seed=seed) for seed in (1, 1, 2))
    assert first.resolution_s == 1.0
    assert first.sha256 == same.sha256 != other.sha256
    assert sorted(np.floor(first.arrival_s)) == [i // 2 for i in range(20)]
    assert (np.diff(first.arrival_s) >= 0).all()
    assert converted(tmp_path, ["0,1,1,a", "1.5,1,1,a"]).resolution_s is None


def test_rows_without_tokens_or_too_long_are_dropped_only_on_request(tmp_path: Path) -> None:
    rows = ["0.5,5,0,a", "1,5,1,a", "2,500,1,a"]
    path = csv(tmp_path / "my.csv", rows)
    table = convert(path, COLUMNS, drop_bad=True, max_tokens=100)
    assert table["src_row"].to_pylist() == [3]
    assert schema.metadata(table)["dropped"] == {"without output tokens": 1, "of more than 100 tokens": 1}
    assert "no row is left of 1: 1 without output tokens" in refusal(tmp_path, ["0.5,5,0,a"], drop_bad=True)


def test_models_are_in_natural_order(tmp_path: Path) -> None:
    assert converted(tmp_path, [f"{i}.5,1,1,m-{i}" for i in (0, 2, 10)]).models == ("m-0", "m-2", "m-10")


# ---------------------------------------------------------------- what is refused

GOOD = ["0.1,1,1,a", "0.2,2,2,b"]


@cases(
    ("row", "message"),
    [
        (
            "12:04:99,1,1,a",
            'my.csv:4: column "t" is "12:04:99", not a time in seconds (bench trace convert --help lists',
        ),
        (",1,1,a", 'my.csv:4: column "t" is "", not a time in seconds'),
        ("nan,1,1,a", 'my.csv:4: column "t" is nan, not a finite time'),
        ("inf,1,1,a", 'my.csv:4: column "t" is inf, not a finite time'),
        ("-1,1,1,a", 'my.csv:4: column "t" is -1.0, a negative time'),
        ("0.15,1,1,a", 'my.csv:4: column "t" is 0.15, earlier than the row before (--sort'),
        ("0.3,x,1,a", 'my.csv:4: column "in" is "x", not a whole number of tokens'),
        ("0.3,1.5,1,a", 'my.csv:4: column "in" is "1.5", not a whole number of tokens'),
        ("0.3,0,1,a", 'my.csv:4: column "in" is 0, no tokens at all (--drop-bad'),
        ("0.3,1,0,a", 'my.csv:4: column "out" is 0, no tokens at all (--drop-bad'),
        ("0.3,1,-7,a", 'my.csv:4: column "out" is -7, a negative number of tokens'),
        ("0.3,1,3000000000,a", 'my.csv:4: column "out" is 3000000000, more tokens than any model serves'),
        ("0.3,1,1", "my.csv:4: 3 columns, the header has 4"),
        ("0.3,1,1,a,b", "my.csv:4: 5 columns, the header has 4"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    assert refusal(tmp_path, [*GOOD, row, "0.9,1,1,a"]).startswith(message)


def test_blank_lines_are_skipped_only_at_the_end(tmp_path: Path) -> None:
    assert refusal(tmp_path, ["0.1,1,1,a", "", "0.2,1,1,a"]).startswith('my.csv:3: column "t" is ""')
    assert len(converted(tmp_path, [*GOOD, "", ""])) == 2


def test_times_in_another_unit_are_suspected(tmp_path: Path) -> None:
    rows = [f"{i * 400_000},1,1,a" for i in range(1, 9)]  # microseconds of 2.5 requests a second
    assert "another unit (--time-unit)" in refusal(tmp_path, rows, time_unit="s")
    assert "another unit (--time-unit)" in refusal(tmp_path, rows, time_unit="ms")
    assert converted(tmp_path, rows, time_unit="us").arrival_s.tolist() == pytest.approx([0.4 * i for i in range(1, 9)])
    assert len(converted(tmp_path, rows, trust_times=True)) == 8
    late = refusal(tmp_path, [*GOOD, "9e12,1,1,a"])
    assert late.startswith('my.csv:4: column "t" is 9e12, after the year 2100 as s: a finer unit')


def test_a_row_with_the_id_of_an_earlier_one_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = ["7,0.1,1,1,a", "8,0.2,1,1,a", "7,0.3,1,1,a", ",0.4,1,1,a", ",0.5,1,1,a"]
    for name in ("id", "request_id"):  # named, or by its usual name
        path = csv(tmp_path / f"{name}.csv", rows, f"{name},t,in,out,m")
        made = table(path, COLUMNS | ({"request_id": "id"} if name == "id" else {}))
        assert made["src_row"].to_pylist() == [2, 3, 5, 6]
        assert schema.metadata(made)["dropped"] == {"with the id of an earlier row": 1}


def test_a_row_whose_status_is_a_failure_is_left_out_whatever_it_used(tmp_path: Path) -> None:
    states = ["200", "499", "503", "", "success", "FAILED", "timeout", "201 Created", "finished", "client disconnected"]
    path = csv(
        tmp_path / "my.csv", [f"{k / 10},9,{9 * (k != 1)},a,{s}" for k, s in enumerate(states)], "t,in,out,m,status"
    )
    made = table(path, COLUMNS)
    assert made["src_row"].to_pylist() == [2, 5, 6, 9, 10]
    left = {
        "with status 499": 1,
        "with status 503": 1,
        "with status FAILED": 1,
        "with status timeout": 1,
        "with status client disconnected": 1,
    }
    assert schema.metadata(made)["dropped"] == left
    assert "left out: 1 with status 499, 1 with status 503" in readers.told(schema.metadata(made))


@cases(
    ("row", "column"),
    [
        (",1,1,a", "t"),
        ("nan,1,1,a", "t"),
        ("-1,1,1,a", "t"),
        ("x,1,1,a", "t"),
        ("0.3,x,1,a", "in"),
        ("0.3,,1,a", "in"),
        ("0.3,1.5,1,a", "in"),
        ("0.3,1,0,a", "out"),
        ("0.3,1,-7,a", "out"),
        ("0.3,1,3000000000,a", "out"),
        ("0.3,1,1,", "m"),
        ("0.3,1,1,\x01", "m"),
    ],
)
def test_each_refusal_of_a_row_names_the_option_that_leaves_it_out(tmp_path: Path, row: str, column: str) -> None:
    rows = [*GOOD, row, "0.9,1,1,a"]
    why = refusal(tmp_path, rows)
    assert why.startswith(f'my.csv:4: column "{column}" is ')
    assert "--drop-bad leaves such rows out)" in why
    assert len(converted(tmp_path, rows, drop_bad=True)) == 3


def test_a_date_out_of_order_is_shown_as_it_stands(tmp_path: Path) -> None:
    rows = ["2026-04-27T18:00:05Z,1,1,a", "2026-04-27T18:00:00Z,1,1,a"]
    assert refusal(tmp_path, rows).startswith(
        'my.csv:3: column "t" is "2026-04-27T18:00:00Z", earlier than the row before'
    )


def test_columns_and_files_that_are_not_there(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path, GOOD, COLUMNS | {"arrival_s": "tt"})
        == 'my.csv: no column "tt"; did you mean t? (it has t, in, out, m)'
    )
    lacks = refusal(tmp_path, GOOD, {"arrival_s": "t"})
    assert lacks.startswith("my.csv: no usual name for prompt_tokens, output_tokens, model (--column CANONICAL=OWN")
    assert 'no canonical column "tenat"; did you mean tenant?' in refusal(tmp_path, GOOD, COLUMNS | {"tenat": "m"})
    assert refusal(tmp_path, []) == "my.csv: no rows"
    with pytest.raises(UserError, match="no such file"):
        convert(tmp_path / "none.csv", COLUMNS)
    (tmp_path / "empty.csv").touch()
    with pytest.raises(UserError, match="no rows"):
        convert(tmp_path / "empty.csv", COLUMNS)
    (tmp_path / "bytes.csv").write_bytes(b"t,in,out,m\n0.1,1,1,\xff\xfe\n")
    with pytest.raises(UserError, match=r"bytes\.csv"):
        convert(tmp_path / "bytes.csv", COLUMNS)
    (tmp_path / "fake.parquet").write_bytes(b"PAR0")
    with pytest.raises(UserError, match="not a readable Parquet"):
        convert(tmp_path / "fake.parquet", COLUMNS)


def test_a_parquet_is_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "my.parquet"
    pq.write_table(pa.table({"t": [0.1, None], "in": [1, 1], "out": [1, 1], "m": ["a", "a"]}), path)
    with pytest.raises(UserError, match=r'my.parquet:2: column "t" is empty'):
        convert(path, COLUMNS)
    pq.write_table(pa.table({"t": [0.1, 0.2], "in": [1, 1], "out": [1.0, 2.5], "m": ["a", "a"]}), path)
    with pytest.raises(UserError, match=r'my.parquet:2: column "out" is 2.5, not a whole number'):
        convert(path, COLUMNS)


def test_a_canonical_file_is_checked_when_loaded(tmp_path: Path) -> None:
    columns = {"request_id": [0, 1], "arrival_s": [1.0, 0.5], "model": ["a", "a"]}
    lengths = {"prompt_tokens": [1, 1], "output_tokens": [1, 1]}
    path = tmp_path / "t.parquet"
    schema.write(schema.table(columns | lengths, {}), path)
    with pytest.raises(UserError, match=r't.parquet:2: column "arrival_s" is 0.5, earlier'):
        trace(str(path))
    pq.write_table(pa.table({"t": [1]}), path)
    with pytest.raises(UserError, match="no usual name for arrival_s, prompt_tokens, output_tokens, model"):
        trace(str(path))
    pq.write_table(schema.table(columns | lengths, {}).drop_columns(["request_id"]), path)
    with pytest.raises(UserError, match='no column "request_id"'):
        trace(str(path))


@given(st.lists(st.floats(0, 500, allow_subnormal=False), min_size=2, max_size=30), st.randoms())
def test_sorting_changes_only_the_order(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], random: Any
) -> None:
    rows = [f"{t!r},{i + 1},1,a" for i, t in enumerate(times)]
    folder = tmp_path_factory.mktemp("sorted")
    loaded = converted(folder, rows, sort=True, trust_times=True)
    assert sorted(loaded.prompt_tokens.tolist()) == list(range(1, len(times) + 1))
    if loaded.resolution_s is None:
        assert loaded.arrival_s.tolist() == sorted(times)
        assert [times[i - 1] for i in loaded.prompt_tokens] == sorted(times)


# ---------------------------------------------------------------- pickles


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo owned > owned",)


PICKLES = {
    "a program": ("evil.pkl", pickle.dumps(Evil())),
    "under another name": ("evil.csv", pickle.dumps(Evil())),
    "records as text": ("old.pickle", pickle.dumps([1], 0)),
}


@cases(("name", "data"), PICKLES)
def test_a_pickle_is_refused_with_the_way_to_convert_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    for read in (readers.converted, partial(readers.read, "arena"), partial(convert, columns=COLUMNS)):
        with pytest.raises(UserError, match=rf"^{name}: a pickle, which is not read.*write its records as CSV"):
            read(Path(name))
    assert not Path("owned").exists()


# ---------------------------------------------------------------- readers of released formats


BURSTGPT = {
    "6 columns": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        ["5,ChatGPT,472,18,490,Conversation log", "45,GPT-4,300,0,300,API log", "118,GPT-4,417,276,693,API log"],
    ),
    "8 columns": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        [
            "5,a,1.5,ChatGPT,472,18,490,Conversation log",
            "45,,0,GPT-4,300,0,300,API log",
            "118,,2,GPT-4,417,276,693,API log",
        ],
    ),
}


@cases(("header", "lines"), BURSTGPT)
def test_burstgpt_leaves_out_what_failed(tmp_path: Path, header: str, lines: list[str]) -> None:
    rows = readers.read("burstgpt", csv(tmp_path / "BurstGPT_1.csv", lines, header))
    loaded = of_table(rows, "BurstGPT_1.csv")
    assert (loaded.name, loaded.tier, loaded.licence) == ("BurstGPT_1", "replayed", "CC-BY-4.0")
    assert [loaded.models[k] for k in loaded.model] == ["ChatGPT", "GPT-4"]
    assert (loaded.prompt_tokens.tolist(), loaded.output_tokens.tolist()) == ([472, 417], [18, 276])
    assert np.floor(loaded.arrival_s).tolist() == [5, 118]  # spread inside their second
    assert schema.metadata(rows)["dropped"] == {"without output tokens": 1}


def test_what_is_asked_stands_in_place_of_what_a_reader_says(tmp_path: Path) -> None:
    header, lines = BURSTGPT["6 columns"]
    path = csv(tmp_path / "b.csv", lines, header)
    assert of_table(readers.read("burstgpt", path, name="mine", span_s=500.0), "x").span_s == 500.0
    with pytest.raises(UserError, match=r"b\.csv:3: column \"Response tokens\" is 0"):
        readers.read("burstgpt", path, drop_bad=False)
    with pytest.raises(UserError, match="hyperbolic takes no --sort"):
        readers.read("hyperbolic", path, sort=True)
    with pytest.raises(UserError, match=r"gone\.csv: no such file"):
        readers.read("hyperbolic", tmp_path / "gone.csv")


def test_aegaeon_reads_its_streams_from_the_name_of_the_file(tmp_path: Path) -> None:
    header = "Request Time,Model Name,Input Length,Output Length"
    lines = ["00:00:01.500,synth_model_02,30,20", "00:00:59.000,synth_model_00,10,5"]
    loaded = of_table(readers.read("aegaeon", csv(tmp_path / "synth-4-0.1-1.0-1.0.csv", lines, header)), "x")
    assert (len(loaded.models), loaded.span_s, loaded.ordered) == (4, 60.0, True)
    short = readers.read("aegaeon", csv(tmp_path / "mine.csv", lines, header), models=3, cut_tokens=40)
    assert (short["prompt_tokens"].to_pylist(), schema.metadata(short)["cut"]) == ([20, 10], 1)


def test_every_reader_of_the_manifest_is_there_and_says_what_it_reads() -> None:
    assert {entry["reader"] for entry in manifest().values() if "reader" in entry} <= set(readers.names())
    assert [name for name, what in readers.listing() if not what.endswith(".")] == []


BROKEN = {
    "syntax": ("def read(:\n", "SyntaxError: "),
    "import": ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    "empty": ('"""Nothing."""\n', "no function `read`"),
}


def test_a_broken_reader_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (text, _) in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "whole.py").write_text('"""What it reads.\n\nMore."""\n\n\ndef read(path): ...\n')
    monkeypatch.setattr(readers, "FOLDER", tmp_path)
    monkeypatch.setattr(readers, "__path__", [str(tmp_path)])
    told = dict(readers.listing())
    assert told.keys() == {*BROKEN, "whole"}
    assert told["whole"] == "What it reads."
    for name, (_, says) in BROKEN.items():
        assert told[name].startswith(f"traces/readers/{name}.py is broken: ")
        assert says in told[name]
        assert "\n" not in told[name]
    with pytest.raises(UserError, match=r'no reader "burstgpt" \(there is: empty, import, syntax, whole\)'):
        readers.find("burstgpt")
