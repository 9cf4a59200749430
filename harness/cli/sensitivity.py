"""`bench sensitivity`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.compare import contestants, silent_of
from harness.cli.options import (
    DEFINITION,
    FIGURES,
    LIMIT,
    OUT,
    RESULTS,
    SCALING,
    SEEDS,
    SETTING,
    SLO,
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
    from harness.study.compare import Entry


@click.command(epilog=examples(
    "bench sensitivity --systems prism,static --rate-scale 5.66 --seeds 3",
    "bench sensitivity --systems prism,static --constants swap,pcie --knee",
    "bench sensitivity --systems prism,static --dry-run",
))  # fmt: skip
@click.option("--systems", required=True, metavar="LIST", shell_complete=complete(system_names, many=True),
              help="As in bench compare; of more than two, the first two by its table.")  # fmt: skip
@SETTING
@click.option("--rate-scale", "rates", callback=read_rates, metavar="LIST",
              help="Rates of the comparison; at the one where the two differ most, constants are varied.  "
              "[default: around the knee]")  # fmt: skip
@SCALING
@SLO
@click.option("--definition", type=DEFINITION, help="Attainment that is compared.  [default: as bench compare]")
@SEEDS
@click.option("--controls", is_flag=True, help="As in bench compare; controls do not contend.")
@click.option("--constants", metavar="LIST", help="Only these: pcie, nvlink, net, disk, swap, co_run, step, process, "
              "reserve, sharing.")  # fmt: skip
@click.option("--knee", is_flag=True,
              help="Compare the rates at which 99 % is met, over all rates, instead of attainment at one.")  # fmt: skip
@click.option("--no-plot", is_flag=True, help="No figure.")
@click.option("--dry-run", is_flag=True, help="Show the constants and the estimated time; run nothing.")
@LIMIT
@WORKERS
@OUT
def sensitivity(
    *,
    systems: str,
    settings: dict[str, Any],
    rates: tuple[float, ...] | None,
    slo: str,
    slo_scale: float | None,
    definition: str | None,
    seeds: int,
    controls: bool,
    constants: str | None,
    knee: bool,
    no_plot: bool,
    dry_run: bool,
    workers: int | None,
    out: Path | None,
    **setting: Any,
) -> None:
    """Halve and double constants of the machine: which of them turns the order of two systems.

    SLOs stay in seconds what they are on the machine as it is. The sentence that comes out is kept beside the
    comparison of the same systems, rates and seeds, and stands under its figure.
    """
    from harness.study import compare as comparison
    from harness.study import sensitivity as sensitivities
    from harness.study import sensitivity_text
    from harness.study.constants import settings as changes_of

    entries = contestants(systems, controls=controls, **{**setting, **settings})
    only = None if constants is None else [name.strip() for name in constants.split(",") if name.strip()]
    folder = (out or RESULTS).resolve()
    if dry_run:
        _dry(entries, only, rates, seeds, knee, folder)
        return
    with Terminal() as teller:
        changes_of([entry.spec for entry in entries], only)  # a mistake shows before anything is run
        base = comparison.compare(entries, folder, rates=rates, seeds=seeds, rule=slo_rule(slo, slo_scale),
                                  definition=definition, workers=workers, teller=teller)  # fmt: skip
        found = sensitivities.sensitivity(base, folder, definition=definition or base.judge.definition,
                                          silent=silent_of(entries), only=only, knee=knee, workers=workers,
                                          teller=teller)  # fmt: skip
    click.echo("\n".join(sensitivity_text.lines(found)))
    sys.stdout.flush()
    shown = [base.folder]
    if not no_plot:
        from plots import fig_tornado

        stem = (FIGURES if out is None else folder) / f"tornado-{base.folder.name.rpartition('-')[2]}"
        shown += fig_tornado.render(base.folder, stem, f"bench sensitivity --systems {systems}")[:2]
    click.echo(" · ".join(short_path(path) for path in shown))


def _dry(
    entries: Sequence[Entry], only: Collection[str] | None, rates: tuple[float, ...] | None, seeds: int, knee: bool,
    out: Path,
) -> None:  # fmt: skip
    """Show what would be varied and how long it may take."""
    from dataclasses import replace

    from harness.report.text_table import aligned
    from harness.run import sweep
    from harness.run.resolve import resolve
    from harness.study.constants import constants, settings

    specs = [entry.spec for entry in entries]
    changes, left = settings(specs, only)
    rows = [("constant", "value", "changes", "what it is")]
    for one in constants(specs):
        said = ", ".join(change.said for change in changes if change.constant == one.name)
        rows.append((one.name, one.value, said or f"none: {left[one.name]}", one.means))
    click.echo("\n".join(aligned(rows)))
    known, asked = sweep.speeds(out), rates or (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    each = {rate: seeds * sum(sweep.estimate_s(replace(resolve(spec), rate_scale=rate), known) for spec in specs)
            for rate in asked}  # fmt: skip
    varied = sum(each.values()) if knee else max(each.values())
    runs = 2 * seeds * (len(asked) if knee else 1) * len(changes)
    base = sum(each.values())
    click.echo(f"{'at most ' if rates is None else ''}{runs} runs under {len(changes)} changes, about "
               f"{varied * len(changes) * 2 / len(specs):.0f} s on one core, after a comparison of about {base:.0f} s; "
               "stored runs that are current cost nothing")  # fmt: skip
