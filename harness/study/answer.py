"""The printed answer of a study that a driver of its own runs, kept until what it rests on changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from harness.rows import stored
from harness.run import sources
from harness.run.spec import content_hash, digest


def lines(out: Path, seeds: int, inputs: Iterable[Path], told: Callable[[], Iterable[str]]) -> list[str]:
    """Return the lines of an answer, which is kept in `out` for as long as the sources and the input files stay so."""
    files = [content_hash(path, path.stat().st_mtime_ns) for path in inputs]
    rests_on = [sources.tree("harness", "systems", "workloads", "traces"), *files, seeds]
    path = out / f"answer-{digest(' '.join(map(str, rests_on)))}.txt"
    return stored.TEXTS.kept(path, {}, lambda: "".join(f"{line}\n" for line in told())).splitlines()
