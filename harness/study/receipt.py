"""Receipts of finished studies, stored next to the table: with one, the next call only checks files and opens no run.

A receipt stores the call, the hash of the sources, and the size and time of change of each file that was read. These
files are the rows of all runs, the table, and the files that the study names by path. If nothing of this has changed,
the stored table is the answer. Otherwise, or without a receipt, the study is checked run by run. A receipt is written
last, and only for simulated runs, because runs on real servers depend on more than files. Figures have a receipt of
their own.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from harness.policy import fields
from harness.policy.types import UserError
from harness.rows import record
from harness.rows.stored import NOTES, Stamp, stamp, unchanged
from harness.run import arithmetic, sources
from harness.run.slo import SloTarget
from harness.run.spec import FILES, Spec, as_dict, content_hash, stored
from harness.study.study import Study
from traces import laws, load, synthetic

FILE, FIGURES = "receipt.json", "figures.json"
DRAWING = ("harness", "plots", "systems")  # sources of figures


class Call(NamedTuple):
    """The arguments of `measure` on which its answer depends."""

    study: Study
    full: bool
    stem: str  # start of the study's folder
    target: SloTarget | None

    @property
    def digest(self) -> str:
        """SHA-256 of the arguments, of the sources of all packages, and of the platform's floating-point arithmetic."""
        about = f"{tuple(self)!r} {sources.tree(*sources.PACKAGES)} {arithmetic.digest()}"
        return sha256(about.encode()).hexdigest()


class Receipt(NamedTuple):
    """The answer of a finished study, as a receipt stores it."""

    folder: Path  # the study's
    reference: Spec  # the first point's, resolved
    target: SloTarget
    notes: list[str]  # about its inputs


def lookup(call: Call, out: Path) -> Receipt | None:
    """Read the receipt of an equal call below `out`; None if no receipt exists, or if one of its files has changed."""
    paths = sorted(out.glob(f"{glob.escape(call.stem)}-*/{FILE}"))
    call_digest = call.digest if paths else ""
    for path in paths:
        with suppress(KeyError, ValueError, TypeError, AttributeError, UserError):  # another release wrote it
            if (facts := NOTES.current(path, {"call": call_digest})) and _holds(facts, out):
                rule, seconds, drain_s = facts["target"]
                target = SloTarget(rule, seconds and {model: (a, b) for model, (a, b) in seconds.items()}, drain_s)
                return Receipt(path.parent, stored(facts["reference"]), target, facts["notes"])
    return None


def _holds(kept: Mapping[str, Any], out: Path) -> bool:
    same = all(_trace_file(name) == path for name, path in kept["traces"].items())
    return same and unchanged(kept["inputs"]) and unchanged(kept["results"], out)


def write(
    call: Call,
    asked: str,
    begun_ns: int,
    receipt: Receipt,
    specs: Iterable[Spec],
    rules: Iterable[str],
    runs: Mapping[str, Stamp],
    traces: Iterable[str],
) -> None:
    """Write the receipt of a call that began at `begun_ns`, when its digest was `asked`.

    No receipt is written if a source or an input changed since then, or if runs were on real servers. `specs` are the
    specs of all runs, and `rules` their SLO rules. `runs` has the stamp of each run's rows, keyed by their path below
    the results folder. `traces` are the names of the requested traces.
    """
    specs = list(specs)
    named = {name: _trace_file(name) for name in sorted({*traces, *(spec.trace for spec in specs)})}
    inputs = {path: stamp(Path(path)) for path in sorted({*_inputs(specs, rules), *filter(None, named.values())})}
    late = any(at is None or at[1] >= begun_ns for at in inputs.values())
    if late or any(spec.measured_on for spec in specs) or call.digest != asked:
        return
    table = receipt.folder / record.SWEEP
    results = {**runs, f"{table.parent.name}/{table.name}": stamp(table)}
    note = {
        "reference": as_dict(receipt.reference),
        "target": list(receipt.target),
        "notes": receipt.notes,
        "traces": named,
        "inputs": inputs,
        "results": results,
    }
    NOTES.write(receipt.folder / FILE, note, {"call": asked})


def drawn(folder: Path, asked: Sequence[str], draw: Callable[[], list[Path]]) -> list[Path]:
    """Return the paths of a study's figures; `draw` makes them if they are not current.

    They are current if the table, the sources and `asked` are the same as when they were drawn, and no figure was
    changed or deleted.
    """
    table = folder / record.SWEEP
    facts = [*asked, content_hash(table, table.stat().st_mtime_ns), sources.tree(*DRAWING)]
    key = sha256(record.dumps(facts).encode()).hexdigest()
    note = NOTES.kept(folder / FIGURES, {"key": key}, lambda: {"files": [[str(path), stamp(path)] for path in draw()]})
    return [Path(path) for path, _ in note["files"]]


def _inputs(specs: Sequence[Spec], rules: Iterable[str]) -> set[str]:
    """Return the paths of user files in specs and SLO rules, as they are written there."""
    named = {(key, str(getattr(spec, key) or "")) for spec in specs for key in FILES} | {("slo", x) for x in rules}
    paths = ((key, fields.asked(value).name if key == "engine" else value) for key, value in named)
    return {value.rpartition("classes:")[2] for key, value in paths if value.endswith(FILES[key])}


def _trace_file(name: str) -> str | None:
    """Return the file from which a trace of this name is read; None if the trace is drawn."""
    head = name.partition("+")[0]
    if head in synthetic.RATED and synthetic.preset(name).lengths == laws.AZURE:
        return str(laws.source())
    known = load.family(name) is not None or head in load.manifest()
    path = load.present(name if load.family(name) is not None else head) if known else Path(name)
    return None if path is None else str(path)
