"""Kinds of kept things: each is made once for its inputs, and anew where it is lost or they differ."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.check import under
from harness.loop import engine, meaning
from harness.loop.system import ROOT
from harness.rows import forms, record, stored
from harness.run import sources
from harness.store import Kind, digest
from tests.bench import bench
from tests.cases import cases
from traces.kept import LOGS, canonical

LEADS = pa.Table.from_pylist([{"constant": "swap", "mean": 0.5}], schema=forms.LEAD_COLUMNS)
SOLO = pa.table({"ttft_s": [1.0, 2.0], "tpot_s": [0.1, 0.2]}, schema=record.SOLO_COLUMNS)
FACTS = {"first": "a", "second": "b", "definition": "both", "rates": [1.0], "asked": []}


class Case(NamedTuple):
    """A kind, something of it, and inputs that it may have been made of; without inputs they are in its name."""

    kind: Kind[Any]
    thing: Any
    inputs: dict[str, Any]
    name: str = "kept"


CASES = {
    "leads": Case(stored.LEADS, LEADS, {**FACTS, "sweep": "1"}, record.SENSITIVITY),
    "solo": Case(stored.SOLO, SOLO, {"of": {"spec_hash": "1"}, "rows": 2}, record.SOLO),
    "note": Case(stored.NOTES, {"files": []}, {"key": "1"}),
    "text": Case(stored.TEXTS, "a line\n", {}),
}


def kept(case: Case, folder: Path, calls: list[str], **other: Any) -> Any:
    """Keep the thing of a case below a folder, and note where it is made."""

    def make() -> Any:
        calls.append("made")
        return case.thing

    return case.kind.kept(folder / case.name, case.inputs | other, make)


@cases("name", [*CASES])
def test_a_thing_is_made_once(name: str, tmp_path: Path) -> None:
    case, calls = CASES[name], list[str]()
    kept(case, tmp_path, calls)
    data = (tmp_path / case.name).read_bytes()
    again = kept(case, tmp_path, calls)
    assert calls == ["made"]
    assert again == {**case.thing, **case.inputs} if isinstance(case.thing, dict) else again == case.thing
    assert (tmp_path / case.name).read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == [case.name]


SEALED = ("cut", "foreign", "flipped", "folder")
HARMS = {"leads": SEALED, "solo": SEALED, "note": ("cut", "foreign", "folder"), "text": ("folder",)}


@cases(("name", "harm"), [(name, harm) for name, harms in HARMS.items() for harm in harms])
def test_what_is_lost_is_made_anew(name: str, harm: str, tmp_path: Path) -> None:
    case, calls = CASES[name], list[str]()
    path = tmp_path / case.name
    kept(case, tmp_path, calls)
    data = path.read_bytes()
    match harm:
        case "cut":
            path.write_bytes(data[:-10])
        case "foreign":
            path.write_bytes(b"nothing of ours")
        case "flipped":
            path.write_bytes(data[:6] + bytes([data[6] ^ 1]) + data[7:])
        case _:
            path.unlink()
            path.mkdir()
    kept(case, tmp_path, calls)
    assert calls == ["made", "made"]
    assert path.read_bytes() == data


@cases(
    ("name", "other"),
    [
        ("leads", {"sweep": "2"}),
        ("leads", {"rates": [2.0]}),
        ("solo", {"of": {"spec_hash": "2"}}),
        ("solo", {"rows": 3}),
        ("note", {"key": "2"}),
    ],
)
def test_of_other_inputs_it_is_made_anew(name: str, other: dict[str, Any], tmp_path: Path) -> None:
    case, calls = CASES[name], list[str]()
    kept(case, tmp_path, calls)
    kept(case, tmp_path, calls, **other)
    assert calls == ["made", "made"]


def test_inputs_are_compared_as_json_has_them(tmp_path: Path) -> None:
    case = CASES["leads"]
    case.kind.write(tmp_path / case.name, case.thing, case.inputs | {"rates": (1.0,), "sweep": "nan"})
    assert case.kind.current(tmp_path / case.name, {"rates": (1.0,), "sweep": "nan"})
    assert not case.kind.current(tmp_path / case.name, {"absent": None})


def test_a_note_of_a_file_that_changed_is_no_note(tmp_path: Path) -> None:
    figure = tmp_path / "figure.csv"
    figure.write_text("1")
    note = {"files": [[str(figure), stored.stamp(figure)]]}
    stored.NOTES.write(tmp_path / "note", note, {"key": "1"})
    assert stored.NOTES.current(tmp_path / "note", {"key": "1"})
    figure.write_text("1, and more")
    assert stored.NOTES.current(tmp_path / "note", {"key": "1"}) is None
    assert json.loads((tmp_path / "note").read_bytes())["key"] == "1"


@cases("name", [*CASES, "log"])
def test_what_cannot_be_made_leaves_what_was_there(name: str, tmp_path: Path) -> None:
    case = CASES.get(name, Case(LOGS, None, {}))
    path = tmp_path / case.name
    path.write_bytes(b"of another release")

    def fails() -> Any:
        raise ValueError("no")

    if case.kind is stored.TEXTS:
        path.unlink()
    with pytest.raises(ValueError, match="no"):
        case.kind.kept(path, case.inputs, fails)
    assert [data.read_bytes() for data in tmp_path.iterdir()] == [b"of another release"] * path.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.harness.test_store import CASES

real = getattr(os, sys.argv[3])

def deadly(*args, **named):
    os.kill(os.getpid(), signal.SIGKILL)

case = CASES[sys.argv[1]]
setattr(os, sys.argv[3], deadly)
case.kind.kept(Path(sys.argv[2]) / case.name, case.inputs, lambda: case.thing)
"""


