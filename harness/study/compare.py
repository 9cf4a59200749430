"""A comparison: contestants at several rates and seeds, run, scored under one SLO rule, and kept as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.rows import record, tidy
from harness.rows.definitions import DEFINITIONS
from harness.run import score
from harness.run.resolve import resolve
from harness.run.setup import Failed, Setup
from harness.run.slo import SloTarget, judgements
from harness.run.sources import Task
from harness.run.spec import Spec, canonical, digest
from harness.run.sweep import sweep, tasks
from harness.run.teller import Teller
from harness.study.bases import slo_target
from harness.study.rates import knee

if TYPE_CHECKING:
    import pyarrow as pa

CONTROLS = ("dedicated", "ideal", "static:oracle")  # bounds in every figure, but no contestants
AA_SEED = 500  # the A/A copy draws from here, apart from evaluations and from tuning
AA = " (A/A)"  # what its label ends with


class Entry(NamedTuple):
    """A contestant: how tables name it, and its spec, whose rate and seeds are still to be set."""

    label: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class Compared:
    """A scored sweep."""

    folder: Path
    table: pa.Table  # tidy.TABLE_SCHEMA
    judge: SloTarget
    entries: tuple[Entry, ...]
    rates: tuple[float, ...]
    seeds: int
    reference: Spec  # a resolved spec of the sweep: what all have in common
    failed: Mapping[str, str]  # what contestants that are not among the entries did, by label (see Failed)


def compare(
    entries: Sequence[Entry],
    out: Path,
    *,
    rates: Sequence[float] | None,
    seeds: int,
    rule: str,
    definition: str | None = None,
    workers: int | None = None,
    teller: Teller | None = None,
) -> Compared:
    """Run the grid of entries x rates x seeds and score it under an SLO rule.

    Without rates the knee of a definition of attainment (None: the rule's) is searched by doubling with the first seed,
    then sampled. All entries share trace, models, GPU kind and engine. An entry whose policy fails leaves the
    comparison; Failed where none is left. Raises UserError.
    """
    left, failed = list(entries), dict[str, str]()
    while True:
        try:
            found = _compared(left, out, rates, seeds, rule, definition, workers, teller)
        except Failed as why:  # again without it: finished runs cost nothing
            failed |= why.why
            remain = [entry for entry in left if entry.spec.label not in failed]
            if not remain or len(remain) == len(left):
                raise Failed(failed) from why
            left = remain
        else:
            labels = dict.fromkeys(entry.spec.label for entry in entries)
            return replace(found, failed={label: failed[label] for label in labels if label in failed})


def _compared(
    entries: Sequence[Entry],
    out: Path,
    rates: Sequence[float] | None,
    seeds: int,
    rule: str,
    definition: str | None,
    workers: int | None,
    teller: Teller | None,
) -> Compared:
    """See `compare`; raises Failed where the policy of any entry fails."""
    if definition is not None and DEFINITIONS[definition].by_token:
        entries = [Entry(label, replace(spec, token_times=True)) for label, spec in entries]
    if rates is None and entries[0].spec.scaling == "none":
        rates = (1.0,)
    for entry in entries:  # a mistake shows before anything is run
        Setup(resolve(replace(entry.spec, slo="", rate_scale=1.0 if rates is None else float(max(rates))))).jobs()
    under = slo_target(entries[0].spec, rule, out, workers=workers, teller=teller)
    shown = definition or under.definition

    def grid(rates: Sequence[float], seeds: int) -> list[tuple[Entry, Spec]]:
        return [
            (entry, under.spec(replace(entry.spec, rate_scale=float(rate), seed=entry.spec.seed + seed)))
            for entry in entries
            for rate in rates
            for seed in range(seeds)
        ]

    def scores(rate: float) -> dict[str, float]:
        cells = grid([rate], 1)
        folders = sweep([spec for _, spec in cells], out, workers=workers, teller=teller, what=f"search, rate {rate:g}")
        pairs = zip(cells, folders, strict=True)
        return {entry.label: score.attained(folder, under, [shown])[shown] for (entry, _), folder in pairs}

    if rates is None:
        rates = knee(scores)
    cells = grid(rates, seeds)
    sweep([spec for _, spec in cells], out, workers=workers, teller=teller)
    found = [(entry, task) for (entry, _), task in zip(cells, tasks(spec for _, spec in cells), strict=True)]
    folder, table = scored(found, under, out)
    return Compared(folder, table, under, tuple(entries), tuple(rates), seeds, found[0][1].spec, {})


def scored(cells: Sequence[tuple[Entry, Task]], under: SloTarget, out: Path) -> tuple[Path, pa.Table]:
    """The sweep's folder and tidy table; scored anew only if a run, the rule or the scoring changed."""
    asked = [[entry.label, canonical(task.spec)] for entry, task in cells]
    reference = cells[0][1].spec
    trace = Path(reference.trace).stem if reference.trace.endswith(".parquet") else reference.trace
    trace = trace.partition("+")[0].replace("/", "-")
    folder = out / f"{trace}-{digest(record.dumps([sorted(asked), under.rule, under.seconds]))}"
    about = {
        "judges": judgements((under, task.spec.folder) for _, task in cells),
        "runs": {task.spec.folder: entry.label for entry, task in cells},
    }

    def make() -> pa.Table:
        return tidy.scores(score.scorable(entry.label, out / task.spec.folder, under) for entry, task in cells)

    return folder, score.kept(folder / record.SWEEP, about, (task for _, task in cells), __file__, make)
