"""`bench bridge` and `bench regimes`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import FIGURES, LIMIT, RESULTS, WORKERS, complete, examples, grouped, stems, trace_names
from harness.cli.terminal import Terminal
from harness.report.commands import short_path

if TYPE_CHECKING:
    from harness.study.conditions import Kind


def _named(folder: str) -> Callable[..., list[str]]:
    return complete(lambda: stems(f"harness/study/{folder}"))


SHARED = grouped(
    click.option("--seeds", type=click.IntRange(1), metavar="N", help="Runs of each point, instead of the file's."),
    click.option("--markdown", is_flag=True, help="Print the table as Markdown."),
    click.option("--no-plot", is_flag=True, help="No figure."),
    LIMIT,
    WORKERS,
    click.option("-o", "--out", type=click.Path(path_type=Path), metavar="DIR",
                 help="Where runs (and then the figure) go.  [default: results/]"),
)  # fmt: skip


@click.command(epilog=examples(
    "bench bridge prism",
    'bench bridge prism --only "plans know the window; no MPS" --seeds 2',
    "bench bridge prism --models light8 --trace arena-chat",
))  # fmt: skip
@click.argument("name", shell_complete=_named("bridges"), metavar="NAME|FILE.toml")
@click.option("--only", metavar="LIST", help="Only these steps, separated by semicolons.")
@click.option("--trace", metavar="NAME", shell_complete=complete(trace_names), help="Instead of the file's.")
@click.option("--models", metavar="SET", help="Instead of the file's.")
@SHARED
def bridge(*, name: str, only: str | None, trace: str | None, models: str | None, **shared: Any) -> None:
    """Walk from a fair default to a paper's setting: the ratios after each assumption, and after each alone."""
    _measured("bridge", name, only, {"trace": trace, "models": models}, **shared)


@click.command(epilog=examples(
    "bench regimes prism",
    'bench regimes prism --only "herds; drift" --seeds 2',
))  # fmt: skip
@click.argument("name", shell_complete=_named("regimes"), metavar="NAME|FILE.toml")
@click.option("--only", metavar="LIST", help="Only these regimes, separated by semicolons.")
@SHARED
def regimes(*, name: str, only: str | None, **shared: Any) -> None:
    """Show where sharing pays and where it does not: ratios of rates under several conditions."""
    _measured("regimes", name, only, {}, **shared)


def _measured(
    kind: Kind, name: str, only: str | None, spec: dict[str, str | None], *, seeds: int | None, markdown: bool,
    no_plot: bool, workers: int | None, out: Path | None,
) -> None:  # fmt: skip
    """Run a study, print its table, and draw it."""
    from harness.study import conditions, ratios, ratios_text

    parts = None if only is None else [part.strip() for part in only.split(";") if part.strip()]
    changed = {key: value for key, value in spec.items() if value is not None}
    study = conditions.study(kind, name).only(parts, seeds, **changed)
    with Terminal() as teller:
        found = ratios.measure(study, (out or RESULTS).resolve(), workers=workers, teller=teller)
    click.echo("\n".join((ratios_text.markdown if markdown else ratios_text.lines)(found)))
    sys.stdout.flush()
    if not no_plot:
        from plots import fig_bridge, fig_regimes

        stem = (FIGURES if out is None else out) / f"{kind}-{study.name}"
        draw = fig_bridge if kind == "bridge" else fig_regimes
        paths = draw.render(found.folder, stem, f"bench {kind} {name}")
        click.echo(" · ".join(short_path(path) for path in (found.folder, *paths)), err=markdown)
