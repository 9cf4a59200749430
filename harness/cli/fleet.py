"""`bench fleet` and `bench ablate`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.cli.options import FIGURES, LIMIT, RESULTS, WORKERS, complete, examples, stems
from harness.cli.terminal import Terminal
from harness.report.commands import short_path

SEEDS = click.option("--seeds", type=click.IntRange(1), metavar="N", help="Runs of each point, instead of the file's.")
MARKDOWN = click.option("--markdown", is_flag=True, help="The tables as Markdown.")
OUT = click.option("-o", "--out", type=click.Path(path_type=Path), metavar="DIR",
                   help="Where runs (and then the figure) go.  [default: results/NAME]")  # fmt: skip


def _fleets() -> list[str]:
    return stems("harness/study/fleets")


def _ablations() -> list[str]:
    return stems("harness/study/ablations")


@click.command(epilog=examples("bench fleet fig12", "bench fleet fig12 --seeds 10 --markdown"))
@click.argument("name", shell_complete=complete(_fleets), metavar="NAME|FILE.toml")
@SEEDS
@MARKDOWN
@click.option("--no-plot", is_flag=True, help="No figure.")
@LIMIT
@WORKERS
@OUT
def fleet(
    *, name: str, seeds: int | None, markdown: bool, no_plot: bool, workers: int | None, out: Path | None
) -> None:
    """Find the fewest GPUs on which each system reaches a level of attainment, by bracketing."""
    from dataclasses import replace

    from harness.study import fewest, fewest_text
    from harness.study.sentences import failures

    asked = fewest.fleet(name)
    asked = replace(asked, seeds=seeds or asked.seeds)
    folder = (out or RESULTS / asked.name).resolve()
    with Terminal() as teller:
        found = fewest.fewest(asked, folder, workers=workers, teller=teller)
    click.echo("\n".join([*fewest_text.lines(found, markdown=markdown), *failures(found.failed)]))
    sys.stdout.flush()
    if not no_plot:
        from plots import fig_fleet

        stem = (FIGURES if out is None else folder) / asked.name
        paths = fig_fleet.render(found.folder, stem, f"bench plot {short_path(found.folder)}")
        click.echo(" · ".join(short_path(path) for path in (found.folder, *paths[:2])), err=markdown)
    if found.failed:
        sys.exit(2)


@click.command(epilog=examples("bench ablate prism", "bench ablate prism --seeds 10 --markdown"))
@click.argument("name", shell_complete=complete(_ablations), metavar="NAME|FILE.toml")
@SEEDS
@MARKDOWN
@LIMIT
@WORKERS
@OUT
def ablate(*, name: str, seeds: int | None, markdown: bool, workers: int | None, out: Path | None) -> None:
    """Switch parts of a system off one at a time: what each adds to attainment, beside what the paper says."""
    from dataclasses import replace

    from harness.study import ablation
    from harness.study.sentences import failures

    asked = ablation.ablation(name)
    asked = replace(asked, seeds=seeds or asked.seeds)
    folder = (out or RESULTS / f"ablate-{asked.name}").resolve()
    with Terminal() as teller:
        found = ablation.ablate(asked, folder, workers=workers, teller=teller)
    click.echo("\n".join([*ablation.lines(found, markdown=markdown), *failures(found.failed)]))
    if found.failed:
        sys.exit(2)
