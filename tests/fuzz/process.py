"""Faults of the process itself: closed streams, a reader that left, the environment, a folder that is gone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.case import Around, Case
from tests.fuzz.options import COMPARE, files, filled

COMMANDS: dict[str, tuple[str, ...]] = {
    "version": ("--version",),
    "help": ("compare", "--help"),
    "dry": (*COMPARE, "--dry-run"),
    "compare": COMPARE,
    "traces": ("list", "traces"),
    "definitions": ("list", "definitions"),
    "stats": ("trace", "stats", "sample"),
    "study": ("study", "{here}/mine.toml", "--dry-run", "-o", "res"),
    "new": ("new", "mine.py"),
}
AROUND: tuple[Around, ...] = ("stdout closed", "stderr closed", "reader gone", "folder gone")
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "no HOME": {"HOME": ""},
    "LC_ALL=C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "TRACES_DIR": {"TRACES_DIR": "/nope"},
    "TRACES_DIR a file": {"TRACES_DIR": "/dev/null"},
    "no TMPDIR": {"TMPDIR": "/nope"},
    "COLUMNS": {"COLUMNS": "x"},
}


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield a few commands under each."""
    files(here)
    for what, words in COMMANDS.items():
        argv = filled(words, here)
        for around in AROUND:
            yield Case(f"process/{what}, {around}", argv, around=around)
        if what in {"dry", "compare", "stats", "new"}:
            for name, env in ENVIRONMENTS.items():
                yield Case(f"process/{what}, {name}", argv, env=env)
    for around in AROUND[:3]:
        yield Case(f"process/wrong, {around}", ("compare", "--systems", "nope"), around=around, accept=False)
    c = ENVIRONMENTS["LC_ALL=C"]
    for words in (
        ("trace", "stats", "\udcff.parquet"),
        ("trace", "stats", "é.parquet"),
        ("run", "\udcff.toml"),
        ("explain", "\udcff", "--misses"),
    ):
        yield Case(f"process/{' '.join(words)!r}, LC_ALL=C", words, env=c, accept=False)
        yield Case(f"process/{' '.join(words)!r}", words, accept=False)
    yield Case("process/validate, MEASURED_DIR", ("validate",), "/nope", accept=False, env={"MEASURED_DIR": "/nope"})
    yield Case(
        "process/validate, no MEASURED_DIR", ("validate",), "MEASURED_DIR", accept=False, env={"MEASURED_DIR": ""}
    )
    (here / "loop").symlink_to(here / "loop")
    (here / "file").write_text("mine")
    for out in (
        here / "loop",
        here / "loop" / "x",
        here / "file",
        Path("r\udcff"),
        Path("a\nb"),
        Path("é" * 200),
        Path("/proc/x"),
    ):
        yield Case(
            f"process/compare -o {str(out)[-20:]!r}", (*COMPARE, "-o", str(out)), accept=out.name in {"r\udcff", "a\nb"}
        )
