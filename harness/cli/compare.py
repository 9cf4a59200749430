"""`bench compare`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.answers.commands import short_path
from harness.cli import options
from harness.cli.asked import Asked, asks, contest
from harness.cli.codes import Code
from harness.cli.parts import collecting, keep_command, make_part
from harness.cli.study import dry, figures
from harness.cli.terminal import Terminal, prose, room
from harness.cli.values import WORDS
from harness.policy.types import UserError

if TYPE_CHECKING:
    from harness.run.shard import Shard
    from harness.study.measure import Measured
    from harness.study.summary import Summary

FORMS = ("--json", "--csv", "--markdown", "--latex")


@click.command(
    cls=options.Grouped,
    epilog=options.examples(
        "bench compare --systems dedicated,static,chunked,unshared",
        "bench compare --systems static:equal,static:rate,./mine.py --rate-scale 1,2,4 --seeds 5",
        "bench compare --systems chunked+tau=256,chunked --models light8 --gpu a100-80g --controls",
        "bench compare --systems static,chunked --dry-run",
    ),
)
@contest(
    "NAME[:PRESET][+FIELD=VALUE...] (bench list) with commas; a .py file; all.",
    "Rates as multiples of the trace's.  [default: around the knee, found by doubling]",
    "Attainment in the headline (bench list definitions).  [default: both; e2e for an SLO by solo latency]",
)
@options.target("Attainment at which rates are compared.")
@options.ENOUGH
@click.option("--controls", is_flag=True, help="Add an A/A copy, dedicated and unshared.")
@click.option("--no-plot", is_flag=True, help="Draw no figure.")
@click.option("--all", "every", is_flag=True, help="Show every column and every rate.")
@click.option("--json", "form", flag_value="json", help="Print the table as JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print the table as CSV.")
@click.option("--markdown", "form", flag_value="markdown", help="Print the table as Markdown.")
@click.option("--latex", "form", flag_value="latex", help="Print the table as LaTeX.")
@click.option("--dry-run", is_flag=True, help="Show the grid and the estimated time; run nothing.")
@options.PARTS
@options.RUNNING
@options.OUT
@asks
def compare(
    asked: Asked,
    *,
    target: float,
    precision: float | None,
    budget: int | None,
    no_plot: bool,
    every: bool,
    form: str | None,
    dry_run: bool,
    shard: Shard | None,
    collect: bool,
) -> None:
    """Compare systems on a trace: SLOs, latency, highest rate.

    The answer is one screen: attainment, latency, and the rate at which each system still meets its SLOs.
    """
    from harness.answers import notes
    from harness.run.setup import load_trace
    from harness.study import sensitivity, shards
    from harness.study.compare import replayed, stem_of, summary
    from harness.study.degrees import widened
    from harness.study.measure import measure

    typed = click.get_current_context().meta.get(WORDS, ())
    if len(given := list(dict.fromkeys(word for word in typed if word in FORMS))) > 1:
        raise UserError(f"{' and '.join(given)}: one form at a time")
    folder = asked.folder
    fitted, wide = widened(dict(asked.setting), folder)
    if wide:
        click.echo(wide, err=form is not None)
    study = replace(asked.study(fitted).only(precision=precision, budget=budget), level=target / 100)
    if dry_run:
        dry(study, False, folder)
        return
    trace = load_trace(study.spec["trace"])
    if trace.notice:
        click.echo(trace.notice, err=form is not None)
    (rule,) = study.definitions
    with Terminal() as progress:
        if shard is not None:
            sys.exit(make_part(study, shard, folder, asked.workers, progress, full=False, stem=stem_of(study)))
        watch = (lambda measured: progress.show(_so_far(measured, rule))) if progress.redraws and form is None else None
        with collecting(lambda: shards.progress(study, folder, stem=stem_of(study)), on=collect):
            measured = measure(study, folder, stem=stem_of(study), workers=asked.workers, teller=progress, watch=watch)
    keep_command(measured.folder)
    shown = summary(measured.table, measured.about, rule)
    stem = asked.figure(f"compare-{measured.folder.name.rpartition('-')[2]}")
    plots = not no_plot and not all(system.infeasible for system in shown.systems)
    part = replayed(measured.reference)
    if form is None:
        _print(measured, shown, rule, stem if plots else None, every)
    else:
        _print_form(form, measured, shown, rule, part)
    sys.stdout.flush()
    if plots:  # the table first: drawing takes longer than all else
        command = f"bench plot {short_path(measured.folder)}"
        figures(measured, "compare", stem, command, sensitivity.sentence_of(measured.folder))
    if form is not None:
        click.echo("".join(f"{line}\n" for line in notes.failures(measured.failed)), err=True, nl=False)
    if measured.failed:
        sys.exit(Code.REFUSED)


def _so_far(measured: Measured, rule: str) -> list[str]:
    """Return a line with the numbers of seeds and runs so far, and the lines of the table of these runs."""
    from shutil import get_terminal_size

    from harness.answers import comparison
    from harness.study.compare import summary

    shown = summary(measured.table, measured.about, rule)
    of = measured.study.scope(full=False).seeds
    seeds = f"{measured.about.seeds} of {of} seeds" if measured.about.seeds < of else f"{of} seeds"
    table = comparison.terminal(shown, bold=False, room=get_terminal_size().columns - 1)
    return [f"so far, {seeds}, {len(measured.about.runs)} runs:", *table]


def _print_form(form: str, measured: Measured, shown: Summary, rule: str, part: str) -> None:
    """Print the answer in a form that the user chose; `part` is the part of the trace that was replayed."""
    from harness.answers import comparison, notes

    match form:
        case "json":
            click.echo(comparison.records(shown, replayed=part).json("systems", notes.facts(measured, rule)))
        case "csv":
            click.echo(comparison.records(shown, replayed=part).csv(), nl=False)
        case "markdown":
            click.echo("\n".join([*comparison.whole(shown).markdown("---"), *["", *shown.marked] * bool(shown.marked)]))
        case "latex":
            click.echo("\n".join(comparison.narrow(shown).latex()))


def _print(measured: Measured, shown: Summary, rule: str, stem: Path | None, every: bool) -> None:
    """Print the answer on one screen."""
    from harness.answers import comparison, notes
    from harness.study import sensitivity

    if sentence := comparison.answer(measured, shown, rule):
        prose(sentence)
    for line in comparison.headline(measured, shown, every=every):
        prose(line)
    lacks, ways = notes.unfit(measured)
    if shown.systems:
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        click.echo("\n".join(comparison.terminal(shown, bold=bold, room=room(), unfit=lacks, every=every)))
    for note in notes.notes(measured, shown, rule, every=every):
        prose(note)
    if sentence := sensitivity.sentence_of(measured.folder):
        prose(sentence)
    pdf = f" · {short_path(stem.with_name(stem.name + '.pdf'))}" if stem else ""
    click.echo(short_path(measured.folder) + pdf)
    words = click.get_current_context().meta[WORDS]
    click.echo(f"next: {comparison.next_command(measured, shown, rule, words, ways)}")
