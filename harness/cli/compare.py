"""`bench compare`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from harness.answers.commands import real, short_path
from harness.cli.codes import Code
from harness.cli.options import (
    DEFINITION,
    ENOUGH,
    FIGURES,
    FIRST_SEEDS,
    MORE,
    MOVED,
    ONCE,
    OUT,
    PARTS,
    RESULTS,
    RUNNING,
    SCALING,
    SEEDS,
    SETTING,
    SLO,
    WORDS,
    Grouped,
    Number,
    complete,
    every_of,
    examples,
    read_rates,
    slo_rule,
    system_names,
)
from harness.cli.parts import collecting, keep_command, make_part
from harness.cli.study import dry, figures
from harness.cli.terminal import prose, room, teller

if TYPE_CHECKING:
    from harness.run.shard import Shard
    from harness.study.measure import Measured
    from harness.study.study import Study
    from harness.study.summary import Summary

FORMS = ("--json", "--csv", "--markdown", "--latex", "--answer")


@click.command(
    cls=Grouped,
    epilog=examples(
        "bench compare --systems dedicated,static,chunked,unshared",
        "bench compare --systems static:equal,static:rate,./mine.py --rate-scale 1,2,4 --seeds 5",
        "bench compare --systems chunked+tau=256,chunked --models light8 --gpu a100-80g --controls",
        "bench compare --systems static,chunked --dry-run",
    ),
)
@click.option(
    "--systems",
    required=True,
    metavar="LIST",
    shell_complete=complete(system_names, many=True),
    help="NAME[:PRESET][+FIELD=VALUE...] (bench list) with commas; a .py file; all.",
)
@SETTING
@click.option(
    "--rate-scale",
    "rates",
    callback=read_rates,
    metavar="LIST",
    help="Rates as multiples of the trace's.  [default: around the knee, found by doubling]",
)
@SCALING
@SLO
@click.option(
    "--definition",
    type=DEFINITION,
    help="Attainment in the headline (bench list definitions).  [default: both; e2e for an SLO by solo latency]",
)
@click.option(
    "--target",
    type=Number(50, 100, min_open=True, max_open=True),
    default=99.0,
    show_default=True,
    metavar="PERCENT",
    help="Attainment at which rates are compared.",
)
@SEEDS
@ENOUGH
@click.option("--controls", is_flag=True, help="Add an A/A copy, dedicated and unshared.")
@click.option("--no-plot", is_flag=True, help="Draw no figure.")
@click.option("--all", "every", is_flag=True, help="Show every column and every rate.")
@click.option("--json", "form", flag_value="json", help="Print the table as JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print the table as CSV.")
@click.option("--markdown", "form", flag_value="markdown", help="Print the table as Markdown.")
@click.option("--latex", "form", flag_value="latex", help="Print the table as LaTeX.")
@click.option("--answer", "form", flag_value="answer", help="Print the first line alone, and draw no figure.")
@click.option("--dry-run", is_flag=True, help="Show the grid and the estimated time; run nothing.")
@PARTS
@MOVED
@RUNNING
@OUT
def compare(
    *, systems: str, settings: dict[str, Any], rates: tuple[float, ...] | None, slo: str | None,
    slo_scale: float | None, definition: str | None, target: float, seeds: int | None, precision: float | None,
    budget: int | None, controls: bool, no_plot: bool, every: bool, form: str | None, dry_run: bool,
    shard: Shard | None, collect: bool, workers: int | None, machine: bool, out: Path | None, **setting: Any,
) -> None:  # fmt: skip
    """Compare systems on a trace: SLOs, latency, highest rate.

    The answer is one screen: attainment, latency, and the rate at which each system still meets its SLOs.
    """
    from harness.answers import comparison as words
    from harness.policy.types import UserError
    from harness.run.setup import load_trace
    from harness.study import sensitivity, shards
    from harness.study.compare import replayed, stem_of, summary
    from harness.study.degrees import widened
    from harness.study.measure import measure

    typed = click.get_current_context().meta.get(WORDS, ())
    if len(given := list(dict.fromkeys(word for word in typed if word in FORMS))) > 1:
        raise UserError(f"{' and '.join(given)}: one form at a time")
    rule = slo_rule(slo, slo_scale, setting["models"])
    folder = real(out or RESULTS)
    fitted, wide = widened({**setting, **settings}, folder)
    if wide:
        click.echo(wide, err=form is not None)
    asked = compared(systems, fitted, rates, seeds, rule, definition, controls)
    asked = replace(asked.only(precision=precision, budget=budget), level=target / 100)
    if dry_run:
        dry(asked, False, folder)
        return
    trace = load_trace(asked.spec["trace"])
    if trace.notice:
        click.echo(trace.notice, err=form is not None)
    (rule,) = asked.definitions
    with teller(machine=machine) as told:
        if shard is not None:
            sys.exit(make_part(asked, shard, folder, workers, told, full=False, stem=stem_of(asked)))
        watch = (lambda measured: told.show(_so_far(measured, rule))) if told.redraws and form is None else None
        with collecting(lambda: shards.progress(asked, folder, stem=stem_of(asked)), on=collect):
            measured = measure(asked, folder, stem=stem_of(asked), workers=workers, teller=told, watch=watch)
    keep_command(measured.folder)
    shown = summary(measured.table, measured.about, rule)
    stem = (FIGURES if out is None else folder) / f"compare-{measured.folder.name.rpartition('-')[2]}"
    plots = not no_plot and form != "answer" and not all(system.infeasible for system in shown.systems)
    part = replayed(measured.reference)
    if form is None:
        _print(measured, shown, rule, stem if plots else None, every)
    elif form == "answer":
        prose(words.answer(measured, shown, rule) or "no system ran")
    elif form == "json":
        click.echo(words.records(shown, replayed=part).json("systems", words.facts(measured, rule)))
    elif form == "csv":
        click.echo(words.records(shown, replayed=part).csv(), nl=False)
    else:
        marked = ["", *shown.marked] * bool(shown.marked)
        table = [*words.whole(shown).markdown("---"), *marked] if form == "markdown" else words.narrow(shown).latex()
        click.echo("\n".join(table))
    sys.stdout.flush()
    if plots:  # the table first: drawing takes longer than all else
        command = f"bench plot {short_path(measured.folder)}"
        figures(measured, "compare", stem, command, sensitivity.sentence_of(measured.folder))
    if form is not None:
        click.echo("".join(f"{line}\n" for line in words.failures(measured.failed)), err=True, nl=False)
    if measured.failed:
        sys.exit(Code.REFUSED)


def compared(
    systems: str,
    setting: Mapping[str, Any],
    rates: tuple[float, ...] | None,
    seeds: int | None,
    rule: str,
    definition: str | None,
    controls: bool,
) -> Study:
    """Build the study that options ask for; `all` stands for every system that is not listed.

    Without a number of seeds it begins with a few, and has a budget for more.
    """
    from harness.policy.types import UserError
    from harness.study.compare import comparison, filled, repeats

    listed = [name.strip() for name in systems.split(",") if name.strip()]
    if not listed:
        raise UserError(f'--systems "{systems}" names no system (bench list)')
    given = {key: value for key, value in setting.items() if value is not None}
    ctx = click.get_current_context(silent=True)
    unsaid = [key for key in ("trace", "gpus") if ctx and ctx.get_parameter_source(key) is ParameterSource.DEFAULT]
    given = filled(given, unsaid)
    once = given.get("scaling") == "none"
    if once and ctx and ctx.get_parameter_source("plan") is ParameterSource.DEFAULT:
        del given["plan"]
    budget = MORE if seeds is None and given.get("engine") == "sim" and not once else 0
    number = seeds or (ONCE if once else FIRST_SEEDS)
    asked = comparison(
        every_of(listed),
        given,
        rates=rates,
        seeds=number,
        rule=rule,
        definition=definition,
        controls=controls,
        budget=budget,
    )
    return asked.only(seeds=1) if once and seeds is None and repeats(asked.spec) else asked


def _so_far(measured: Measured, rule: str) -> list[str]:
    """Return the table of the runs made so far, under a line that says so."""
    from shutil import get_terminal_size

    from harness.answers import comparison
    from harness.study.compare import summary

    shown = summary(measured.table, measured.about, rule)
    of = measured.study.scope(full=False).seeds
    seeds = f"{measured.seeds} of {of} seeds" if measured.seeds < of else f"{of} seeds"
    table = comparison.terminal(shown, bold=False, room=get_terminal_size().columns - 1)
    return [f"so far, {seeds}, {len(measured.about.runs)} runs:", *table]


def _print(measured: Measured, shown: Summary, rule: str, stem: Path | None, every: bool) -> None:
    """Print the answer on one screen."""
    from harness.answers import comparison
    from harness.study import bound, sensitivity

    if sentence := comparison.answer(measured, shown, rule):
        prose(sentence)
    for line in comparison.headline(measured, shown, every=every):
        prose(line)
    lacks, ways = comparison.unfit(measured)
    if shown.systems:
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        click.echo("\n".join(comparison.terminal(shown, bold=bold, room=room(), unfit=lacks, every=every)))
    if above := bound.line(measured.about):
        prose(above)
    for note in comparison.notes(measured, shown, rule):
        prose(note)
    if sentence := sensitivity.sentence_of(measured.folder):
        prose(sentence)
    pdf = f" · {short_path(stem.with_name(stem.name + '.pdf'))}" if stem else ""
    click.echo(short_path(measured.folder) + pdf)
    words = click.get_current_context().meta[WORDS]
    click.echo(f"next: {comparison.next_command(measured, shown, rule, words, ways)}")
