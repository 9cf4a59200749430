"""Tables become canonical traces: units, order, and each bad row named with the way out."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.types import UserError
from tests.cases import cases
from tests.there import there
from tests.traces.test_traces import COLUMNS, csv
from traces import readers, schema
from traces.convert import convert, table
from traces.load import Trace, of_table, trace


def converted(path: Path, rows: Sequence[str], columns: Mapping[str, str] = COLUMNS, **how: Any) -> Trace:
    return of_table(convert(csv(path / "my.csv", rows), columns, **how), "my.csv")


def refusal(path: Path, rows: Sequence[str], columns: Mapping[str, str] = COLUMNS, **how: Any) -> str:
    """Return the one line of a refusal, from the file's name on."""
    with pytest.raises(UserError) as caught:
        converted(path, rows, columns, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}{os.sep}")


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
    assert there(loaded.tenant).tolist() == [0, 1, 0]
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


GOOD = ["0.1,1,1,a", "0.2,2,2,b"]


@cases(
    ("row", "says"),
    [
        ("12:04:99,1,1,a", 'column "t" is "12:04:99", not a time in seconds (bench trace convert --help lists'),
        ("0.15,1,1,a", 'column "t" is 0.15, earlier than the row before (--sort'),
        ("0.3,1,1", "3 columns, the header has 4"),
        ("0.3,1,1,a,b", "5 columns, the header has 4"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: str, says: str) -> None:
    assert refusal(tmp_path, [*GOOD, row, "0.9,1,1,a"]).startswith(f"my.csv:4: {says}")


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
    rows = [f"{k / 10},9,{9 * (k != 1)},a,{s}" for k, s in enumerate(states)]
    made = table(csv(tmp_path / "my.csv", rows, "t,in,out,m,status"), COLUMNS)
    assert made["src_row"].to_pylist() == [2, 5, 6, 9, 10]
    left = {f"with status {state}": 1 for state in ("499", "503", "FAILED", "timeout", "client disconnected")}
    assert schema.metadata(made)["dropped"] == left
    assert "left out: 1 with status 499, 1 with status 503" in readers.summary(schema.metadata(made))


@cases(
    ("row", "says"),
    [
        (",1,1,a", '"t" is "", not a time in seconds'),
        ("nan,1,1,a", '"t" is nan, not a finite time'),
        ("-1,1,1,a", '"t" is -1.0, a negative time'),
        ("x,1,1,a", '"t" is '),
        ("0.3,x,1,a", '"in" is "x", not a whole number of tokens'),
        ("0.3,,1,a", '"in" is '),
        ("0.3,1.5,1,a", '"in" is "1.5", not a whole number of tokens'),
        ("0.3,1,0,a", '"out" is 0, no tokens at all (--drop-bad'),
        ("0.3,1,-7,a", '"out" is -7, a negative number of tokens'),
        ("0.3,1,3000000000,a", '"out" is 3000000000, more tokens than any model serves'),
        ("0.3,1,1,", '"m" is '),
        ("0.3,1,1,\x01", '"m" is '),
    ],
)
def test_each_refusal_of_a_row_names_the_option_that_leaves_it_out(tmp_path: Path, row: str, says: str) -> None:
    rows = [*GOOD, row, "0.9,1,1,a"]
    why = refusal(tmp_path, rows)
    assert why.startswith(f"my.csv:4: column {says}")
    assert "--drop-bad leaves such rows out)" in why
    assert len(converted(tmp_path, rows, drop_bad=True)) == 3


def test_a_date_out_of_order_is_shown_as_it_stands(tmp_path: Path) -> None:
    rows = ["2026-04-27T18:00:05Z,1,1,a", "2026-04-27T18:00:00Z,1,1,a"]
    says = 'my.csv:3: column "t" is "2026-04-27T18:00:00Z", earlier than the row before'
    assert refusal(tmp_path, rows).startswith(says)


def test_columns_and_files_that_are_not_there(tmp_path: Path) -> None:
    unknown = refusal(tmp_path, GOOD, COLUMNS | {"arrival_s": "tt"})
    assert unknown == 'my.csv: no column "tt"; did you mean t? (it has t, in, out, m)'
    lacks = refusal(tmp_path, GOOD, {"arrival_s": "t"})
    assert lacks.startswith("my.csv: no usual name for prompt_tokens, output_tokens, model (bench trace convert ")
    assert "my.csv --column CANONICAL=OWN" in lacks
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
    with pytest.raises(UserError, match=r"not readable: .*Parquet"):
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
