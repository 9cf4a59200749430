"""Damaged results are refused in one line, or made again; none is used without a word."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import harness
from harness.policy.types import UserError
from harness.rows import forms, record, sealed, tidy
from harness.store import MARK, SEAL
from harness.study.study import AXES
from tests.bench import bench, mistake
from tests.cases import cases
from tests.fuzz.odd import GONE, changed
from tests.fuzz.results import COMPARE, Store, facts, rewrite
from tests.harness.rows.test_record import META, batch
from tests.plots.test_plots import GRID


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a small comparison of two systems."""
    top = tmp_path_factory.mktemp("whole") / "out"
    assert bench(*COMPARE, "-o", top).exit_code == 0
    sweep = next(top.glob(f"sample-*/{record.SWEEP}")).parent.name
    return Store(top, sweep, next(top.glob("static-*")).name)


@pytest.fixture
def store(whole: Store, tmp_path: Path) -> Store:
    """Return a copy of it."""
    return whole.copy(tmp_path / "out")


# ------------------------------------------------------------------ bits


def used(path: Path, flips: int, use: Callable[[Path], Any]) -> int:
    """Return the number of refused flips; one that is not refused must leave what is read as it was."""
    draw, data, known, refused = random.Random(0), path.read_bytes(), use(path), 0
    for at in (round(len(data) * k / flips) for k in range(flips)):
        other = bytearray(data)
        other[at] ^= 1 << draw.randrange(8)
        path.write_bytes(other)
        try:
            assert use(path) == known, f"a bit of byte {at} of {len(data)} is read otherwise, without a word"
        except UserError:
            refused += 1
    path.write_bytes(data)
    return refused


def test_no_flipped_bit_of_rows_is_used(store: Store) -> None:
    def use(path: Path) -> Any:
        return record.read(path.parent), record.meta(path.parent)

    assert used(store.rows, 400, use) > 390  # but for the mark


def test_no_flipped_bit_of_a_scored_table_is_used(store: Store) -> None:
    assert used(store.scored, 100, lambda path: (tidy.stored(path), record.footer(path))) > 95


