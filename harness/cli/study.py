"""`bench study`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from harness.cli.options import FIGURES, LIMIT, RESULTS, WORKERS, complete, examples, stems, system_names, trace_names
from harness.cli.terminal import Terminal
from harness.report.commands import short_path

if TYPE_CHECKING:
    from harness.run.spec import Spec
    from harness.study.grid import Panel
    from harness.study.measure import Measured
    from harness.study.study import Sample, Study


@click.command(epilog=examples(
    "bench study",
    "bench study fig7",
    "bench study fig7 --systems prism,static --traces arena-chat --models heavy8",
    'bench study prism-bridge --only "assignment; equal pools" --seeds 2',
    "bench study ./mine.toml --dry-run",
))  # fmt: skip
@click.argument("name", required=False, metavar="[NAME|FILE.toml]",
                shell_complete=complete(lambda: stems("harness/study/studies")))  # fmt: skip
@click.option("--only", metavar="LIST", help="Only these conditions, separated by semicolons.")
@click.option("--full", is_flag=True, help="More conditions, points and seeds.")
@click.option("--seeds", type=click.IntRange(1), metavar="N", help="Runs of each point, instead of the study's.")
@click.option("--systems", metavar="LIST", shell_complete=complete(system_names, many=True),
              help="Instead of the study's; the first one is its own.")  # fmt: skip
@click.option(
    "--traces", metavar="LIST", shell_complete=complete(trace_names, many=True), help="Instead of the study's."
)
@click.option("--models", metavar="LIST", help="Of the study's model sets only these; or instead of its only one.")
@click.option("--engine", default="sim", show_default=True, metavar="NAME",
              help="Simulator, or real servers (bench list); what it cannot run is told.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Of --engine: how many there are.")  # fmt: skip
@click.option("--table", metavar="FILE", help="Of --engine: its cost table (bench calibrate writes one).")
@click.option("--dry-run", is_flag=True, help="Show the points and their cost; run nothing.")
@click.option("--no-plot", is_flag=True, help="No figure.")
@click.option("--markdown", is_flag=True, help="Print tables as Markdown.")
@LIMIT
@WORKERS
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Where runs (and then the figure) go.  [default: results/NAME]")  # fmt: skip
def study(
    *,
    name: str | None,
    only: str | None,
    full: bool,
    seeds: int | None,
    systems: str | None,
    traces: str | None,
    models: str | None,
    engine: str,
    gpus: int,
    table: str | None,
    dry_run: bool,
    no_plot: bool,
    markdown: bool,
    workers: int | None,
    out: Path | None,
) -> None:
    """Run a study: systems under conditions, beside what papers say.

    Without a name, list the studies that come with the bench.
    """
    from harness.policy.types import UserError
    from harness.study import load as studies
    from harness.study.measure import measure

    if name is None:
        _list()
        return
    asked = studies.study(name).only(
        _listed("--only", only, ";"), _listed("--systems", systems), _listed("--traces", traces),
        _listed("--models", models), seeds,
    )  # fmt: skip
    if engine != "sim":
        from harness.study.on_engine import part

        asked, notes = part(asked, engine, table, gpus)
        for line in notes:
            click.echo(line)
    elif table is not None:
        raise UserError("--table is of --engine: bench compare --table takes one for the simulator")
    folder = (out or RESULTS / asked.name).resolve()
    if dry_run:
        dry(asked, full, folder)
        return
    with Terminal() as teller:
        measured = measure(asked, folder, full=full, workers=workers, teller=teller)
    _print(measured, markdown)
    sys.stdout.flush()
    if not no_plot:
        from plots import fig_study

        stem = (FIGURES if out is None else folder) / asked.name
        paths = fig_study.render(measured.folder, stem, f"bench study {name}")
        click.echo(" · ".join(short_path(path) for path in (measured.folder, *paths)), err=markdown)
    if measured.failed:
        sys.exit(2)


def _listed(option: str, text: str | None, between: str = ",") -> list[str] | None:
    """The parts of a list; UserError where it holds none."""
    from harness.policy.types import UserError

    if text is None:
        return None
    parts = [part.strip() for part in text.split(between) if part.strip()]
    if not parts:
        raise UserError(f'{option} "{text}" names nothing')
    return parts


def _list() -> None:
    from harness.report.text_table import aligned
    from harness.study import load as studies

    rows = [("study", "layout", "conditions", "systems", "after")]
    for name in studies.names():
        one = studies.study(name)
        rows.append((name, one.layout, str(len(one.condition)), str(len(one.systems)), one.paper))
    click.echo("\n".join(aligned(rows)))


def _print(measured: Measured, markdown: bool) -> None:
    from harness.study import text

    shown = text.Shown(measured.table, measured.about, measured.folder, markdown)
    click.echo("\n".join([*text.lines(shown), *(f"{name}: {why}" for name, why in measured.failed.items())]))


def dry(asked: Study, full: bool, out: Path) -> None:
    """Show what would be run and how long it may take."""
    from harness.report.text_table import aligned
    from harness.run import sweep
    from harness.run.setup import Failed
    from harness.study import grid
    from harness.study.bases import TUNING_SEEDS

    known, total, runs, failed = sweep.speeds(out), 0.0, 0, dict[str, str]()
    rows = [("condition", "system", "gpus", "along", "x", "runs", "seconds")]
    left, seeds = asked.of(full), asked.scope(full).seeds
    rules = dict[str, None]()
    for panel in grid.panels(left, full):
        rules |= dict.fromkeys(grid.rules(left, panel).values())
        sample = grid.Grid(left, full, (panel,)).sample(panel)
        for name, spec in panel.specs.items():
            try:
                cost = _cost(panel, spec, sample, known)
            except Failed as why:
                failed |= why.why
                continue
            number, spent = seeds * cost.points, seeds * cost.seconds
            runs, total = runs + number, total + spent
            most = "<= " * cost.searched
            rows.append((panel.key, name, str(cost.gpus), panel.axis, cost.xs, f"{most}{number}", f"{spent:.1f}"))
    shown = [column for column in zip(*rows, strict=True) if any(column[1:])]
    click.echo("\n".join(aligned(zip(*shown, strict=True))))
    for rule in rules:
        base = f": {len(TUNING_SEEDS)} base runs unless they are stored" if "P95" in rule else ""
        click.echo(f"SLO {rule}{base}")
    how = f"speeds of stored runs in {short_path(out)}" if known else f"{sweep.REQUESTS_PER_S:,.0f} requests/s"
    click.echo(f"{runs} runs, about {total:.0f} s on one core ({how}); stored runs that are current cost nothing")
    if failed:
        click.echo("".join(f"{name}: {why}\n" for name, why in failed.items()), nl=False)
        sys.exit(2)


class _Cost(NamedTuple):
    """What a curve takes for one seed."""

    gpus: int
    xs: str
    points: int
    searched: bool  # `points` is the most
    seconds: float


def _cost(panel: Panel, spec: Spec, sample: Sample, known: Mapping[str, float]) -> _Cost:
    from dataclasses import replace

    from harness.run import sweep
    from harness.run.resolve import resolve

    xs = panel.xs or tuple(2.0**k for k in range(7))  # the octaves of a search for the knee
    ready = resolve(replace(spec, slo=""))
    each = [sweep.estimate_s(replace(ready, rate_scale=_rate_scale(panel, spec, x)), known) for x in xs]
    searched = sample.rule in {"bisect", "bracket"} or not panel.xs
    points = max(len(xs), sample.points) if panel.xs else 2 * len(xs)
    text = ",".join(f"{x:g}" for x in panel.xs) + ", then bisected" * (sample.rule == "bisect")
    return _Cost(ready.gpus, text if panel.xs else "knee", points, searched, sum(each) * points / len(xs))


def _rate_scale(panel: Panel, spec: Spec, x: float) -> float:
    if spec.scaling == "none":
        return 1.0
    fixed = panel.setting["rate_rps"] / panel.unit_rps if "rate_rps" in panel.setting else spec.rate_scale
    return {"rate_scale": x, "rate_rps": x / panel.unit_rps}.get(panel.axis, fixed)
