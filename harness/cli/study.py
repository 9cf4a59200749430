"""`bench study`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from harness.answers.commands import real, short_path
from harness.answers.table import aligned
from harness.cli import options
from harness.cli.codes import Code
from harness.cli.options import FIGURES, RESULTS, Grouped, complete, examples, study_names, trace_names
from harness.cli.parts import collecting, keep_command, make_part, status
from harness.cli.terminal import Terminal
from harness.cli.values import PATH, SOME_SEEDS, listed
from harness.policy.types import UserError

if TYPE_CHECKING:
    from harness.run.estimates import Costs
    from harness.run.realtime import Span
    from harness.run.shard import Shard
    from harness.run.spec import Spec
    from harness.study.bases import Ahead
    from harness.study.grid import Panel
    from harness.study.measure import Measured
    from harness.study.study import Sample, Study


@click.command(
    cls=Grouped,
    epilog=examples(
        "bench study",
        "bench study fig7",
        "bench study fig7 --systems prism,static --traces arena-chat --models heavy8",
        'bench study prism-bridge --only "assignment; equal pools" --seeds 2',
        "bench study ./mine.toml --dry-run",
        "bench study fig7 --shard 3/16",
        "bench study fig7 --status results/fig7",
    ),
)
@click.argument("name", required=False, metavar="[NAME|FILE.toml]", shell_complete=complete(study_names))
@click.option("--only", metavar="LIST", help="Only these conditions, separated by semicolons.")
@click.option("--full", is_flag=True, help="More conditions, points and seeds.")
@click.option("--seeds", type=SOME_SEEDS, metavar="N", help="Seeds of each point, instead of the study's.")
@options.ENOUGH
@options.systems("Systems, instead of the study's; the first is the one under study.")
@click.option(
    "--traces", metavar="LIST", shell_complete=complete(trace_names, many=True), help="Traces, instead of the study's."
)
@click.option("--models", metavar="LIST", help="Only these of the study's model sets, or another set for its only one.")
@click.option(
    "--engine",
    default="sim",
    show_default=True,
    metavar="NAME",
    help="Simulator or real servers (bench list engines); reports the runs it lacks.",
)
@options.count("--gpus", "Number of GPUs of --engine or --table.  [default: 1 of an engine]", most=4096)
@click.option(
    "--table",
    metavar="FILE",
    help="Cost table of --engine, or of another machine to simulate (bench calibrate writes one).",
)
@click.option("--dry-run", is_flag=True, help="Show the points and their cost; run nothing.")
@options.PARTS
@click.option(
    "--status",
    "looked_at",
    type=PATH,
    metavar="FOLDER",
    help="Run nothing: show how far the study is whose runs are in this folder.",
)
@click.option("--no-plot", is_flag=True, help="Draw no figure.")
@click.option("--all", "every", is_flag=True, help="Print intervals, other definitions and claims too.")
@click.option("--markdown", is_flag=True, help="Print tables as Markdown.")
@click.option("--publish", is_flag=True, help="Write all tables into results/studies, with the code that made them.")
@options.RUNNING
@click.option(
    "-o", "--out", type=PATH, metavar="DIR", help="Folder for runs, and for the figure.  [default: results/NAME]"
)
def study(
    *, name: str | None, only: str | None, full: bool, seeds: int | None, precision: float | None,
    budget: int | None, systems: str | None, traces: str | None, models: str | None, engine: str, gpus: int | None,
    table: str | None, dry_run: bool, shard: Shard | None, collect: bool, looked_at: Path | None, no_plot: bool,
    every: bool, markdown: bool, publish: bool, workers: int | None, out: Path | None,
) -> None:  # fmt: skip
    """Run a study: a paper's figure, or your own TOML file.

    Systems are run under conditions, beside what papers say. Without a name, list the studies that come with the bench.
    """
    from harness.study import load as studies
    from harness.study import shards
    from harness.study.measure import measure

    if name is None:
        from harness.cli import lists

        click.get_current_context().invoke(lists.studies)
        return
    narrowed = (
        listed("--only", only, ";"),
        listed("--systems", systems),
        listed("--traces", traces),
        listed("--models", models),
        seeds,
        precision,
        budget,
    )
    chosen = studies.study(name).only(*narrowed)
    if publish and (name not in studies.names() or engine != "sim" or any(x is not None for x in (*narrowed, table))):
        raise UserError("--publish writes the whole table of a study that comes with the bench: name it alone")
    chosen = _part(chosen, engine, table, gpus)
    folder = real(out or RESULTS / chosen.name)
    if dry_run:
        dry(chosen, full, folder)
        return
    if looked_at is not None:
        status(shards.progress(chosen, real(looked_at), full=full))
        return
    with Terminal() as progress:
        if shard is not None:
            sys.exit(make_part(chosen, shard, folder, workers, progress, full=full, stem=""))
        with collecting(lambda: shards.progress(chosen, folder, full=full), on=collect):
            measured = measure(chosen, folder, full=full, workers=workers, teller=progress)
    keep_command(measured.folder)
    if publish:
        from harness.study import published

        path = published.publish(measured, _lines(measured, every=True, markdown=True))
        click.echo(f"table: {short_path(path)}", err=True)
    for line in _lines(measured, every, markdown):
        click.echo(line)
    sys.stdout.flush()
    if not no_plot:
        stem = folder / chosen.name if out is not None else drawn_at(measured.folder)
        paths = figures(measured, _figure(measured), stem, f"bench study {name}")
        click.echo(" · ".join(short_path(path) for path in (measured.folder, *paths)), err=markdown)
    if measured.failed:
        sys.exit(Code.REFUSED)


def _part(chosen: Study, engine: str, table: str | None, gpus: int | None) -> Study:
    """Return the part of a study that an engine, or a table's machine, can run; print why the rest is left out."""
    if engine == "sim" and table is None:
        if gpus is not None:
            raise UserError("--gpus is of --engine or --table: a study says its own")
        return chosen
    from harness.run.spec import MOST_GPUS
    from harness.study.on_engine import part

    on_it, notes = part(chosen, engine, table, gpus or (MOST_GPUS if engine == "sim" else 1))
    for line in notes:
        click.echo(line)
    return on_it


