"""Faults of the process itself: closed streams, a reader that left, the environment, a folder that is gone."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.judge import Around, Case
from tests.fuzz.odd import words
from tests.fuzz.options import COMPARE, DRY, put

COMMANDS: dict[str, tuple[str, ...]] = {
    "version": ("--version",),
    "help": ("compare", "--help"),
    "dry": DRY,
    "compare": COMPARE,
    "traces": ("list", "traces"),
    "definitions": ("list", "definitions"),
    "stats": ("trace", "stats", "sample"),
    "study": ("study", "{here}/mine.toml", "--dry-run", "-o", "res"),
    "new": ("new", "mine.py"),
}
AROUND: tuple[Around, ...] = ("stdout closed", "stderr closed", "reader gone", "folder gone")
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PLACES = (("HOME", ""), ("TRACES_DIR", "/nope"), ("TRACES_DIR", "/dev/null"), ("TMPDIR", "/nope"), ("COLUMNS", "x"))
ENVIRONMENTS: tuple[dict[str, str], ...] = (C, *({name: value} for name, value in PLACES))


def _linked(here: Path) -> None:
    (here / "loop").symlink_to(here / "loop")
    (here / "file").write_text("mine")


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw a few commands under each."""
    every = [
        Case(f"process/{what}, {around}", argv, put=put, around=around)
        for what, argv in COMMANDS.items()
        for around in AROUND
    ]
    every += [
        Case(f"process/{what}, {env}", COMMANDS[what], put=put, env=env)
        for what in ("dry", "compare", "stats", "new")
        for env in ENVIRONMENTS
    ]
    wrong = ("compare", "--systems", "nope")
    every += [Case(f"process/wrong, {around}", wrong, accept=False, around=around) for around in AROUND[:3]]
    for line in ("trace stats ¤.parquet", "trace stats é.parquet", "run ¤.toml", "explain ¤ --misses"):
        for env in (C, {}):
            every.append(Case(f"process/{line}, {env}", tuple(words(line)), accept=False, env=env))
    for value, culprit in (("/nope", "/nope"), ("", "MEASURED_DIR")):
        env = {"MEASURED_DIR": value}
        every.append(Case(f"process/validate, {env}", ("validate",), culprit, accept=False, env=env))
    for out in words("{here}/loop {here}/loop/x {here}/file r¤ a¶b é^200 /proc/x"):
        fine = out in {"r\udcff", "a\nb"}
        every.append(Case(f"process/compare -o {out!r:.40}", (*COMPARE, "-o", out), accept=fine, put=_linked))
    return st.sampled_from(every)
