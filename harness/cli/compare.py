"""`bench compare`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import (
    DEFINITION,
    FIGURES,
    LIMIT,
    MOVED,
    OUT,
    RESULTS,
    SCALING,
    SEEDS,
    SETTING,
    SLO,
    WORDS,
    WORKERS,
    complete,
    examples,
    read_rates,
    slo_rule,
    system_names,
)  # fmt: skip
from harness.cli.terminal import Terminal
from harness.report.commands import short_path

if TYPE_CHECKING:
    from harness.report.summary import Summary
    from harness.study.compare import Compared, Entry

ALL = "all"
ROOM = 120  # characters of a line where the width of the terminal is not known


@click.command(epilog=examples(
    "bench compare --systems dedicated,static,chunked,ideal",
    "bench compare --systems static:equal,static:rate,./mine.py --rate-scale 1,2,4 --seeds 5",
    "bench compare --systems chunked+tau=256,chunked --models light8 --gpu a100-80g --controls",
    "bench compare --systems static,chunked --dry-run",
))  # fmt: skip
@click.option("--systems", required=True, metavar="LIST", shell_complete=complete(system_names, many=True),
              help="NAME[:PRESET][+FIELD=VALUE...],... paths of .py files (bench list), all.")  # fmt: skip
@SETTING
@click.option("--rate-scale", "rates", callback=read_rates, metavar="LIST",
              help="Rates as multiples of the trace's.  [default: around the knee, found by doubling]")  # fmt: skip
@SCALING
@SLO
@click.option("--definition", type=DEFINITION,
              help="Attainment in the headline (bench list definitions).  "
              "[default: both; e2e for an SLO by solo latency]")  # fmt: skip
@SEEDS
@click.option("--controls", is_flag=True, help="Add an A/A copy, dedicated and ideal.")
@click.option("--no-plot", is_flag=True, help="No figure.")
@click.option("--json", "form", flag_value="json", help="The table as JSON ...")
@click.option("--csv", "form", flag_value="csv", help="... as CSV ...")
@click.option("--markdown", "form", flag_value="markdown", help="... as Markdown ...")
@click.option("--latex", "form", flag_value="latex", help="... or as LaTeX.")
@click.option("--dry-run", is_flag=True, help="Show the grid and the estimated time; run nothing.")
@MOVED
@LIMIT
@WORKERS
@OUT
def compare(
    *,
    systems: str,
    settings: dict[str, Any],
    rates: tuple[float, ...] | None,
    slo: str,
    slo_scale: float | None,
    definition: str | None,
    seeds: int,
    controls: bool,
    no_plot: bool,
    form: str | None,
    dry_run: bool,
    workers: int | None,
    out: Path | None,
    **setting: Any,
) -> None:
    """Compare systems on a trace: attainment, latency, and the rate at which each still meets its SLOs."""
    from harness.report import formats
    from harness.report.summary import summarize
    from harness.run.setup import load_trace
    from harness.study import compare as comparison
    from harness.study import sensitivity_text, sentences
    from harness.study.rates import LEVEL

    entries = contestants(systems, controls=controls, **{**setting, **settings})
    folder = (out or RESULTS).resolve()
    asked = slo_rule(slo, slo_scale)
    if dry_run:
        _dry(entries, rates, seeds, asked, folder)
        return
    notice = load_trace(entries[0].spec.trace).notice
    if notice:
        click.echo(notice, err=form is not None)
    with Terminal() as teller:
        found = comparison.compare(entries, folder, rates=rates, seeds=seeds, rule=asked, definition=definition,
                              workers=workers, teller=teller)  # fmt: skip
    silent = silent_of(entries)
    rule = definition or found.judge.definition
    shown = summarize(found.table, [e.label for e in entries], rule, LEVEL, controls=silent)
    stem = (FIGURES if out is None else folder) / f"compare-{found.folder.name.rpartition('-')[2]}"
    plots = bool(not no_plot and shown.systems)
    if form is None:
        _print(found, shown, rule, stem if plots else None)
    elif form == "json":
        click.echo(formats.as_json(shown, sentences.facts(found, rule)))
    elif form == "csv":
        click.echo(formats.as_csv(shown), nl=False)
    else:
        click.echo("\n".join((formats.markdown if form == "markdown" else formats.latex)(shown)))
    sys.stdout.flush()
    if plots:  # the table first: drawing takes longer than all else
        from plots import fig_compare

        said = sensitivity_text.kept(found.folder)
        fig_compare.render(found.folder, stem, f"bench plot {short_path(found.folder)}", said)
    if form is not None:
        click.echo("".join(f"{line}\n" for line in sentences.failures(found.failed)), err=True, nl=False)
    if found.failed:
        sys.exit(2)


def contestants(systems: str, *, controls: bool, **common: Any) -> list[Entry]:
    """Contestants as `--systems` and `--controls` ask for them; `all` is every system that is not listed."""
    from harness.study.compare import CONTROLS

    listed = [name.strip() for name in systems.split(",") if name.strip()]
    others = [name for name in system_names() if name not in listed]
    names = [name for text in listed for name in (others if text == ALL else [text])]
    if not controls:
        return _entries(names, **common)
    entries = _entries([*names, *(name for name in CONTROLS if name not in names)], **common)
    return [*entries, _copy(entries)]


def silent_of(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Labels that contend for nothing: controls, and the copies of A/A."""
    from harness.study.compare import AA, CONTROLS

    return (*CONTROLS, *(entry.label for entry in entries if entry.label.endswith(AA)))


