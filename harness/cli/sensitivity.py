"""`bench sensitivity`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.answers.commands import real, short_path
from harness.answers.table import aligned, printed
from harness.cli.compare import compared
from harness.cli.options import (
    DEFINITION,
    FIGURES,
    OUT,
    RESULTS,
    RUNNING,
    SCALING,
    SEEDS,
    SETTING,
    SLO,
    Grouped,
    complete,
    examples,
    listed,
    read_rates,
    slo_rule,
    system_names,
)
from harness.cli.study import dry
from harness.cli.terminal import teller

if TYPE_CHECKING:
    from harness.run.spec import Spec
    from harness.study.study import Study


@click.command(
    cls=Grouped,
    epilog=examples(
        "bench sensitivity --systems prism,static --rate-scale 2.83 --seeds 3",
        "bench sensitivity --systems prism,static --constants swap,pcie --knee",
        "bench sensitivity --systems prism,static --dry-run",
    ),
)
@click.option(
    "--systems",
    required=True,
    metavar="LIST",
    shell_complete=complete(system_names, many=True),
    help="As in bench compare; of more than two, the first two by its table.",
)
@SETTING
@click.option(
    "--rate-scale",
    "rates",
    callback=read_rates,
    metavar="LIST",
    help="Rates of the comparison; constants vary at the one where the two systems differ most.  "
    "[default: around the knee]",
)
@SCALING
@SLO
@click.option("--definition", type=DEFINITION, help="Definition of attainment.  [default: as bench compare]")
@SEEDS
@click.option("--controls", is_flag=True, help="Add controls, as bench compare does; they are not ranked.")
@click.option(
    "--constants",
    metavar="LIST",
    help="Only these: pcie, nvlink, net, disk, swap, co_run, "
    "passes, decode_fill, prompt_tokens, prompts, step, process, reserve, sharing.",
)
@click.option(
    "--knee", is_flag=True, help="Compare the rates at which 99 % is met, over all rates, instead of attainment at one."
)
@click.option("--no-plot", is_flag=True, help="Draw no figure.")
@click.option("--dry-run", is_flag=True, help="Show the constants and the estimated time; run nothing.")
@RUNNING
@OUT
def sensitivity(
    *, systems: str, settings: dict[str, Any], rates: tuple[float, ...] | None, slo: str | None,
    slo_scale: float | None, definition: str | None, seeds: int | None, controls: bool, constants: str | None,
    knee: bool, no_plot: bool, dry_run: bool, workers: int | None, machine: bool, out: Path | None, **setting: Any,
) -> None:  # fmt: skip
    """Find constants of the machine that reverse an order.

    Each constant is halved and doubled, to see if that reverses the order of two systems. SLOs keep the seconds of the
    unchanged machine. The result is kept beside the comparison of the same systems, rates and seeds, and its figure
    repeats it.
    """
    from harness.policy.types import UserError
    from harness.study.compare import silent, stem_of
    from harness.study.constants import settings as changes_of
    from harness.study.measure import measure
    from harness.study.sensitivity import lines
    from harness.study.varying import sensitivity as vary

    rule = slo_rule(slo, slo_scale, setting["models"])
    asked = compared(systems, {**setting, **settings}, rates, seeds, rule, definition, controls)
    only = listed("--constants", constants)
    if len(asked.systems) < 2:
        raise UserError("an order takes two systems: --systems a,b")
    folder = real(out or RESULTS)
    specs = [asked.spec_of(asked.condition[0], name) for name in asked.systems]
    if dry_run:
        _dry(asked, specs, only, folder)
        return
    with teller(machine=machine) as told:
        changes_of(specs, only)  # a mistake shows before anything is run
        base = measure(asked, folder, stem=stem_of(asked), workers=workers, teller=told)
        varied = vary(base, folder, silent=silent(asked.systems), only=only, knee=knee, workers=workers, teller=told)
    click.echo("\n".join(printed(lines(varied))))
    sys.stdout.flush()
    shown = [base.folder]
    if not no_plot:
        from plots import fig_tornado

        stem = (FIGURES if out is None else folder) / f"tornado-{base.folder.name.rpartition('-')[2]}"
        shown += fig_tornado.render(base.folder, stem, f"bench sensitivity --systems {systems}")[:2]
    click.echo(" · ".join(short_path(path) for path in shown))


def _dry(asked: Study, specs: Sequence[Spec], only: Collection[str] | None, out: Path) -> None:
    """Show what would be varied and how long the comparison may take."""
    from harness.study.constants import constants, settings

    changes, left = settings(specs, only)
    rows = [("constant", "value", "changes", "what it is")]
    for constant in constants(specs):
        changed = ", ".join(change.setting for change in changes if change.constant == constant.name)
        rows.append((constant.name, constant.value, changed or f"none: {left[constant.name]}", constant.means))
    click.echo("\n".join(aligned(rows)))
    dry(asked, False, out)
    click.echo(f"then {len(changes)} changes, each with the runs of two systems at one rate (--knee: at all)")
