"""Upgrades of stored results to today's form: columns, measures, and names of runs by their files' content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import record
from harness.run.spec import stored

if TYPE_CHECKING:
    from collections.abc import Callable

MISSED = {f"missed_{old}": f"missed_both_{record.OF_SCHEMA_1.get(old, old)}"
          for old in ("held", "host", "load", "kv", "move", "turn", "solo", "slow")}  # fmt: skip


NAMED = pa.schema([(name, pa.string()) for name in ("run", "definition")])  # columns whose words change


class Upgraded(NamedTuple):
    """Counts and names of the files that were rewritten."""

    files: int  # of runs and tables
    names: Mapping[str, str]  # of runs that have another name now


def upgrade(results: Path, tell: Callable[[str, int, int], None]) -> Upgraded:
    """Rewrite the runs and tables in a folder of results in today's form; those that have it stay as they are.

    An upgrade does not renew a run: if its sources have changed since, it is run again when it is asked for. UserError
    where there is no run.
    """
    files, names, folders = 0, dict[str, str](), record.runs(results)
    for done, folder in enumerate(folders):
        tell("runs looked at", done, len(folders))
        about = record.meta(folder)
        now = stored(about["spec"]).hash8 if "spec" in about else ""
        target = folder.with_name(f"{folder.name.rpartition('-')[0]}-{now}")
        moved = (
            about.get("spec_hash", now) != now and not target.exists() and folder.is_dir()
        )  # parts have today's form
        if moved or "schema" not in about:
            record.restate(folder, {"spec_hash": now} if moved else {})
            files += 1
        if moved:
            names[folder.name] = folder.rename(target).name
    tables = sorted(results.rglob(record.SWEEP))
    return Upgraded(files + sum(_table(path, names) for path in tables), names)


def _table(path: Path, names: Mapping[str, str]) -> bool:
    """Write a sweep's table anew if it is of an earlier schema, or names a run that has another name now."""
    about, table = record.footer(path), record.table(path, NAMED)
    if "schema" in about and not names.keys() & set(table["run"].to_pylist()):
        return False
    for column, new in (("run", names), ("definition", MISSED)):
        words = pa.array([new.get(word, word) for word in table[column].to_pylist()], pa.string())
        at = table.schema.get_field_index(column)
        table = table.set_column(at, table.schema.field(at), pc.dictionary_encode(words))
    record.write_table(path, table, _renamed(about, names))
    return True


def _renamed(about: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename the runs in a table's facts to the names that they have now."""
    facts = dict(about)
    if "judges" in about:
        facts["judges"] = [
            {**judge, "runs": sorted(names.get(run, run) for run in judge["runs"])} for judge in about["judges"]
        ]
    if "runs" in about:
        facts["runs"] = {names.get(run, run): label for run, label in about["runs"].items()}
    return facts
