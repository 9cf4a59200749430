"""Claims with a driver of their own: a module that makes its runs, and measures in them what no curve of a study shows.

The drivers are `weaving.py`, `paging.py` and `muxserving.py`; `ledger.py` has all of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from harness.rows import whole
from harness.rows.statistics import interval
from harness.run import sources, sweep
from harness.run.shard import Shard
from harness.run.spec import Spec, canonical, digest
from harness.run.teller import Teller
from harness.study.claims import Verdict, by_number, of_measure, paper_text, stated, untestable


class Line(NamedTuple):
    """A claim with its result, and the section that makes it."""

    section: str
    verdict: Verdict
    law: str = ""  # of lengths, where the paper gives their means alone


class Driver(Protocol):
    """The names that a driver has."""

    PAPER: str
    SEEDS: int

    def setting(self) -> str:
        """Describe models, GPUs and lengths of all runs."""

    def specs(self, seeds: int, out: Path) -> Iterator[Spec]:
        """Yield the specs of all runs that the claims need; their traces are written below `out`."""

    def lines(
        self, seeds: int, out: Path, *, workers: int | None = None, teller: Teller | None = None
    ) -> Iterator[Line]:
        """Yield every claim with its verdict; runs are kept in `out`."""


def judged(path: Path, system: str, measured: Callable[[str], Iterable[tuple[str, Sequence[float]]]]) -> Iterator[Line]:
    """Yield each claim of a file with its verdict.

    `measured` returns a measure's values, one a seed, under each law of lengths.
    """
    for entry in stated(path):
        claim, section = of_measure(system, entry), entry["section"]
        if "lacks" in entry:
            yield Line(section, untestable(claim, entry["lacks"]))
            continue
        for law, values in measured(entry["measure"]):
            yield Line(section, by_number(claim, None, interval(values)), law)


def run_part(driver: Driver, name: str, shard: Shard, out: Path, *, workers: int | None = None, teller: Teller) -> int:
    """Run what a shard has of the runs of all claims, by spec; return their number."""
    mine = shard.part(dict.fromkeys(driver.specs(driver.SEEDS, out)), canonical)
    sweep.sweep(mine, out, workers=workers, teller=teller, what=f"{name}, shard {shard}")
    return len(mine)


def kept(out: Path, facts: Iterable[object], told: Callable[[], Iterable[str]]) -> Iterator[str]:
    """Yield the lines of an answer, which is kept in `out` for as long as the sources and what it rests on stay so."""
    rests_on = [sources.tree("harness", "systems", "workloads", "traces"), *facts]
    path = out / f"answer-{digest(' '.join(map(str, rests_on)))}.txt"
    if not path.is_file():
        every = [f"{line}\n" for line in told()]
        with whole.replacing(path) as part:
            part.write_text("".join(every), "utf-8")
    yield from path.read_text("utf-8").splitlines()


def printed(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the claims as text: class, the paper's number, the result here, the claim; below it why they differ."""
    width = max((len(line.verdict.text) for line in lines), default=0)
    for section, verdict, law in lines:
        of = f", {law}" if law else ""
        paper = paper_text(verdict.claim)
        yield f"{verdict.says:12} {paper:>10}  here {verdict.text:{width}} {verdict.claim.subject}{of} ({section})"
        if why := reason(verdict):
            yield f"{'':12} {why}"


def reason(verdict: Verdict) -> str:
    """Return the reason why ours differs, or the datum that a comparison lacks."""
    return verdict.note or verdict.claim.why