def test_facts_alone_are_held_against_the_footers_digest(store: Store) -> None:
    """`meta` does not read the rows, so a bit in them is none of its business; one in the footer is."""
    data = store.rows.read_bytes()
    mark = data.rindex(MARK)
    for at, fails in ((mark // 2, False), (mark + SEAL + 5, True)):
        other = bytearray(data)
        other[at] ^= 1
        store.rows.write_bytes(other)
        refused = pytest.raises(sealed.Damaged, match=r"requests\.parquet: damaged")
        with refused if fails else contextlib.nullcontext():
            record.meta(store.rows.parent)
        with pytest.raises(sealed.Damaged, match=r"requests\.parquet: damaged"):
            record.whole(store.rows.parent)


def test_readers_of_parquet_do_not_see_the_digests(tmp_path: Path) -> None:
    record.write(tmp_path / "run", [batch(1000)], META)
    path = tmp_path / "run" / record.ROWS
    assert pq.read_table(path).to_pylist() == batch(1000).to_pylist()
    assert path.read_bytes().count(MARK) == 1
    record.write_table(tmp_path / "empty.parquet", pa.table({"a": pa.array([], pa.int64())}), {})
    assert pq.read_table(tmp_path / "empty.parquet").num_rows == 0


def test_tables_without_digests_are_read(store: Store) -> None:
    """As releases before wrote them."""
    for path in (store.rows, store.scored):
        rewrite(path, pq.read_table(path), facts(path))
        assert MARK not in path.read_bytes()
    assert bench("explain", store.rows.parent, "--misses").exit_code == 0
    assert bench("explain", store.scored.parent, "--misses").exit_code == 0
    assert len(harness.load(store.top).runs) == 2


# ------------------------------------------------------------------ made again, or refused


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def test_a_damaged_run_is_made_again_and_told(store: Store, whole: Store) -> None:
    flip(store.rows)
    result = bench(*COMPARE, "-o", store.top)
    assert result.exit_code == 0
    assert result.stderr == f"{store.run} is damaged: it is run again\n"
    assert store.rows.read_bytes() == whole.rows.read_bytes()
    assert store.scored.read_bytes() == whole.scored.read_bytes()
    again = bench(*COMPARE, "-o", store.top)
    assert (again.stderr, again.stdout) == ("", result.stdout)


def test_a_damaged_table_is_made_again(store: Store, whole: Store) -> None:
    flip(store.scored)
    assert bench(*COMPARE, "-o", store.top).exit_code == 0
    assert store.scored.read_bytes() == whole.scored.read_bytes()


def test_a_damaged_file_that_is_named_is_refused(store: Store) -> None:
    flip(store.rows)
    flip(store.scored)
    for _, argv in store.of_run():
        mistake(bench(*argv), f"{store.rows}: damaged: its bytes are not those that were written; delete its folder")
    for _, argv in store.of_sweep():
        mistake(bench(*argv), f"{store.scored}: damaged")
    with pytest.raises(UserError, match=r"attainment\.parquet: damaged"):
        harness.load(store.top)
    with pytest.raises(UserError, match=r"requests\.parquet: damaged"):
        harness.load(store.rows.parent).requests.frame()


def test_a_damaged_table_beside_a_run_is_told(store: Store) -> None:
    """Nobody knows any longer by which SLO it judged the run."""
    store.scored.write_bytes(store.scored.read_bytes()[:-9])
    result = bench("explain", store.rows.parent, "--misses", "--slo", "absolute:ttft=1,tpot=1")
    assert result.exit_code == 0
    assert "not read" not in result.stdout
    every = bench("explain", store.rows.parent, "--misses", "--all").stdout
    assert f"not read, whatever it judged: {store.scored}" in every


# ------------------------------------------------------------------ facts


def put(path: Path, *steps: Any, value: Any) -> None:
    """Change a fact, as another program would; `...` takes it away."""
    rewrite(path, pq.read_table(path), changed(facts(path), steps, GONE if value is Ellipsis else value))


@cases(
    ("steps", "value", "says"),
    [
        (("skipped",), ..., ': "skipped" is missing; delete its folder and run again'),
        (("spec",), ..., ': "spec" is missing'),
        (("spec",), [], ": spec is [], not a table"),
        (("spec",), None, ": spec is null, not a table"),
        (("spec", "system"), ..., ": spec: system is missing"),
        (("spec", "gpus"), 0, ": spec: gpus is 0, not in [1, 4096]"),
        (("counts", "done"), "x", ': counts.done is "x", not a whole number'),
        (("counts", "done"), 3, "214 rows, and its facts say 3"),
        (("infeasible",), 3, ": infeasible is 3, not a string or null"),
        (("judges",), ..., ': "judges" is missing'),
        (("judges",), {}, ": judges is {}, not a list"),
        (("judges", 0, "rule"), ..., ': judges 1: "rule" is missing'),
        (("judges", 0, "seconds"), {"m": [1]}, "seconds.m is [1], not a list of 2"),
        (("judges", 0, "seconds"), None, ': judges 1: the seconds of SLO "absolute:ttft=1,tpot=1" are missing'),
    ],
)
def test_facts_of_a_run_and_of_a_comparison_are_checked(
    steps: tuple[Any, ...], value: Any, says: str, store: Store
) -> None:
    path = store.scored if steps[0] == "judges" else store.rows
    whole = path.read_bytes()
    put(path, *steps, value=value)
    mistake(bench("explain", path.parent, "--misses"), path, says)
    path.write_bytes(whole)


def test_forms() -> None:
    form = {"a": [float], "b": ({str: int}, None), "c": frozenset({"x", "y"}), "d": [str, int]}
    good: dict[str, Any] = {"a": [1, 2.5, float("nan")], "b": {"n": 1}, "c": "y", "d": ["p", 1], "other": object}
    assert sealed.fault(good, form, "it") == ""
    bad = {"a": [True], "b": {"n": 1.0}, "c": "z", "d": ["p"]}
    faults = [sealed.fault({**good, key: value}, form, "it") for key, value in bad.items()]
    assert faults == [
        "item 1 of it.a is true, not a number",
        "it.b.n is 1.0, not a whole number",
        'it.c is "z", not one of x, y',
        'it.d is ["p"], not a list of 2',
    ]


def test_facts_of_stored_files_have_their_forms(whole: Store) -> None:
    """No key that is written lacks a form: a new one is held to it from the start."""
    for path, form in ((whole.rows, forms.RUN), (whole.scored, forms.SCORED)):
        assert set(facts(path)) <= set(form)
    assert set(facts(whole.scored)["panels"][0]) <= set(forms.PANEL)
    assert set(AXES) == forms.AXES


# ------------------------------------------------------------------ columns


def columns() -> Iterator[tuple[Callable[[pa.Table], pa.Table], str]]:
    """Yield changes of a run's table, and what is said of them."""
    at = record.SCHEMA.get_field_index("arrival_ns")
    yield lambda t: t.set_column(at, "arrival_ns", pa.nulls(len(t), pa.int64())), "row 0: arrival_ns is null"
    words = "column arrival_ns is of string, not"
    yield lambda t: t.set_column(at, "arrival_ns", t["arrival_ns"].cast("string")), words
    yield lambda t: t.drop_columns(["arrival_ns"]), "column arrival_ns is missing"
    yield lambda t: t.append_column("arrival_ns", t["arrival_ns"]), "column arrival_ns is there twice"
    yield lambda t: t.slice(1), "213 rows, and its facts say 214"
    state = record.SCHEMA.get_field_index("state")
    yield lambda t: t.set_column(state, "state", pa.array(["gone"] * len(t))), 'state "gone" is not one of done'


@cases(("change", "says"), list(columns()))
def test_columns_of_a_run_are_checked(change: Callable[[pa.Table], pa.Table], says: str, store: Store) -> None:
    path, whole = store.rows, store.rows.read_bytes()
    rewrite(path, change(pq.read_table(path)), facts(path))
    mistake(bench("explain", path.parent, "--misses"), path, says)
    with pytest.raises(UserError, match=r"requests\.parquet"):
        harness.load(store.top).requests.frame()
    path.write_bytes(whole)


def test_rates_of_a_scored_table_are_numbers_above_0(tmp_path: Path) -> None:
    at = GRID.schema.get_field_index("rate_scale")
    for value in (0.0, -1.0, float("nan"), float("inf")):
        table = GRID.set_column(at, "rate_scale", pa.array([value] * len(GRID)))
        record.write_table(tmp_path / record.SWEEP, table, {})
        with pytest.raises(sealed.Damaged, match="rate_scale"):
            tidy.stored(tmp_path / record.SWEEP)


def test_rows_of_a_model_in_a_scored_table_name_it(tmp_path: Path) -> None:
    for over, says in (("pooled", ""), ("model", r"row 0: model is null, and over is model")):
        table = GRID.set_column(GRID.schema.get_field_index("over"), "over", pa.array([over] * len(GRID)))
        at = table.schema.get_field_index("model")
        nameless = table.set_column(at, "model", pa.nulls(len(table), pa.string()))
        record.write_table(tmp_path / record.SWEEP, nameless, {})
        with pytest.raises(sealed.Damaged, match=says) if says else contextlib.nullcontext():
            tidy.stored(tmp_path / record.SWEEP)


def test_a_scored_table_without_the_rows_that_are_asked_for_is_one_line(store: Store) -> None:
    rewrite(store.scored, pq.read_table(store.scored).slice(0, 1), facts(store.scored))
    mistake(bench("explain", store.scored.parent, "--misses"), f"{store.scored}: no requests were scored here")


def test_the_rows_of_a_run_are_no_scored_table(store: Store) -> None:
    shutil.copy(store.rows, store.scored)
    for name in ((), ("--figure", "compare")):
        mistake(bench("plot", store.scored.parent, *name), store.scored, "column run is missing")


# ------------------------------------------------------------------ runs that are made again


@cases(
    ("key", "value", "says"),
    [
        ("models", ..., "made again, it is infeasible: no placement found of 8 models"),
        ("rate_scale", 1e300, f"{record.ROWS}: spec: rate scale 1e+300 of sample over 120 s is"),
        ("trace", "x", f'{record.ROWS}: spec: no trace "x"'),
    ],
)
def test_a_spec_that_is_not_that_of_its_rows_is_one_line(key: str, value: Any, says: str, store: Store) -> None:
    put(store.rows, "spec", key, value=value)
    mistake(bench("timeline", store.rows.parent, "-o", store.top / "t.json"), store.run, says)


def test_a_set_that_lacks_a_model_of_the_rows_gives_no_seconds(store: Store) -> None:
    put(store.rows, "spec", "models", value="heavy8")
    result = bench("explain", store.rows.parent, "--misses", "--slo", "solo")
    mistake(result, f'{store.rows}: row 0: model "llama-3.2-1b/1" is not in heavy8, the set of its spec')


def test_a_policys_slo_without_its_seconds_is_one_line(store: Store) -> None:
    prism = next(store.top.glob("prism-*")) / record.ROWS
    put(prism, "spec", "slo_s", value=...)
    mistake(bench("explain", prism.parent, "--misses"), f"{prism}: spec: the seconds of SLO", "are missing")


# ------------------------------------------------------------------ in the way
