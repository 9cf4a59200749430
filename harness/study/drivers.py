"""Studies that a module of their own runs: it measures what no curve shows, as TPOT, batches and KV memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from harness.rows import whole
from harness.run import sources
from harness.run.spec import Spec, content_hash, digest
from harness.run.teller import Teller
from harness.study import muxserving, paging, weaving
from harness.study.claims import Line


class Driver(Protocol):
    """A module that makes its runs, measures them, and says what comes out."""

    PAPER: str
    SEEDS: int

    def setting(self) -> str:
        """Describe models, GPUs and lengths of all runs."""

    def inputs(self) -> Sequence[Path]:
        """List the files outside of the repository that the answer rests on. UserError where one is missing."""

    def count(self, seeds: int) -> int:
        """Count the runs of the claims."""

    def specs(self, seeds: int, out: Path) -> Iterator[Spec]:
        """Yield the specs of all runs that the claims need; their traces are written below `out`."""

    def lines(
        self, seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None
    ) -> Iterator[Line]:
        """Yield every claim with its verdict; runs are kept in `out`."""

    def text(self, seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Iterator[str]:
        """Yield the answer in a line, the setting, tables if it has any, then a line a claim."""


DRIVERS: Mapping[str, Driver] = {"muxserve": muxserving, "pagedattention": paging, "weaver": weaving}


def count(name: str, seeds: int | None) -> int:
    """Count the runs of a driver."""
    return DRIVERS[name].count(seeds or DRIVERS[name].SEEDS)


def text(name: str, seeds: int | None, out: Path, workers: int | None, teller: Teller) -> Iterator[str]:
    """Yield a driver's text, which is kept in `out` for as long as the sources and its inputs stay as they are."""
    driver = DRIVERS[name]
    seeds = seeds or driver.SEEDS
    inputs = [content_hash(path, path.stat().st_mtime_ns) for path in driver.inputs()]
    rests_on = [sources.tree("harness", "systems", "workloads", "traces"), *inputs, name, seeds]
    path = out / f"answer-{digest(' '.join(map(str, rests_on)))}.txt"
    if not path.is_file():
        lines = [f"{line}\n" for line in driver.text(seeds, out, workers=workers, teller=teller)]
        with whole.replacing(path) as part:
            part.write_text("".join(lines), "utf-8")
    yield from path.read_text("utf-8").splitlines()
