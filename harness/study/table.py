"""The table of a study (`record.SWEEP` in its folder): the scores of the runs at all of its points.

It has the rows of `tidy` with two columns before them: the key of the panel (`condition`) and x.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import record, tidy
from harness.rows.definitions import DEFINITIONS
from harness.run import score, sweep
from harness.run.slo import SloTarget, judgements
from harness.run.sources import Task
from harness.run.spec import canonical, digest
from harness.run.teller import Silent, Teller
from harness.study.grid import Point
from harness.study.study import Study

Key = tuple[str, str, str]  # of a scored run: its folder, system and SLO rule


def schema() -> pa.Schema:
    """Columns of a study's table: condition (the panel's key) and x before those of `tidy.TABLE_SCHEMA`."""
    word = tidy.TABLE_SCHEMA.field("run").type
    return pa.schema([("condition", word), ("x", pa.float64()), *tidy.TABLE_SCHEMA])


def table_of(
    study: Study, points: Sequence[Point], ready: Sequence[Task], out: Path, workers: int | None = None,
    scored: dict[Key, pa.Table] | None = None, teller: Teller | None = None,
) -> pa.Table:  # fmt: skip
    """The rows of all points, sorted by condition, x and spec; each run is scored once a rule, unless `scored` has it.

    Rows by model are there where the study asks for them; else only what its text and figure show.
    """
    names = [*study.definitions, "both", "offered_rps", "undefined_tpot", *tidy.WEIGHTS, *tidy.CAPS]
    shown = pa.array(names, pa.string())
    plain = record.plain(schema())
    keys = [(task.spec.folder, point.system, point.under.rule) for point, task in zip(points, ready, strict=True)]

    def rows(point: Point, folder: str) -> pa.Table:
        wanted = DEFINITIONS if study.by_model else dict.fromkeys((*study.definitions, "both"))
        run = score.scorable(point.system, out / folder, point.under)
        scored = tidy.score(run, by_model=study.by_model, definitions=tuple(wanted))
        if not study.by_model:
            scored = scored.filter(pc.is_in(scored["definition"].cast(pa.string()), shown))
        return scored.cast(pa.schema([f for f in plain if f.name not in {"condition", "x"}]))

    scored, teller = {} if scored is None else scored, teller or Silent()
    once = dict(zip(keys, points, strict=True))
    with ThreadPoolExecutor(workers or sweep.cpus()) as pool:  # files and arrays leave the interpreter to the others
        todo = {key: pool.submit(rows, point, key[0]) for key, point in once.items() if key not in scored}
        for done, (key, table) in enumerate(todo.items()):
            teller.progress("scores", done, len(todo))
            scored[key] = table.result()
        teller.progress("scores", len(todo), len(todo))
    parts = []
    for point, key in zip(points, keys, strict=True):
        own = scored[key]
        place = [pa.array([point.panel.key] * len(own), pa.string()), pa.array([point.x] * len(own), pa.float64())]
        parts.append(pa.Table.from_arrays([*place, *own.columns], schema=plain))
    order = [(name, "ascending") for name in ("condition", "x", *tidy.ORDER)]
    return pa.concat_tables(parts).sort_by(order).cast(schema()).combine_chunks()


def scored_alone(task: Task, under: SloTarget, out: Path) -> pa.Table:
    """The table of one run that no study asked for, kept beside it: it tells who judged the run."""
    spec = task.spec
    key = digest(record.dumps([[spec.label, canonical(spec)], under.identity, under.seconds]))
    trace = Path(spec.trace).stem if spec.trace.endswith(".parquet") else spec.trace
    folder = out / f"{trace.partition('+')[0].replace('/', '-')}-{key}"
    about = {"judges": judgements([(under, spec.folder)]), "runs": {spec.folder: spec.label}}

    def make() -> pa.Table:
        return tidy.scores([score.scorable(spec.label, out / spec.folder, under)])

    return score.kept(folder / record.SWEEP, about, [task], __file__, make)