@pytest.mark.slow
@cases("name", [*CASES])
def test_killed_before_it_is_in_place_it_is_absent_and_made_by_the_next_call(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for call in ("fsync", "replace"):
        command = [sys.executable, "-c", KILLED, name, str(tmp_path), call]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
        assert done.returncode == -signal.SIGKILL
        assert not (tmp_path / case.name).exists()
    kept(case, tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == [case.name]  # what was half-written is gone


# ------------------------------------------------------------------ names and hashes of before


def test_names_are_those_of_before(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    lines = [f"{k}.5,a,{k + 1},5,s{k // 4}" for k in range(40)]
    log.write_text("\n".join(["time,model,prompt_tokens,output_tokens,session", *lines]))
    assert canonical(log, tmp_path / "kept")[0].name == "log-6a609197.parquet"
    assert digest("a", 1, "") == "caeba72cd6103538cb7721e56e55b8bcf3813560689f77c8f1cb5c8ab668919d"  # SHA-256 of "a 1 "


def test_a_rewrite_that_makes_the_same_rows_counts_as_before() -> None:
    files = sources.closure(sources.RUN, engine.path("sim"), ROOT / "systems" / "static.py")
    files |= {path for pattern in (*under.FILES, "systems/*.py") for path in ROOT.glob(pattern)}
    now = {(str(path.relative_to(ROOT)), meaning.digest(path)) for path in files}
    for rewritten, before in meaning.rewrites():
        assert rewritten <= now, f"changed again: write {meaning.REWRITES.name} anew, or take the entry out"
        now = now - rewritten | before


def test_files_that_count_as_before_hash_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    mine, part = tmp_path / "mine.py", tmp_path / "part.py"
    mine.write_text("x = 1\n")
    before, old = sources._hash({mine}), {("mine.py", meaning.digest(mine))}
    mine.write_text("from part import x\n")
    part.write_text("x = 1\n")
    os.utime(mine, ns=(1, 1))
    now = {("mine.py", meaning.digest(mine)), ("part.py", meaning.digest(part))}
    monkeypatch.setattr(meaning, "rewrites", lambda: [(now, old)])
    assert sources._hash({mine, part}) == before
    assert sources._hash({mine}) != before
    part.write_text("x = 2\n")
    os.utime(part, ns=(1, 1))
    assert sources._hash({mine, part}) != before


def test_a_log_is_converted_below_the_results_that_were_asked_for_and_again_where_it_is_damaged(tmp_path: Path) -> None:
    log, out = tmp_path / "t.csv", tmp_path / "out"
    log.write_text("time,model,prompt_tokens,output_tokens\n" + "".join(f"{k},a,100,3\n" for k in range(200)))
    asked = "compare --systems static --models llama-3.2-1b --rate-scale 1 --seeds 1 --slo absolute:ttft=1,tpot=1"
    done = bench(*asked.split(), "--no-plot", "--trace", log, "-o", out)
    assert done.exit_code == 0, done.output
    (kept,) = (out / "traces").iterdir()
    whole = kept.read_bytes()
    for at in (len(whole) // 3, len(whole) - 20):  # in its rows, and in its footer
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert canonical(log, out / "traces")[0] == kept
        assert pq.read_table(kept).equals(pq.read_table(io.BytesIO(whole)))
        assert LOGS.read(kept).num_rows == 200
