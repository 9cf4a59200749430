"""A study that is run in shards, on computers without a connection: the work of a shard, and the progress of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.rows import record
from harness.run import crew, sweep
from harness.run.shard import Progress, Shard
from harness.run.spec import canonical
from harness.run.teller import Silent, Teller
from harness.study.counted import Counted
from harness.study.grid import Grid
from harness.study.measure import Work, runs_of, without_failing
from harness.study.study import Study


class ShardWork(NamedTuple):
    """The numbers of searches and runs that a shard did.

    `of` is the number of searches in the whole study. A fixed grid has no searches.
    """

    searches: int
    of: int
    runs: int
    failed: Mapping[str, str]


def measure_shard(
    study: Study,
    out: Path,
    shard: Shard,
    *,
    full: bool = False,
    stem: str = "",
    workers: int | None = None,
    teller: Teller | None = None,
) -> ShardWork:
    """Run the part of a study that belongs to a shard.

    The part consists of whole searches or, for a fixed grid, of some of the specs. The SLO bases that these runs need
    are run too, even if other shards run them as well. No table is written; `measure` writes it when all shards are
    done. Raises the errors that `measure` raises.
    """
    failed: dict[str, str] = {}
    counted = Counted(teller or Silent(), quiet=study.layout == "table")
    place = str(shard).replace("/", "-")
    whole = Work(study.of(full), out, full, stem or study.name, None, workers, counted, shard=place)

    def act(work: Work) -> ShardWork:
        with crew.shared():
            if fixed(work):
                return ShardWork(0, 0, run_part(work, shard), failed)
            all_ = searches(work)
            mine = shard.part(all_, record.dumps)
            keys = frozenset(key for search in mine for key in search)
            part = replace(work, only=keys)
            if mine:
                part.sampled(part.begun())
            return ShardWork(len(mine), len(all_), part.made, failed)

    return without_failing(whole, failed, act)


def progress(study: Study, out: Path, *, full: bool = False, stem: str = "") -> Iterator[Progress]:
    """Yield the progress of each search of a study, judged by the runs that are stored below `out`; nothing is run."""
    quiet = Counted(Silent(), quiet=True)
    work = Work(study.of(full), out, full, stem or study.name, None, None, quiet)
    for search in searches(work):
        yield _progress(replace(work, only=frozenset(search)), search)


def _progress(part: Work, search: tuple[str, ...]) -> Progress:
    return sweep.stored_so_far(search, lambda: part.sampled(part.begun()), lambda: part.made)


# ------------------------------------------------------------------ how work is cut


def fixed(work: Work) -> bool:
    """Tell whether all runs of a study are known in advance, so that none depends on the result of another."""
    grid = Grid(work.study, work.full, work.panels)
    rules = ((grid.sample(panel).rule, bool(panel.xs)) for panel in work.panels)
    chosen = all(rule == "fixed" or (rule == "knee" and given) for rule, given in rules)
    return chosen and not grid.scope.budget and not any(panel.holds_rate for panel in work.panels)


def searches(work: Work) -> list[tuple[str, ...]]:
    """Return the independent searches of a study, each as the keys of its panels.

    Panels with the same key belong together. If the rate of some panel is the result of another panel's search, panels
    with the same trace and model set belong together too.
    """
    of: dict[str, set[str]] = {}
    waits = any(panel.holds_rate for panel in work.every)
    by_place: dict[tuple[str, str], str] = {}
    for panel in work.every:
        mine = of.setdefault(panel.key, {panel.key})
        place = (panel.first.trace, panel.first.models)
        if waits and (other := by_place.setdefault(place, panel.key)) not in mine:
            mine |= of[other]
            of |= dict.fromkeys(mine, mine)
    return sorted({tuple(sorted(keys)) for keys in of.values()})


def run_part(work: Work, shard: Shard) -> int:
    """Run a shard's part of the specs of a fixed grid, after all SLO base runs; return the number of specs in it."""
    grid = work.begun()
    groups = [group for panel in grid.panels for group in work.groups(panel)]
    runs = [run for group in groups for run in runs_of(grid, group, work.ask(grid, group, {}))]
    points = [run.point for run in runs]
    points += [p for panel in grid.panels for p in grid.bounding(panel, work.xs_of_first(panel, points))]
    mine = shard.part(dict.fromkeys(point.spec for point in points), canonical)
    if mine:
        work.run(mine, f"{work.study.name}, shard {shard}")
    return len(mine)
