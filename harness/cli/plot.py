"""`bench plot`."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import click

import plots
from harness.answers.commands import again, options_of, real, short_path
from harness.cli.options import FIGURES, RESULTS, examples
from harness.cli.values import PATH, WORDS, Number, listed
from harness.policy.types import UserError

MOST_NAME = 40  # characters of a system's name in a figure


@click.command(
    epilog=examples(
        "bench plot",
        "bench plot results/arena-chat-3f9c01ab -o fig.pdf",
        "bench plot results/aegaeon-3f9c01ab --figure turns  # of a run that was recorded",
        "bench plot results/arena-chat-3f9c01ab --width 3.33 --only prism,static --rename "
        "static=S-Partition --panel a --no-caption --format pdf,svg",
        "bench list figures",
    )
)
@click.argument("folder", type=PATH, required=False)
@click.option(
    "--figure",
    "name",
    type=click.Choice(plots.names()),
    help="Only this figure (bench list figures).  [default: all that fit the folder]",
)
@click.option(
    "-o",
    "--out",
    type=PATH,
    metavar="STEM",
    help="Path of the figure without its ending.  [default: plots/out/FIGURE-HASH]",
)
@click.option(
    "--width",
    type=Number(0, 40, min_open=True),
    metavar="INCHES",
    help="Width of the figure.  [default: a column, 3.4, or a page, 7]",
)
@click.option("--only", metavar="LIST", help="Only these systems, as the table names them.")
@click.option("--rename", metavar="OLD=NEW[,...]", help="Names of systems in the figure.")
@click.option("--panel", metavar="LETTER", help="Only this panel, larger.")
@click.option("--caption/--no-caption", default=True, help="Write the setting below the figure.  [default: caption]")
@click.option(
    "--format",
    "formats",
    default="pdf,png",
    show_default=True,
    metavar="LIST",
    help="Formats: pdf, png, svg, pgf (needs LaTeX). The CSV of the points always comes.",
)
@click.option("--style", "style_file", type=PATH, metavar="FILE.mplstyle", help="Settings of matplotlib, above ours.")
def plot(
    *,
    folder: Path | None,
    name: str | None,
    out: Path | None,
    width: float | None,
    only: str | None,
    rename: str | None,
    panel: str | None,
    caption: bool,
    formats: str,
    style_file: Path | None,
) -> None:
    """Draw stored results as PDF, PNG and CSV.

    Without FOLDER, the newest comparison or study.
    """
    from harness.rows.record import SWEEP
    from harness.study import sensitivity
    from plots import form

    chosen = tuple(listed("--only", only) or ())
    drawn_form = form.Form(width, chosen, _renamed(rename), panel or "", caption, _formats(formats), style_file)
    if folder is None:
        stored = sorted(RESULTS.glob(f"*/{SWEEP}"), key=lambda path: path.stat().st_mtime)
        if not stored:
            raise UserError(f"no sweep in {short_path(RESULTS)}: bench compare makes one")
        folder = stored[-1].parent
    given, folder = folder, real(folder)
    judged = _slos(folder / SWEEP) if (folder / SWEEP).is_file() else []
    figures = _choosing(_figures(folder, name), drawn_form.words())
    if out is not None and len(figures) > 1:
        raise UserError(f"{short_path(folder)}: -o is of a single figure; name it by --figure {' or '.join(figures)}")
    stale = _stale(folder)
    note = " ".join(part for part in (stale, sensitivity.sentence_of(folder)) if part)
    if judged:
        click.echo(f"{short_path(folder)} · SLO {', '.join(judged)}")
    failures = []
    with form.on(drawn_form):
        for label, figure in figures.items():
            stem = out.with_suffix("") if out else FIGURES / f"{label}-{folder.name.rpartition('-')[2]}"
            command = again(("plot", short_path(folder), *_options(given)), *(("--figure", name) if name else ()))
            try:
                for path in plots.render(figure, folder, real(stem), command, note):
                    click.echo(short_path(path))
            except UserError as error:  # the other figures are still drawn
                failures.append(str(error))
    if stale:
        click.echo(f"{stale} (the command that made them runs them again)", err=True)
    if failures:
        raise UserError(*failures)


def _options(folder: Path) -> list[str]:
    """Return the words of this command line that change how a figure is drawn: options with their values."""
    words = [word for word in click.get_current_context().meta.get(WORDS, ())[1:] if word != str(folder)]
    formed = {"--width", "--only", "--rename", "--panel", "--format", "--style"}
    parts = (part for name, part in options_of(words, formed) if name in {*formed, "--no-caption"})
    return list(chain.from_iterable(parts))


def _choosing(figures: dict[str, Any], options: tuple[str, ...]) -> dict[str, Any]:
    """Return those figures that support the `options` to choose or rename systems. Raises UserError if none does."""
    able = {label: figure for label, figure in figures.items() if not {*options} - getattr(figure, "CHOOSES", set())}
    if not able:
        raise UserError(f"{' and '.join(options)}: not of the figure {' or '.join(figures)} (docs/share.md)")
    return able


def _renamed(text: str | None) -> dict[str, str]:
    """Read --rename: the new name of each system by its old one. Raises UserError for a pair that is not valid."""
    pairs = [part.rpartition("=") for part in listed("--rename", text) or []]
    if bad := next((f"{old}{sign}{new}" for old, sign, new in pairs if not old.strip() or not new.strip()), None):
        raise UserError(f'--rename "{bad}" is not OLD=NEW')
    if long := next((new for *_, new in pairs if len(new.strip()) > MOST_NAME or not new.isprintable()), None):
        raise UserError(f'--rename: "{long[:MOST_NAME]}..." is not a printable name of at most {MOST_NAME} characters')
    return {old.strip(): new.strip() for old, _, new in pairs}


def _formats(text: str) -> tuple[str, ...]:
    from harness.policy.fields import meant
    from plots.form import FORMATS

    names = listed("--format", text) or []
    if bad := next((name for name in names if name not in FORMATS), None):
        raise UserError(f'--format: no format "{bad}"{meant(bad, FORMATS)} ({", ".join(FORMATS)})')
    return tuple(dict.fromkeys(names))


def _figures(folder: Path, name: str | None) -> dict[str, Any]:
    """Return the figures to draw from a folder, by name. Raises UserError if there are none."""
    if not folder.is_dir():
        raise UserError(f"{short_path(folder)}: no such folder")
    if name is not None:
        figure = plots.find(name)
        if not plots.draws(figure, folder):
            raise UserError(f"{short_path(folder)}: nothing that {name} draws (bench list figures)")
        return {name: figure}
    figures, broken = plots.of(folder)
    for line in broken:
        click.echo(line, err=True)
    if not figures:
        raise UserError(f"{short_path(folder)}: nothing that a figure draws (bench list figures)")
    return figures


def _slos(table: Path) -> list[str]:
    """Return the SLO rules of a stored sweep."""
    from harness.rows import tidy

    rules = set(tidy.stored(table)["slo"].to_pylist())
    return sorted(rules, key=lambda rule: (len(rule), rule))


def _stale(made: Path) -> str:
    """Return a warning with the labels of runs that older sources made, or that are damaged; "" if there are none.

    `made` is the folder of a sweep or of a run.
    """
    from harness.rows import record
    from harness.rows.sealed import Damaged
    from harness.run.sources import codes
    from harness.run.spec import stored

    path, runs = made / record.SWEEP, {}
    if path.is_file():
        runs = record.footer(path).get("runs", {})
    elif record.exists(made):
        runs = {made.name: stored(record.meta(made)["spec"]).label}
    stale, damaged, code = set(), set(), codes()
    for name, label in runs.items():
        folder = made.parent / name
        if not record.exists(folder):
            continue
        try:
            facts = record.meta(folder)
            if code(stored(facts["spec"])) != facts["code_hash"]:
                stale.add(label)
        except Damaged:
            damaged.add(label)
    labelled = {"Stale, made by older sources": stale, "Runs damaged since": damaged}
    return " ".join(f"{words}: {', '.join(sorted(labels))}." for words, labels in labelled.items() if labels)
