"""Scores of stored runs under an SLO target: of a single run, or of many runs in a stored table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.policy.types import UserError
from harness.rows import by_window, record, scoring, stored
from harness.run import sources
from harness.run.slo import SloTarget, limits
from harness.run.sources import Task
from harness.run.spec import digest

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.rows.requests import Floats


def scorable(label: str, run: Path, under: SloTarget) -> scoring.Run:
    """Return a stored run in the form that `scoring` takes, with the limits of an SLO target."""
    about = record.meta(run)
    about["spec"] = about["spec"] | {"slo": under.rule}
    slo = {} if about["skipped"] or about["infeasible"] else limits(run, under)
    return scoring.Run(run.name, about, record.read_by_pieces(run), slo, label)


def attained(run: Path, under: SloTarget, definitions: Collection[str]) -> dict[str, float]:
    """Return the pooled attainment of a run, keyed by definition; 0 if the run had no room or nothing was offered."""
    counts_of = by_model(run, under, definitions)
    counts = {name: by_window.Counted(*(float(x.sum()) for x in of)) for name, (_, *of) in counts_of.items()}
    return {name: counts[name].met if name in counts else 0.0 for name in definitions}


def by_model(
    run: Path, under: SloTarget, definitions: Collection[str]
) -> dict[str, tuple[tuple[str, ...], Floats, Floats]]:
    """Return for each definition a run's models, their misses and their offered requests.

    Misses and offered requests are arrays (models, blocks of the window). The result is empty if the run was skipped or
    is infeasible. Raises UserError if a definition needs token times and the run has none.
    """
    about = record.meta(run)
    if about["skipped"] or about["infeasible"]:
        return {}
    of = scoring.Run(run.name, about, record.read_by_pieces(run), limits(run, under))
    sums = scoring.tallied(of, about["spec"], definitions, measured=False)
    if sums.lacks:
        raise UserError(f"{run.name} has no token times, which {min(sums.lacks)} needs")
    return {name: (sums.models, sums_of.missed, sums_of.asked) for name, sums_of in sums.attained.items()}


def ran(run: Path) -> bool:
    """Tell whether a run was neither skipped nor infeasible."""
    about = record.meta(run)
    return not (about["skipped"] or about["infeasible"])


def table(
    path: Path, about: Mapping[str, Any], tasks: Iterable[Task], scorer: str, make: Callable[[], pa.Table]
) -> pa.Table:
    """Return the table at `path`; make it again if its facts, its runs or the sources of its scorer have changed.

    `scorer` is the path of the module that defines `make`.
    """
    runs = sorted((task.folder, task.code) for task in tasks)
    key = digest(record.dumps([runs, sources.scoring(scorer), about]))
    kind = stored.SCORES if path.name == record.SWEEP else stored.LEADS
    return kind.kept(path, {**about, "key": key}, make)