def _entries(systems: Sequence[str], **common: Any) -> list[Entry]:
    """Contestants as asked: NAME[:PRESET][+FIELD=VALUE...], by name or path."""
    from harness.policy.types import UserError
    from harness.run.spec import asked, from_dict
    from harness.study.compare import Entry

    settings = {key: value for key, value in common.items() if value is not None}
    found = []
    for text in systems:
        spec = from_dict({**settings, **asked(text)})
        found.append(Entry(spec.label, spec))
    labels = [entry.label for entry in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f'system "{twice}" is listed twice')
    return found


def _copy(entries: Sequence[Entry]) -> Entry:
    """The A/A copy of the first contestant: the same spec, on seeds of its own."""
    from dataclasses import replace

    from harness.study.compare import AA, AA_SEED, CONTROLS, Entry

    label, spec = next((e for e in entries if e.label not in CONTROLS), entries[0])
    return Entry(label + AA, replace(spec, seed=spec.seed + AA_SEED))


def _dry(entries: Sequence[Entry], rates: tuple[float, ...] | None, seeds: int, rule: str, out: Path) -> None:
    """Show what would be run and how long it may take."""
    from dataclasses import replace

    from harness.report.text_table import aligned
    from harness.run import sweep
    from harness.run.resolve import resolve
    from harness.run.setup import Failed
    from harness.study import sentences
    from harness.study.bases import TUNING_SEEDS
    from harness.study.rates import LOW, TOP

    known = sweep.speeds(out)
    if entries[0].spec.scaling == "none":
        rates = rates or (1.0,)
    asked = rates or (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    lines = [("system", "gpus", "rate scales", "seeds", "runs", "seconds")]
    total, failed = 0.0, dict[str, str]()
    for label, spec in entries:
        try:
            spec = resolve(spec)
        except Failed as why:
            failed |= why.why
            continue
        spent = seeds * sum(sweep.estimate_s(replace(spec, rate_scale=rate), known) for rate in asked)
        total += spent
        words = ",".join(f"{rate:g}" for rate in asked) if rates else "knee"
        count = str(seeds * len(asked)) if rates else f"<= {seeds * 2 * len(asked)}"
        lines.append((label, str(spec.gpus), words, str(seeds), count, f"{spent:.1f}"))
    click.echo("\n".join(aligned(lines)))
    if rates is None:
        click.echo(f"knee: doubled from 1 until all are below {100 * LOW:g} %, at most to {TOP:g}; then >= 6 rates")
    base = f": {len(TUNING_SEEDS)} base runs unless they are stored" if "P95" in rule else ""
    click.echo(f"SLO {rule}{base}")
    from_ = f"speeds of stored runs in {short_path(out)}" if known else f"{sweep.REQUESTS_PER_S:,.0f} requests/s"
    click.echo(f"about {total:.0f} s on one core ({from_}); stored runs that are current cost nothing")
    if failed:
        click.echo("\n".join(sentences.failures(failed)))
        sys.exit(2)


def _print(found: Compared, shown: Summary, rule: str, stem: Path | None) -> None:
    """The answer on one screen."""
    from harness.report import formats
    from harness.study import sensitivity_text, sentences

    for line in sentences.headline(found, shown):
        click.echo(line)
    tty = sys.stdout.isatty()
    room = ROOM
    if tty:
        import shutil

        room = shutil.get_terminal_size().columns
    if shown.systems:
        click.echo("\n".join(formats.terminal(shown, bold=tty and not os.environ.get("NO_COLOR"), room=room)))
    for note in sentences.notes(found, shown, rule):
        click.echo(note)
    if said := sensitivity_text.kept(found.folder):
        click.echo(said)
    pdf = f" · {short_path(stem.with_name(stem.name + '.pdf'))}" if stem else ""
    click.echo(short_path(found.folder) + pdf)
    click.echo(f"next: {sentences.next_command(found, shown, rule, click.get_current_context().meta[WORDS])}")
