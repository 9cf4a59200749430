"""The table of a study (`record.SWEEP` in its folder): the scores of the runs at all of its points.

It has the rows of `tidy`. Two columns precede those of `tidy`: the key of the panel (`condition`) and x.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import by_window, memo, record, scoring, tidy, vetted
from harness.rows.definitions import DEFINITIONS
from harness.run import crew, score, sweep
from harness.run.slo import SloTarget, judgements
from harness.run.sources import Task
from harness.run.spec import canonical, digest
from harness.run.streams import stem
from harness.run.teller import Teller
from harness.study import columns
from harness.study.study import Study

MANY = 256  # runs that are scored in workers, also where none has started
Key = tuple[str, str, str]  # a scored run's folder, system and SLO rule


class Place(NamedTuple):
    """The place of a run in the table, and the SLO that judges the run there; one run may have several places."""

    condition: str
    x: float
    system: str
    under: SloTarget
    folder: str

    @property
    def key(self) -> Key:
        """The key of this place's scores."""
        return self.folder, self.system, self.under.rule


def labels(rows: pa.Table) -> dict[str, str]:
    """Return the name of the system that each label in a table stands for."""
    return dict(zip(memo.column(rows, "label"), memo.column(rows, "system"), strict=True))


def marks(rows: pa.Table) -> dict[str, str]:
    """Return the mark of each label whose system's file is unchecked or checked in part."""
    return {label: mark for label, name in labels(rows).items() if (mark := vetted.mark(name))}


def schema() -> pa.Schema:
    """Return the columns of a study's table: condition (the panel's key) and x, then those of `tidy.TABLE_SCHEMA`."""
    word = tidy.TABLE_SCHEMA.field("run").type
    return pa.schema([("condition", word), ("x", pa.float64()), *tidy.TABLE_SCHEMA])


@dataclass(frozen=True)
class Scores:
    """The scores of a study's runs below `out`; each run is scored once for each SLO rule.

    A study with `by_model` has rows for each model, by all definitions. Any other study has only the rows that text and
    figures show.
    """

    study: Study
    out: Path
    workers: int | None
    known: dict[Key, pa.Table] = field(default_factory=dict)

    def table(self, places: Sequence[Place], teller: Teller) -> pa.Table:
        """Return the rows of all places, sorted by condition, x and spec."""
        self.add(places, teller)
        plain, tables = record.plain(schema()), []
        for place in places:
            scores = self.known[place.key]
            place_columns = [
                pa.array([place.condition] * len(scores), pa.string()),
                pa.array([place.x] * len(scores), pa.float64()),
            ]
            tables.append(pa.Table.from_arrays([*place_columns, *scores.columns], schema=plain))
        order = [(name, "ascending") for name in ("condition", "x", *tidy.ORDER)]
        return pa.concat_tables(tables).sort_by(order).cast(schema()).combine_chunks()

    def add(self, places: Iterable[Place], teller: Teller) -> None:
        """Score the runs of those places that are not scored yet.

        Worker processes score them if there are many such runs, or if worker processes already run.
        """
        todo = {place.key: place for place in places if place.key not in self.known}.values()
        nearest = sorted(todo, key=lambda place: sweep.part_order(place.folder))
        with crew.hired() as workforce:
            workforce.slots = self.workers or sweep.cpus()
            if workforce.slots > 1 and (workforce.started or len(nearest) >= MANY):
                scored = workforce.each(scores_of, [(p.folder, (p, self.out, self.study)) for p in nearest])
            else:
                scored = (((place,), scores_of(place, self.out, self.study)) for place in nearest)
            for done, ((place, *_), scores) in enumerate(scored, 1):
                self.known[place.key] = scores
                teller.progress("scores", done, len(nearest))


def scores_of(place: Place, out: Path, study: Study) -> pa.Table:
    """Score the run of a place, with the columns and rows that the table of a study shows."""
    folder = out / place.folder
    wanted = DEFINITIONS if study.by_model else dict.fromkeys((*study.definitions, "both"))
    more = columns.values(folder, study.measures) if study.measures else ()
    run = score.scorable(place.system, folder, place.under)
    scores = scoring.score(run, by_model=study.by_model, definitions=tuple(wanted), more=more)
    if not study.by_model:
        beside = ("both", "offered_rps", "undefined_tpot", tidy.HELD, *tidy.WEIGHTS, *tidy.CAPS)
        shown = pa.array([*study.definitions, *study.measures, *beside], pa.string())
        scores = scores.filter(pc.is_in(scores["definition"].cast(pa.string()), shown))
    return scores.cast(pa.schema([f for f in record.plain(schema()) if f.name not in {"condition", "x"}]))


def counted(scores: pa.Table, definition: str) -> by_window.Counted | None:
    """Return a scored run's misses and requests, by a definition of attainment; None if the models did not fit."""
    for name, word in (("definition", definition), ("over", "model")):
        scores = scores.filter(pc.equal(scores[name].cast(pa.string()), word))
    counts = [np.array(scores[name].to_pylist(), np.float64) for name in ("missed", "offered")]
    return by_window.Counted(*(float(of.sum()) for of in counts)) if len(scores) else None


def scored_alone(task: Task, under: SloTarget, out: Path) -> pa.Table:
    """Return the table of one run outside any study; it is stored with the run, and with the target that judged it."""
    spec = task.spec
    key = digest(record.dumps([[spec.label, canonical(spec)], under.identity, under.seconds]))
    folder = out / f"{stem(spec.trace).partition('+')[0].replace('/', '-')}-{key}"
    about = {"judges": judgements([(under, spec.folder)]), "runs": {spec.folder: spec.label}}

    def make() -> pa.Table:
        return scoring.scores([score.scorable(spec.label, out / spec.folder, under)])

    return score.table(folder / record.SWEEP, about, [task], __file__, make)
