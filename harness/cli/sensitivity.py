"""`bench sensitivity`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.answers.commands import short_path
from harness.answers.table import aligned, printed
from harness.cli import options
from harness.cli.asked import Asked, asks, contest
from harness.cli.study import dry
from harness.cli.terminal import Terminal
from harness.cli.values import listed
from harness.policy.types import UserError

if TYPE_CHECKING:
    from harness.run.spec import Spec
    from harness.study.study import Study


@click.command(
    cls=options.Grouped,
    epilog=options.examples(
        "bench sensitivity --systems prism,static --rate-scale 2.83 --seeds 3",
        "bench sensitivity --systems prism,static --constants swap,pcie",
        "bench sensitivity --systems prism,static --dry-run",
    ),
)
@contest(
    "As in bench compare; of more than two, the first two by its table.",
    "Rates of the comparison; constants vary at the one where the two systems differ most.  [default: around the knee]",
    "Definition of attainment.  [default: as bench compare]",
)
@click.option("--controls", is_flag=True, help="Add controls, as bench compare does; they are not ranked.")
@click.option(
    "--constants",
    metavar="LIST",
    help="Only these: pcie, nvlink, net, disk, swap, co_run, "
    "passes, decode_fill, prompt_tokens, prompts, step, process, reserve, sharing.",
)
@click.option("--no-plot", is_flag=True, help="Draw no figure.")
@click.option("--dry-run", is_flag=True, help="Show the constants and the estimated time; run nothing.")
@options.RUNNING
@options.OUT
@asks
def sensitivity(asked: Asked, *, constants: str | None, no_plot: bool, dry_run: bool) -> None:
    """Find constants of the machine that reverse an order.

    Each constant is halved and doubled, to see if that reverses the order of two systems. SLOs keep the seconds of the
    unchanged machine. The result is kept beside the comparison of the same systems, rates and seeds, and its figure
    repeats it.
    """
    from harness.study.compare import silent, stem_of
    from harness.study.constants import settings as changes_of
    from harness.study.measure import measure
    from harness.study.sensitivity import lines
    from harness.study.varying import sensitivity as vary

    study, only, folder = asked.study(), listed("--constants", constants), asked.folder
    if len(study.systems) < 2:
        raise UserError("an order takes two systems: --systems a,b")
    specs = [study.spec_of(study.condition[0], name) for name in study.systems]
    if dry_run:
        _dry(study, specs, only, folder)
        return
    with Terminal() as progress:
        changes_of(specs, only)  # a mistake shows before anything is run
        run: dict[str, Any] = {"workers": asked.workers, "teller": progress}
        base = measure(study, folder, stem=stem_of(study), **run)
        varied = vary(base, folder, silent=silent(study.systems), only=only, **run)
    click.echo("\n".join(printed(lines(varied))))
    sys.stdout.flush()
    shown = [base.folder]
    if not no_plot:
        from plots import fig_tornado

        stem = asked.figure(f"tornado-{base.folder.name.rpartition('-')[2]}")
        shown += fig_tornado.render(base.folder, stem, f"bench sensitivity --systems {asked.systems}")[:2]
    click.echo(" · ".join(short_path(path) for path in shown))


def _dry(study: Study, specs: Sequence[Spec], only: Collection[str] | None, out: Path) -> None:
    """Show what would be varied and how long the comparison may take."""
    from harness.study.constants import constants, settings

    changes, unchanged = settings(specs, only)
    rows = [("constant", "value", "changes", "what it is")]
    for constant in constants(specs):
        changed = ", ".join(change.setting for change in changes if change.constant == constant.name)
        rows.append((constant.name, constant.value, changed or f"none: {unchanged[constant.name]}", constant.means))
    click.echo("\n".join(aligned(rows)))
    dry(study, False, out)
    click.echo(f"then {len(changes)} changes, each with the runs of two systems at one rate")
