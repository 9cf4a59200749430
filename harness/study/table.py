"""The table of a study (`record.SWEEP` in its folder): the scores of the runs at all of its points.

It has the rows of `tidy` with two columns before them: the key of the panel (`condition`) and x.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import by_window, memo, record, scoring, tidy, vetted
from harness.rows.definitions import DEFINITIONS
from harness.run import score, sweep
from harness.run.slo import SloTarget, judgements
from harness.run.sources import Task
from harness.run.spec import canonical, digest
from harness.run.teller import Silent, Teller
from harness.study import columns

Key = tuple[str, str, str]  # a scored run's folder, system and SLO rule


class Place(NamedTuple):
    """The place of a run in the table, and the SLO that judges it there; one run may stand at many places."""

    condition: str
    x: float
    system: str
    under: SloTarget
    folder: str

    @property
    def key(self) -> Key:
        """The key under which its scores are kept."""
        return self.folder, self.system, self.under.rule


def labels(rows: pa.Table) -> dict[str, str]:
    """Return the system of each label."""
    return dict(zip(memo.column(rows, "label"), memo.column(rows, "system"), strict=True))


def marks(rows: pa.Table) -> dict[str, str]:
    """Return the mark of each label that has one: its system's file is unchecked, or checked in part."""
    return {label: mark for label, name in labels(rows).items() if (mark := vetted.mark(name))}


def schema() -> pa.Schema:
    """Return the columns of a study's table: condition (the panel's key) and x before those of `tidy.TABLE_SCHEMA`."""
    word = tidy.TABLE_SCHEMA.field("run").type
    return pa.schema([("condition", word), ("x", pa.float64()), *tidy.TABLE_SCHEMA])


def table_of(
    places: Sequence[Place],
    out: Path,
    definitions: Collection[str],
    *,
    by_model: bool,
    workers: int | None = None,
    scored: dict[Key, pa.Table] | None = None,
    teller: Teller | None = None,
    measures: Sequence[str] = (),
) -> pa.Table:
    """Return the rows of all places, sorted by condition, x and spec; score each run once a rule, unless in `scored`.

    With `by_model` all definitions have rows by model; else there is only what text and figures show.
    """
    scored = {} if scored is None else scored
    score_all(
        places, out, definitions, by_model=by_model, workers=workers, scored=scored, teller=teller, measures=measures
    )
    plain, tables = record.plain(schema()), []
    for place in places:
        scores = scored[place.key]
        place_columns = [
            pa.array([place.condition] * len(scores), pa.string()),
            pa.array([place.x] * len(scores), pa.float64()),
        ]
        tables.append(pa.Table.from_arrays([*place_columns, *scores.columns], schema=plain))
    order = [(name, "ascending") for name in ("condition", "x", *tidy.ORDER)]
    return pa.concat_tables(tables).sort_by(order).cast(schema()).combine_chunks()


def score_all(
    places: Sequence[Place],
    out: Path,
    definitions: Collection[str],
    *,
    by_model: bool,
    scored: dict[Key, pa.Table],
    workers: int | None = None,
    teller: Teller | None = None,
    measures: Sequence[str] = (),
) -> None:
    """Add to `scored` the scores of those places that it lacks; `measures` are further columns of each run."""
    names = [*definitions, *measures, "both", "offered_rps", "undefined_tpot", tidy.HELD, *tidy.WEIGHTS, *tidy.CAPS]
    shown = pa.array(names, pa.string())
    form = pa.schema([f for f in record.plain(schema()) if f.name not in {"condition", "x"}])

    def rows(place: Place) -> pa.Table:
        wanted = DEFINITIONS if by_model else dict.fromkeys((*definitions, "both"))
        run = score.scorable(place.system, out / place.folder, place.under)
        more = columns.values(out / place.folder, measures) if measures else ()
        scores = scoring.score(run, by_model=by_model, definitions=tuple(wanted), more=more)
        if not by_model:
            scores = scores.filter(pc.is_in(scores["definition"].cast(pa.string()), shown))
        return scores.cast(form)

    teller = teller or Silent()
    once = {place.key: place for place in places}
    with ThreadPoolExecutor(workers or sweep.cpus()) as pool:  # work on files and arrays releases the interpreter lock
        lacks = [key for key in once if key not in scored]
        nearest = [lacks[k] for k in sweep.in_part_order([once[key].folder for key in lacks])]
        todo = {key: pool.submit(rows, once[key]) for key in nearest}
        for done, (key, table) in enumerate(todo.items()):
            teller.progress("scores", done, len(todo))
            scored[key] = table.result()
        teller.progress("scores", len(todo), len(todo))


def counted(scores: pa.Table, definition: str) -> by_window.Counted | None:
    """Return a scored run's misses and offered requests; None where it could not run."""
    which = pc.and_(
        *(
            pc.equal(scores[name].cast(pa.string()), word)
            for name, word in (("definition", definition), ("over", "model"))
        )
    )
    rows = scores.filter(which)
    counts = [np.array(rows[name].to_pylist(), np.float64) for name in ("missed", "offered")]
    return by_window.Counted(*(float(of.sum()) for of in counts)) if len(rows) else None


def scored_alone(task: Task, under: SloTarget, out: Path) -> pa.Table:
    """Return the table of one run outside any study, kept beside it with the target that judged the run."""
    spec = task.spec
    key = digest(record.dumps([[spec.label, canonical(spec)], under.identity, under.seconds]))
    trace = Path(spec.trace).stem if spec.trace.endswith(".parquet") else spec.trace
    folder = out / f"{trace.partition('+')[0].replace('/', '-')}-{key}"
    about = {"judges": judgements([(under, spec.folder)]), "runs": {spec.folder: spec.label}}

    def make() -> pa.Table:
        return scoring.scores([score.scorable(spec.label, out / spec.folder, under)])

    return score.table(folder / record.SWEEP, about, [task], __file__, make)
