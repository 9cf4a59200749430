"""Results of earlier releases get today's names, once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness.rows import record
from harness.run import sweep
from harness.run.upgrade import Upgraded, upgrade
from harness.study.bases import slo_target
from harness.study.table import scored_alone
from tests.test_record import of_schema_1
from tests.test_sweep import SYSTEM, TINY


def silent(_what: str, _done: int, _total: int) -> None:
    """Tell nobody."""


def test_runs_of_files_and_the_tables_that_name_them_are_renamed_once(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine.py", tmp_path / "out"
    mine.write_text(SYSTEM % "")
    asked = replace(TINY, system=str(mine))
    (folder,) = sweep.sweep([asked], out, workers=1)
    under = slo_target(TINY, "absolute:ttft=1,tpot=1", out)
    (task,) = sweep.tasks([asked])
    scored_alone(task, under, out)
    (path,) = out.glob(f"*/{record.SWEEP}")
    kept = path.read_bytes()
    assert upgrade(out, silent) == Upgraded(0, {})

    old = folder.rename(out / "mine-deadbeef")  # as it was named by where its file lay
    record.restate(old, {"spec_hash": "deadbeef"})
    about, rows = record.footer(path), pq.read_table(path)
    names = pa.array([{folder.name: old.name}.get(x, x) for x in rows["run"].to_pylist()]).dictionary_encode()
    judges = [{**judge, "runs": [old.name]} for judge in about["judges"]]
    facts = {**about, "judges": judges, "runs": {old.name: "mine"}}
    record.write_table(path, rows.set_column(0, rows.schema.field(0), names), facts)

    assert upgrade(out, silent) == Upgraded(2, {"mine-deadbeef": folder.name})
    assert not old.exists()
    assert record.meta(folder)["spec_hash"] == folder.name.rpartition("-")[2]
    assert pq.read_table(path).equals(pq.read_table(pa.BufferReader(kept)))
    assert record.footer(path) == about
    assert upgrade(out, silent) == Upgraded(0, {})


def test_files_of_schema_1_are_written_anew(tmp_path: Path) -> None:
    of_schema_1(tmp_path / "static-00000000", sharing="own")
    (run,) = record.runs(tmp_path)
    path = run / record.ROWS
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"counts": json.dumps({"done": 10})}), path)
    before = record.read(run)
    assert upgrade(tmp_path, silent) == Upgraded(1, {})
    assert record.read(run).equals(before)
    assert record.meta(run) == {"counts": {"done": 10}, "schema": 2}
    assert pq.read_schema(path).names == record.SCHEMA.names
