"""`bench reproduce`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.cli.options import (
    FIGURES,
    LIMIT,
    RESULTS,
    WORKERS,
    complete,
    examples,
    stems,
    system_names,
    trace_names,
)  # fmt: skip
from harness.cli.terminal import Terminal
from harness.report.commands import short_path


def _figures() -> list[str]:
    return stems("harness/study/figures")


def _listed(text: str | None) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else None


@click.command(epilog=examples(
    "bench reproduce fig7",
    "bench reproduce fig7 --full",
    "bench reproduce fig7 --systems prism,static --traces arena-chat --models heavy8",
))  # fmt: skip
@click.argument("figure", shell_complete=complete(_figures), metavar="NAME|FILE.toml")
@click.option("--full", is_flag=True, help="More rows, rates, SLO scales and seeds.")
@click.option("--systems", metavar="LIST", shell_complete=complete(system_names, many=True),
              help="Instead of the figure's; the first one sets the rate of other rows.")  # fmt: skip
@click.option("--traces", metavar="LIST", shell_complete=complete(trace_names, many=True),
              help="Instead of the figure's.")  # fmt: skip
@click.option("--models", metavar="LIST", help="Only the rows' model sets that are listed.")
@click.option("--seeds", type=click.IntRange(1), metavar="N", help="Runs of each point, instead of the figure's.")
@click.option("--engine", default="sim", show_default=True, metavar="NAME", help="Where time passes; what of the "
              "figure it cannot run is listed with its reason.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Of --engine: how many there are.")  # fmt: skip
@click.option("--table", metavar="FILE", help="Of --engine: its cost table (bench calibrate writes one).")
@click.option("--no-plot", is_flag=True, help="No figure.")
@LIMIT
@WORKERS
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Where runs (and then the figure) go.  [default: results/NAME]")  # fmt: skip
def reproduce(
    *,
    figure: str,
    full: bool,
    systems: str | None,
    traces: str | None,
    models: str | None,
    seeds: int | None,
    engine: str,
    gpus: int,
    table: str | None,
    no_plot: bool,
    workers: int | None,
    out: Path | None,
) -> None:
    """Run a paper's figure again, and put what comes out beside what the paper says."""
    from harness.study import figure as figures
    from harness.study import figure_text
    from harness.study import reproduce as again
    from harness.study.sentences import failures

    asked = figures.figure(figure).only(_listed(systems), _listed(traces), _listed(models), seeds)
    if engine != "sim":
        from harness.study import on_servers

        asked, notes = on_servers.part(asked, engine, table, gpus)
        click.echo("\n".join(notes))
    folder = (out or RESULTS / asked.name).resolve()
    with Terminal() as teller:
        found = again.reproduce(asked, folder, full=full, workers=workers, teller=teller)
    left = 0 if full else len(asked.claims) - len(asked.of(full).claims)
    later = [f"{left} claims are of rows that only --full runs"] * bool(left)
    click.echo("\n".join([*figure_text.lines(found), *later, *failures(found.failed)]))
    sys.stdout.flush()
    if not no_plot:
        from plots import fig_paper

        stem = (FIGURES if out is None else folder) / asked.name
        paths = fig_paper.render(found.folder, stem, f"bench plot {short_path(found.folder)}")
        click.echo(" · ".join(short_path(path) for path in (found.folder, *paths[:2])))
    if found.failed:
        sys.exit(2)
