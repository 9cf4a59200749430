"""The commands as functions: `from harness import compare, size`. Their arguments are the command line's options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.answers import size as words
from harness.cli.asked import Asked
from harness.rows.loaded import Requests
from harness.study.compare import stem_of
from harness.study.measure import Measured, measure
from harness.study.size import SizeSearch
from harness.study.sized import GROWTH, WINDOWS, Question, Sized
from traces import deal
from traces.chosen import Chosen, chosen
from traces.kept import meant
from workloads import slo as rules
from workloads.models import model_set
from workloads.usual import SIZED, TRACE, WORLD

if TYPE_CHECKING:
    import pandas as pd


class Comparison:
    """A comparison of systems, with its stored runs and their requests as data frames."""

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self.folder = measured.folder  # `bench plot` draws it, `bench explain` explains it

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Frame with a row for each run: label, x (the rate scale), gpus, seed, attainment, mean_model, worst_model.

        `run` is the name of the run's folder. `infeasible` and `skipped` say why a run has NaN for its values. Runs
        that only measure the base of an SLO are left out.
        """
        frame = self.measured.table.to_pandas()
        frame = frame[frame["definition"] == self.measured.study.definitions[0]]
        key = ["run", "label", "x", "gpus", "seed", "infeasible", "skipped"]
        pooled = frame["over"] == "pooled"
        frame = frame.assign(pooled=frame["value"].where(pooled), by_model=frame["value"].where(~pooled))
        by_run = frame.groupby(key, sort=False, dropna=False, observed=True)
        out: pd.DataFrame = by_run.agg(
            attainment=("pooled", "first"), mean_model=("by_model", "mean"), worst_model=("by_model", "min")
        ).reset_index()
        return out

    @cached_property
    def requests(self) -> pd.DataFrame:
        """Frame with a row for each request of all runs, with the run's name and label.

        Raises UserError if it would take more than 2 GB; `load` reads some of the runs.
        """
        runs = self.measured.about.runs
        rows = Requests([self.folder.parent / run for run in runs], None).frame()
        return rows.assign(label=rows["run"].astype("str").map(dict(runs)))


def compare(
    systems: str | Sequence[str],
    *,
    trace: str | None = None,
    spread: str | None = None,
    rename: Mapping[str, str] | None = None,
    drop_streams: Sequence[str] = (),
    shift_s: Mapping[str, float] | None = None,
    slo: str | None = None,
    slo_scale: float | None = None,
    rate_scale: Sequence[float] | None = None,
    seeds: int = 5,
    definition: str | None = None,
    controls: bool = False,
    out: str | Path = "results",
    workers: int | None = None,
    **setting: Any,
) -> Comparison:
    """Compare systems as `bench compare` does; `setting` has its other options (models, gpus, gpu, served ...).

    Defaults are those of the command, except that `seeds` is fixed and `out` is relative to the working directory. If
    the trace is a log, it is converted, and stderr says how. Stored runs are reused. Raises UserError for input that
    `bench` refuses.
    """
    folder = Path(out).resolve()
    names = systems.split(",") if isinstance(systems, str) else list(systems)
    streams = _streams(rename, drop_streams, shift_s, setting.get("models", WORLD["models"]))
    if trace is not None or spread is not None or streams is not None:
        setting["trace"] = _trace(trace or TRACE, spread, folder, streams)
    asked = Asked(
        ",".join(names),
        setting,
        slo=slo,
        slo_scale=slo_scale,
        definition=definition,
        rates=rate_scale,
        seeds=seeds,
        controls=controls,
    ).study()
    return Comparison(measure(asked, folder, stem=stem_of(asked), workers=workers))


def _trace(text: str, spread: str | None, out: Path, streams: Chosen | None = None) -> str:
    """Return the path or name of a trace; a log is converted first, and stderr says how.

    `streams` changes its streams, and `spread` splits its requests among models.
    """
    trace, report = meant(text, out / "traces", None if spread is None else deal.spread(spread), streams)
    if report:
        sys.stderr.write(f"{report}: {trace}\n")
    return trace


def _streams(
    rename: Mapping[str, str] | None, drop: Sequence[str], shift_s: Mapping[str, float] | None, models: str
) -> Chosen | None:
    served = [member.stream or member.name for member in model_set(models).members]
    return chosen(rename or {}, drop, served, shift_s or {})


class Answer:
    """The answer of `size`: the sentence, the best choice, and every count that was tried."""

    def __init__(self, sized: Sized) -> None:
        self.sized = sized
        self.sentence = words.sentence(sized)
        self.best = sized.best  # (kind of GPU, system, GPUs), or None

    @cached_property
    def tried(self) -> pd.DataFrame:
        """Frame with a row for each kind of GPU, system and count that ran.

        Its columns are gpu, label, gpus, usd_day, pooled, worst and answer.
        """
        import pandas as pd

        columns = ["gpu", "label", "gpus", "usd_day", "pooled", "worst", "answer"]
        return pd.DataFrame([row._asdict() for row in self.sized.tried if not row.unfit], columns=columns)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """All that `bench size --json` prints."""
        return words.facts(self.sized)


def size(
    *, trace: str, models: str, spread: str | None = None, rename: Mapping[str, str] | None = None,
    drop_streams: Sequence[str] = (), shift_s: Mapping[str, float] | None = None, slo: str | None = None,
    slo_scale: float | None = None, gpu: str | Sequence[str] = "h100", gpus: tuple[int, int] = (1, 64),
    target: float = 99.0, systems: str | Sequence[str] = SIZED, price: Mapping[str, float] | None = None,
    spare: int = 0, node: int = 1, grow: Sequence[float] = GROWTH, definition: str | None = None,
    windows: int = WINDOWS, out: str | Path = "results", workers: int | None = None, **setting: Any,
) -> Answer:  # fmt: skip
    """Find the fewest GPUs as `bench size` does; `setting` has its other options (served, host ...).

    If the trace is a log, it is converted, and stderr says how. Stored runs are reused. Raises UserError for input that
    `bench` refuses.
    """
    folder = Path(out).resolve()
    kinds, names = (x.split(",") if isinstance(x, str) else x for x in (gpu, systems))
    streams = _streams(rename, drop_streams, shift_s, models)
    question = Question.of(
        {**setting, "trace": _trace(trace, spread, folder, streams), "models": models},
        kinds,
        names,
        {kind: str(usd) for kind, usd in (price or {}).items()},
        rules.full_rule(slo, slo_scale, model_set(models)),
        definition,
        grow,
        target=target / 100,
        least=gpus[0],
        most=gpus[1],
        spare=spare,
        node=node,
        windows=windows,
    )
    return Answer(SizeSearch(question, folder, workers).done())
