"""Tables of studies that the repository stores, with the hash of the code that made them.

`results/studies/NAME.md` describes how and when the study ran. The output of `bench study NAME --all --markdown`
follows. The first line of the file has the day and, for each system on its engine, the first digits of a hash. It is
the hash of the sources that decide the system's rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness.loop.system import ROOT
from harness.rows import record, setting
from harness.run import sources
from harness.run.spec import from_dict
from harness.study.measure import Measured

FOLDER = ROOT / "results/studies"
DIGITS = 16  # digits a hash is shown with


def publish(measured: Measured, lines: Sequence[str]) -> Path:
    """Write the table of a study into `results/studies`, and return its path."""
    now = sources.codes()
    code = dict[str, str]()
    for task in measured.tasks:  # task.code also covers files that a spec names, as of SLO classes
        name = f"{task.spec.system} on {task.spec.engine}"
        code[name] = today(name) if now(task.spec) == task.code else task.code[:DIGITS]
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    facts = {"date": day, "code": dict(sorted(code.items()))}
    path = FOLDER / f"{measured.study.name}.md"
    path.parent.mkdir(exist_ok=True)
    tables = any(line.startswith("| ") for line in lines)
    shown = lines if tables else ["```text", *lines, "```"]  # aligned words stay aligned
    how = setting.fidelities(measured.table["fidelity"].cast("string").to_pylist())
    head = [f"<!-- {json.dumps(facts)} -->", "", f"*{how.capitalize()}; run on {day}.*", ""]
    record.write_bytes(path, "\n".join([*head, *shown, ""]).encode())
    return path


def today(name: str) -> str:
    """Return the first digits of the hash of a system's present sources.

    `name` is a system and its engine, such as `prism on sim`.
    """
    system, _, engine = name.partition(" on ")
    return sources.code(from_dict({"system": system, "engine": engine}))[:DIGITS]