def _figure(measured: Measured) -> str:
    """Return the name of the figure that draws a study.

    It is the study's own name if there is a figure with this name that can draw the study, else "study".
    """
    import plots

    name = measured.study.name
    return name if name in plots.names() and plots.draws(plots.find(name), measured.folder) else "study"


def drawn_at(folder: Path) -> Path:
    """Return the path of a study's figures, without an ending.

    The path has the folder's name, and so its hash. So figures of runs on stand-ins for the traces do not overwrite
    figures of runs on the real traces.
    """
    return FIGURES / folder.name


def figures(measured: Measured, kind: str, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the figures of a study with plots/fig_KIND.py, unless they are up to date; return their paths."""
    from harness.answers import caveats
    from harness.study import receipt

    def draw() -> list[Path]:
        import plots

        return plots.render(plots.find(kind), measured.folder, stem, command, note)

    return receipt.drawn(measured.folder, [str(stem), command, note, *caveats.unchecked_lines(measured.table)], draw)


def _lines(measured: Measured, every: bool, markdown: bool) -> list[str]:
    from harness.answers import text

    shown = text.Shown(measured.table, measured.about, measured.folder, markdown, every)
    return [*text.lines(shown), *(f"{name}: {why}" for name, why in measured.failed.items())]


def dry(asked: Study, full: bool, out: Path) -> None:
    """Show what would be run and how long it may take."""
    from harness.run import estimates, realtime, streams
    from harness.run.setup import Failed
    from harness.study import grid
    from harness.study.bases import TUNING_SEEDS

    known, study = estimates.Costs.of(out), asked.of(full)
    rules: dict[str, Ahead] = {}
    costs, failed = list[_Cost](), dict[str, str]()
    panels = list(grid.panels(study, full))
    for panel in panels:
        aheads = _aheads(study, panel, out)
        rules |= aheads
        drain_s = max((before.drain_s or math.inf for before in aheads.values()), default=math.inf)
        sample = grid.Grid(study, full, (panel,)).sample(panel)
        for name in panel.specs:
            try:
                costs.append(_cost(panel, name, sample, known, drain_s))
            except Failed as why:
                failed |= why.why
    for line in streams.of_all((panel.first for panel in panels), every=True):
        click.echo(line)
    rows = [("condition", "system", "gpus", "along", "x", "runs", "time"), *(cost.row for cost in costs)]
    shown = [column for column in zip(*rows, strict=True) if any(column[1:])]
    click.echo("\n".join(aligned(zip(*shown, strict=True))))
    for rule, before in rules.items():
        base = f": {len(TUNING_SEEDS)} base runs unless they are stored" if "P95" in rule else ""
        click.echo(f"SLO {rule}{base}" + (f", {realtime.duration(before.bases)} of real time" if before.bases else ""))
    how = f"speeds of stored runs in {short_path(out)}" if known else f"{estimates.REQUESTS_PER_S:,.0f} requests/s"
    for line in _totals(costs, how):
        click.echo(line)
    if failed:
        click.echo("".join(f"{name}: {why}\n" for name, why in failed.items()), nl=False)
        sys.exit(Code.REFUSED)


def _aheads(study: Study, panel: Panel, out: Path) -> dict[str, Ahead]:
    """Return the drain time and the base runs of each SLO rule of a panel, by rule.

    Raises UserError for a rule that has no seconds for some model.
    """
    from harness.study import grid
    from harness.study.bases import ahead, check_rule

    here = dict.fromkeys(grid.rule(study, panel, scale) for scale in grid.scales(study, panel))
    for rule, models in product(here, {spec.models for spec in panel.specs.values()}):
        check_rule(rule, models)
    based = replace(panel.first, engine=study.base_engine or panel.first.engine, placement="", homes=())
    return {rule: ahead(based, rule, out) for rule in here}


class _Cost(NamedTuple):
    """Cost of a curve for all its seeds."""

    row: tuple[str, ...]  # its cells in the table
    name: str  # "SYSTEM on ENGINE"
    runs: int
    searched: bool  # whether a search chooses the points, so that `runs` is the most
    seconds: float  # processor seconds
    spans: list[Span]  # spans of its runs in real time
    never: str  # names that the engine lacks, so that it takes no time there; else empty


def _totals(costs: Sequence[_Cost], how: str) -> Iterator[str]:
    """Yield lines on what is not run, and on the time that all other runs take.

    The time of simulated runs is in seconds of one core, and `how` explains this estimate. All other runs take real
    time.
    """
    from harness.run import realtime

    never = {cost.name: cost.never for cost in costs if cost.never}
    yield from (f"{name} is not run: {lacks}" for name, lacks in never.items())
    real = [cost for cost in costs if cost.spans and not cost.never]
    simulated = [cost for cost in costs if not (cost.spans or cost.never)]
    stored = "stored runs that are current cost nothing"
    if real:
        most, all_ = ("up to ", " if all are run") if any(cost.searched for cost in real) else ("", "")
        spans = (span for cost in real for span in cost.spans)
        yield f"{most}{realtime.duration(spans)} of real time{all_}, beside starts of servers; {stored}"
    runs, seconds = sum(cost.runs for cost in simulated), sum(cost.seconds for cost in simulated)
    if runs or not real:
        yield f"{runs} runs, about {seconds:.0f} s on one core ({how}); {stored}"


def _cost(panel: Panel, name: str, sample: Sample, known: Costs, drain_s: float) -> _Cost:
    from harness.run import realtime
    from harness.run.resolve import resolve

    spec, seeds = panel.specs[name], len(panel.seeds)
    xs = panel.xs or tuple(2.0**k for k in range(7))  # the octaves of a search for the knee
    most = max((_rate_scale(panel, spec, x) for x in panel.xs), default=spec.rate_scale)
    cut = {"window_s": panel.window_s, "warmup_s": panel.warmup_s}
    given: dict[str, Any] = {name: seconds for name, seconds in cut.items() if seconds is not None}
    ready = resolve(replace(spec, slo="", rate_scale=most, **given))
    scaled = [replace(ready, rate_scale=_rate_scale(panel, spec, x)) for x in xs]
    costs = [known.cpu_s(run) for run in scaled]
    searched = sample.rule in {"bisect", "bracket"} or not panel.xs
    points = max(len(xs), sample.points) if panel.xs else 2 * len(xs)
    runs, seconds = seeds * points, seeds * (sum(costs) * points / len(xs))
    text = ",".join(f"{x:g}" for x in panel.xs) + ", then bisected" * (sample.rule == "bisect")
    spans = [span for run in scaled if (span := realtime.span(run, drain_s))]
    every, never = seeds * list(islice(cycle(spans), points if spans else 0)), realtime.lacking(ready) if spans else ""
    took = "-" if never else realtime.range_of(every) if every else f"{seconds:.1f} s"
    along = panel.axis, text if panel.xs else "knee"
    row = (panel.key, name, str(ready.gpus), *along, "<= " * searched + str(runs), took)
    return _Cost(row, f"{name} on {spec.engine}", runs, searched, seconds, every, never)


def _rate_scale(panel: Panel, spec: Spec, x: float) -> float:
    if spec.scaling == "none":
        return 1.0
    fixed = panel.setting["rate_rps"] / panel.unit_rps if "rate_rps" in panel.setting else spec.rate_scale
    return {"rate_scale": x, "rate_rps": x / panel.unit_rps}.get(panel.axis, fixed)
