"""`bench report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.answers.commands import real, short_path
from harness.cli.options import RESULTS, examples
from harness.cli.values import Target
from harness.policy.types import UserError

if TYPE_CHECKING:
    from harness.answers.page import Picture

FILE = "report.html"
MOST_BYTES = 1_000_000


@click.command(
    epilog=examples("bench report", "bench report results/arena-chat-3f9c01ab", "bench report fig7 -o fig7.html")
)
@click.argument("folder", required=False, metavar="[DIR|STUDY]")
@click.option("-o", "--out", type=Target(), metavar="FILE.html", help="The page.  [default: DIR/report.html]")
def report(*, folder: str | None, out: Path | None) -> None:
    """Write an answer as one HTML page.

    DIR is the folder of a comparison, a study or a size, STUDY the name of a study that was run; without it, the
    newest. The page loads nothing: it opens without a network, on a phone, and prints.
    """
    from dataclasses import replace
    from importlib.metadata import version

    from harness.answers.page import page, paged
    from harness.rows import record

    made = real(_folder(folder))
    path = out or made / FILE
    words = paged(made, version("llm-sharing-bench"))  # before figures, so that damaged results end in one line
    data = page(replace(words, pictures=_pictures(made))).encode()
    if len(data) > MOST_BYTES:
        raise UserError(
            f"{short_path(made)}: its page has {len(data) / 1e6:.1f} MB, more than a page may have: report "
            "fewer conditions (bench study --only)"
        )
    record.write_bytes(path, data)
    click.echo(f"{short_path(path)}: {len(data) / 1000:.0f} kB, opens without network")


def _folder(name: str | None) -> Path:
    """Return the folder of the answer to report.

    `name` is a folder's path, or the name of a study, whose newest answer is taken. Without a name, it is the newest
    answer of all. Raises UserError if there is no such folder, study or answer.
    """
    from harness.policy.fields import meant
    from harness.rows.record import SIZE, SWEEP
    from harness.study import load as studies

    def newest(where: str) -> Path | None:
        stored = [path for kind in (SIZE, SWEEP) for path in RESULTS.glob(f"{where}/{kind}")]
        return max(stored, key=lambda path: path.stat().st_mtime).parent if stored else None

    if name is None:
        if (last := newest("*")) is None:
            raise UserError(f"no answer in {short_path(RESULTS)}: bench compare or bench size makes one")
        return last
    if "\0" in name:
        raise UserError(f"{name!r} is no path")
    for path in (Path(name), RESULTS / name):
        if any((path / kind).is_file() for kind in (SIZE, SWEEP)):
            return path
    if name in studies.names():
        if (of := newest(f"{name}/{name}-*")) is None:
            raise UserError(f"study {name} is not in {short_path(RESULTS)}: bench study {name} makes it")
        return of
    if Path(name).is_dir():
        return Path(name)
    raise UserError(f"{name}: no such folder, and no such study{meant(name, studies.names())}")


def _pictures(folder: Path) -> list[Picture]:
    """Draw the figures of an answer, with their captions as text."""
    from tempfile import TemporaryDirectory

    import plots
    from harness.answers.page import Picture
    from plots import form

    drawn = []
    figures, broken = plots.of(folder)
    for line in broken:
        click.echo(line, err=True)
    with TemporaryDirectory() as name, form.on(form.Form(caption=False, formats=("svg",))):
        for label, figure in figures.items():
            stem = Path(name) / label
            try:
                plots.render(figure, folder, stem, "")
            except UserError as error:  # nothing ran that could be drawn: the tables say so
                click.echo(str(error), err=True)
                continue
            lines = stem.with_suffix(".csv").read_text("utf-8").splitlines()[1:]
            caption = " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))
            drawn.append(Picture(stem.with_suffix(".svg").read_text("utf-8"), caption))
    return drawn
