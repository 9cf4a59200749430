"""`bench calibrate SOURCE`: where each table goes, and what is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.calibrate import kernels, profiles, rows
from harness.calibrate.rows import Journal, Measurement, measured
from harness.calibrate.tables import Table
from harness.engines.costs import quantities
from harness.policy.types import UserError
from harness.validate import hosts
from plots import scatter
from tests.bench import ok
from tests.cases import cases
from tests.harness.engines.servers.test_stub import fails


def committed() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in quantities.TABLES.glob("*.toml")}


def test_a_table_is_written_as_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(say: Callable[[str], None]) -> dict[str, dict[str, object]]:
        say("h100 gemm: as it was")
        return {stem: tomllib.loads(text) for stem, text in committed().items()}

    monkeypatch.setattr(kernels, "fit", fit)
    assert "h100 gemm: as it was" in ok("calibrate", "profiles", "-o", tmp_path)
    assert {path.stem: path.read_text("utf-8") for path in tmp_path.iterdir()} == committed()
    file = tomllib.loads(committed()["hosts"])
    monkeypatch.setattr(hosts, "table", lambda: Table("hosts", file, lambda _: ["vllm-0.15 as it was"]))
    assert "vllm-0.15 as it was" in ok("calibrate", "measured", "-o", tmp_path / "more")
    assert (tmp_path / "more" / "hosts.toml").read_text("utf-8") == committed()["hosts"]


@cases(
    ("words", "says"),
    [
        (("nope",), '"nope" is no folder, no engine (bench list engines) and none of profiles, measured, torch-steps'),
        (("sim",), "engine sim has no servers to measure; make gpu measures a GPU"),
        (("profiles", "--slots", "2"), "--slots is of an engine's measurements: bench calibrate profiles takes none"),
        (("measured", "--gpu", "h100"), "--gpu is of an engine's measurements: bench calibrate measured takes none"),
        ((".", "--rounds", "2"), "--rounds is of an engine's measurements: bench calibrate . takes none"),
    ],
)
def test_what_is_no_source_is_refused_in_a_line(words: tuple[str, ...], says: str) -> None:
    assert fails("calibrate", *words) == f"error: {says}\n"


def test_a_journal_gives_its_rows_back_and_leaves_out_what_was_cut_off(tmp_path: Path) -> None:
    book, path = Journal(tmp_path / "a" / rows.RAW), tmp_path / "a" / rows.RAW
    first = measured("decode", {"shape": "m", "held": True}, [3.0, 1.0, 2.5], "round 1", ctx_tokens=7.0)
    assert (first.seconds, first.n, first.held_out, first.facts["all"]) == (2.5, 3, True, [3.0, 1.0, 2.5])
    book.add(first)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"quantity": "decode", "at"')
    again = Journal(path)
    again.add(Measurement("start", {"shape": "m"}, 1.0, 1, "round 1"))
    assert rows.read(path) == again.rows == [first, Measurement("start", {"shape": "m"}, 1.0, 1, "round 1")]
    assert [row.seconds for row in rows.of(again.rows, "decode", shape="m")] == [2.5]
    path.write_text('{"what": "decode", "params": {}, "p50": 1.0}\n')
    with pytest.raises(UserError, match="its rows are of an earlier version; move it away, and measure again"):
        rows.read(path)


def test_others_that_take_cores_are_told_once() -> None:
    quiet, loud = (Measurement("start", {}, 1.0, facts={"other_cores": cores}) for cores in (0.1, 0.5))
    assert list(rows.disturbed([quiet], 0.2)) == []
    (line,) = rows.disturbed([quiet, loud], 0.2)
    assert line.startswith("1 of 2 measurements while others took more than 0.2 cores (at most 0.50)")


def test_every_kind_with_measured_rows_has_a_mark_in_the_figure() -> None:
    kinds = profiles.FOLDERS.keys() | profiles.ENGINES.keys()
    assert kinds <= scatter.GPUS.keys()
