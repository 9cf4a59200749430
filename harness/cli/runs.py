"""`bench run`, `plot`, `explain` and `timeline`: make a run, and use stored results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import plots
from harness.answers.commands import again, explain_command, real, short_path
from harness.answers.table import WIDTH
from harness.cli.options import (
    ALL,
    DEFINITION,
    FIGURES,
    LIMIT,
    MOVED,
    OUT,
    PATH,
    RESULTS,
    TARGET,
    TRUST,
    WORDS,
    Number,
    examples,
    listed,
    slo_rule,
)
from harness.cli.terminal import Terminal, folded, prose, screen

MOST_NAME = 40  # characters of a system's name in a figure


@click.command(epilog=examples("bench run mine.toml", "bench run mine.toml -o /tmp/out"))
@click.argument("spec", type=PATH, metavar="SPEC.toml")
@click.option("--dry-run", is_flag=True, help="Show the resolved spec and the estimated time; run nothing.")
@click.option("--record", "keep", is_flag=True, help="Run again, and store each turn of each lane.")
@click.option("--engine", metavar="NAME", help="Simulator or real servers, instead of the file's engine.")
@MOVED
@LIMIT
@OUT
def run(*, spec: Path, dry_run: bool, keep: bool, engine: str | None, out: Path | None) -> None:
    """Run one spec, a TOML file.

    The file has `system = "static"` and any other field; --dry-run shows all.
    """
    from dataclasses import replace

    from harness.answers import explain as words
    from harness.answers.comparison import by_model
    from harness.policy.types import UserError
    from harness.rows import record
    from harness.run import estimates, realtime, score, streams, sweep
    from harness.run.execute import recorded
    from harness.run.resolve import resolve
    from harness.run.setup import Setup
    from harness.run.spec import as_dict, read
    from harness.study.bases import ahead, check_rule, slo_target
    from harness.study.table import scored_alone

    folder = real(out or RESULTS)
    asked = read(spec)
    asked = asked if engine is None else replace(asked, engine=engine)
    try:
        ready = resolve(asked)
        rule = asked.slo or slo_rule(None, None, asked.models)
        check_rule(rule, asked.models)
        if dry_run:
            click.echo(json.dumps(as_dict(ready), indent=1, sort_keys=True))
            click.echo("".join(f"{line}\n" for line in streams.lines(Setup(ready), every=True)), nl=False, err=True)
            if realtime.span(ready) is None:
                click.echo(f"about {estimates.Costs.of(folder).cpu_s(ready):.1f} s")
                return
            known = ahead(asked, rule, folder)
            if known.bases:
                click.echo(f"SLO {rule}: {realtime.told(known.bases)} of base runs unless they are stored")
            why, span = realtime.lacking(ready), realtime.span(ready, known.drain_s)
            took = f"{realtime.told([span] if span else [])}, beside starts of servers"
            click.echo(f"not run: {why}" if why else took)
            return
        click.echo("".join(f"{line}\n" for line in streams.lines(Setup(ready))), nl=False)
        with Terminal() as teller:
            under = slo_target(asked, rule, folder, teller=teller)
            wanted = under.spec(asked)
            (task,) = sweep.tasks([wanted])
            if keep:
                path = recorded(task.spec, folder, task.code)
            else:
                (path,) = sweep.sweep([wanted], folder, teller=teller)
            # says who judged it
            scored = scored_alone(task, under, folder)
    except UserError as error:
        raise UserError(f"{spec}: {error}") from None
    about = record.meta(path)
    if why := about["skipped"] or about["infeasible"]:
        click.echo(f"{'skipped' if about['skipped'] else 'infeasible'}: {why}")
    else:
        counts = ", ".join(f"{n} {state}" for state, n in sorted(about["counts"].items()))
        met = f"attainment {100 * score.attained(path, under, [under.definition])[under.definition]:.1f} %"
        click.echo(f"{asked.label}: {counts}; {met} ({under.definition}, {rule})")
    lines = list(words.verdict(about))
    if about.get("served"):
        lines += by_model(scored, wanted.rate_scale, under.definition)
    click.echo("".join(f"{line}\n" for line in lines), nl=False)
    click.echo(short_path(path))
    click.echo(f"next: {explain_command(path, under.rule, '--misses')}")


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
    from harness.policy.types import UserError
    from harness.rows.record import SWEEP
    from harness.study import sensitivity
    from plots import form

    asked = form.Form(
        width,
        tuple(listed("--only", only) or ()),
        _renamed(rename),
        panel or "",
        caption,
        _formats(formats),
        style_file,
    )

    if folder is None:
        stored = sorted(RESULTS.glob(f"*/{SWEEP}"), key=lambda path: path.stat().st_mtime)
        if not stored:
            raise UserError(f"no sweep in {short_path(RESULTS)}: bench compare makes one")
        folder = stored[-1].parent
    given, folder = folder, real(folder)
    judged = _slos(folder / SWEEP) if (folder / SWEEP).is_file() else []
    figures = _choosing(_figures(folder, name), asked.words())
    if out is not None and len(figures) > 1:
        raise UserError(f"{short_path(folder)}: -o is of a single figure; name it by --figure {' or '.join(figures)}")
    stale = _stale(folder)
    note = " ".join(part for part in (stale, sensitivity.sentence_of(folder)) if part)
    if judged:
        click.echo(f"{short_path(folder)} · SLO {', '.join(judged)}")
    failures = []
    with form.on(asked):
        for label, figure in figures.items():
            stem = out.with_suffix("") if out else FIGURES / f"{label}-{folder.name.rpartition('-')[2]}"
            command = again(("plot", short_path(folder), *_options(given)), *(("--figure", name) if name else ()))
            try:
                for path in plots.render(figure, folder, real(stem), command, note):
                    click.echo(short_path(path))
            except UserError as error:  # the others are drawn
                failures.append(str(error))
    if stale:
        click.echo(f"{stale} (the command that made them runs them again)", err=True)
    if failures:
        raise UserError(*failures)


def _options(folder: Path) -> list[str]:
    """Return the options of this command that form a figure."""
    words = [word for word in click.get_current_context().meta.get(WORDS, ())[1:] if word != str(folder)]
    formed = {"--width", "--only", "--rename", "--panel", "--format", "--style"}
    kept, rest = list[str](), iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in formed:
            kept += [word] if equals else [word, next(rest, "")]
        elif word == "--no-caption":
            kept.append(word)
    return kept


def _choosing(figures: dict[str, Any], options: tuple[str, ...]) -> dict[str, Any]:
    """Return the figures that can choose or name what they draw as the options say. UserError where none can."""
    from harness.policy.types import UserError

    able = {label: figure for label, figure in figures.items() if not {*options} - getattr(figure, "CHOOSES", set())}
    if not able:
        raise UserError(f"{' and '.join(options)}: not of the figure {' or '.join(figures)} (docs/share.md)")
    return able


def _renamed(text: str | None) -> dict[str, str]:
    """Read names for systems, in pairs."""
    from harness.policy.types import UserError

    pairs = [part.rpartition("=") for part in listed("--rename", text) or []]
    if bad := next((f"{old}{sign}{new}" for old, sign, new in pairs if not old.strip() or not new.strip()), None):
        raise UserError(f'--rename "{bad}" is not OLD=NEW')
    if long := next((new for *_, new in pairs if len(new.strip()) > MOST_NAME or not new.isprintable()), None):
        raise UserError(f'--rename: "{long[:MOST_NAME]}..." is not a printable name of at most {MOST_NAME} characters')
    return {old.strip(): new.strip() for old, _, new in pairs}


def _formats(text: str) -> tuple[str, ...]:
    from harness.policy.fields import meant
    from harness.policy.types import UserError
    from plots.form import FORMATS

    names = listed("--format", text) or []
    if bad := next((name for name in names if name not in FORMATS), None):
        raise UserError(f'--format: no format "{bad}"{meant(bad, FORMATS)} ({", ".join(FORMATS)})')
    return tuple(dict.fromkeys(names))


def _figures(folder: Path, name: str | None) -> dict[str, Any]:
    """Return the figures to draw of a folder, by name. UserError if there are none."""
    from harness.policy.types import UserError

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
    """Say which runs of a sweep, or whether this run, were made by other sources than these or are damaged."""
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


@click.command(
    epilog=examples(
        "bench explain results/static-3f9c01ab --request 217",
        "bench explain results/static-3f9c01ab --misses",
        "bench explain results/arena-chat-3f9c01ab --misses -o causes.pdf  # every system of a comparison",
        "bench explain results/arena-chat-3f9c01ab --misses --system static  # at each of its rates",
        "bench explain results/mine-size-3f9c01ab  # of bench size: what binds on fewer GPUs, and what helps",
    )
)
@click.argument("run", type=PATH)
@click.option("--request", type=click.IntRange(0), metavar="ID", help="Explain one request, in order of time.")
@click.option("--misses", is_flag=True, help="Explain all SLO misses, by cause.")
@click.option(
    "--system", metavar="LABEL", help="For a comparison: one system at each rate. For a size: not the best one."
)
@click.option(
    "-o", "--out", type=PATH, metavar="STEM", help="For a comparison: also draw a figure, as PDF, PNG and CSV."
)
@click.option("--slo", metavar="RULE", help="SLO, instead of the one that the comparison used.")
@click.option("--slo-scale", type=Number(), metavar="X", help="Multiple of the base.  [default: 5; 1 for seconds]")
@click.option(
    "--definition", type=DEFINITION, help="Definition of a miss.  [default: both; e2e for an SLO by solo latency]"
)
@TRUST
@ALL
def explain(
    *,
    run: Path,
    request: int | None,
    misses: bool,
    system: str | None,
    out: Path | None,
    slo: str | None,
    slo_scale: float | None,
    definition: str | None,
    every: bool,
) -> None:
    """Say where time went, why SLOs were missed, what helps.

    RUN is a run's folder, or with --misses that of a comparison (bench compare prints both). It may be the folder of
    an answer of bench size. Then the output says what binds on fewer GPUs, and which change helps.
    """
    from harness.answers import explain as words
    from harness.policy.types import UserError
    from harness.rows import record
    from harness.run import retrace
    from harness.run import slo as slos
    from harness.run.spec import stored
    from harness.run.stretches import Part
    from harness.study import judged
    from harness.study.misses import is_sweep

    sized = next((path for path in (run, RESULTS / run) if (path / record.SIZE).is_file()), None)
    if sized is not None:
        if request is not None or slo is not None or out is not None or definition is not None:
            raise UserError(f"{run} is an answer of bench size, with its own SLO: --system alone may be given")
        _size_why(real(sized), system)
        return
    folder = next((path for path in (run, RESULTS / run) if is_sweep(path)), None)
    if folder is not None:
        if request is not None or slo is not None or not misses:
            raise UserError(
                f"{run} is a comparison: --misses, and its own SLO; --request and --slo are for a run of it"
            )
        _sweep_misses(real(folder), system, out, definition, every)
        return
    if system is not None or out is not None:
        raise UserError(f"{run}: {'--system' if system else '-o'} is for a comparison's folder")
    if slo is None and slo_scale is not None:
        raise UserError("--slo-scale has no --slo to scale")
    run, about = _stored(run)
    worth = list(words.verdict(about))
    click.echo("".join(f"{line}\n" for line in worth), nl=False)
    if request is None and not misses:
        if worth:
            return
        raise UserError("say what to explain: --request ID, or --misses")
    spec, table = stored(about["spec"]), record.read(run)
    row = None if request is None else words.row_of(table, request)
    asked = None if slo is None else slo_rule(slo, slo_scale, spec.models)
    with Terminal() as teller:
        under, lines = judged.target(run, spec, asked, slo_rule(None, None, spec.models), teller)
    limits = slos.limits(run, under)
    if request is not None and row is not None:
        parts, made_ns = list[Part](), None
        try:
            with Terminal("request") as teller:
                trace = retrace.retrace(run, table, look_at=request, teller=teller)
            parts = retrace.parts(row, trace.stretches, trace.transfers)
            made_ns = retrace.first_ns(trace, request)
        except retrace.Lost as why:
            click.echo(f"in no order of time: {why}", err=True)
        first, *others = words.request(table, request, limits, parts, made_ns)
        screen([first, *lines, *others], every=every)
    if misses:
        window_s = spec.window_s if spec.window_s is not None else float("inf")
        again = explain_command(run, under.rule)
        first, *others = words.misses(table, window_s, limits, definition or under.definition, again)
        screen([first, *lines, *others[:-1]], tail=others[-1:], every=every)


def _size_why(folder: Path, system: str | None) -> None:
    """Print what binds on fewer GPUs than an answer, and which change helps."""
    from harness.answers import size as words
    from harness.study import size_kept, size_why

    with Terminal() as teller:
        reasons = size_why.why(size_kept.read(folder), folder.parent, system=system, teller=teller)
    first, second, *rest = words.why(reasons)
    prose(first)
    prose(second)
    folded(rest, WIDTH)
    click.echo(f"next: bench report {short_path(folder)}")


@click.command(
    epilog=examples(
        "bench timeline results/aegaeon-3f9c01ab -o t.json",
        "bench timeline prism-3f9c01ab -o t.json.gz  # then open it at https://ui.perfetto.dev",
    )
)
@click.argument("run", type=PATH)
@click.option(
    "-o", "--out", type=TARGET, metavar="FILE", help="A .json or .json.gz file.  [default: plots/out/timeline-RUN.json]"
)
@TRUST
def timeline(run: Path, out: Path | None) -> None:
    """Write a stored run as a trace for Perfetto.

    It shows lanes, turns, links, memory and requests; a span of decode steps is one slice. The run is repeated from its
    spec, so it must be a simulated one.
    """
    from harness.policy.types import UserError
    from harness.rows import record
    from harness.run import perfetto as trace_event
    from harness.run import retrace

    path = out or FIGURES / f"timeline-{run.name}.json"
    if not path.name.endswith((".json", ".json.gz")):
        raise UserError(f"{path}: a trace ends in .json or .json.gz")
    run, about = _stored(run)
    table = record.read(run)
    with Terminal("request") as teller:
        trace = retrace.retrace(run, table, teller=teller)
    events = trace_event.events(trace, table)
    facts = {
        "run": run.name,
        "spec": about["spec"],
        "fidelity": about["fidelity"],
        "window_starts_us": round(-trace.start_s * 1e6, 3),
    }
    record.write_bytes(path, trace_event.document(events, facts, path))
    span = f"{trace.end_s - trace.start_s:.0f} s, {table.num_rows:,} requests on {len(trace.gpu_bytes)} GPUs"
    click.echo(f"{short_path(path)}: {len(events):,} events of {span}; open it at https://ui.perfetto.dev")


def _sweep_misses(sweep: Path, system: str | None, out: Path | None, definition: str | None, every: bool) -> None:
    """Print what the SLO misses of a comparison were made of, and draw a figure on request."""
    import shlex

    from harness.answers import misses as words
    from harness.study import misses

    with Terminal() as teller:
        causes = misses.of_sweep(sweep, definition=definition, system=system, teller=teller)
    of = f"of {system} at each rate" if system else f"at rate scale {causes.rows[0].rate_scale:g}"
    runs = max(row.runs for row in causes.rows)
    seeds = f"{runs} seeds together" if runs > 1 else "one seed"
    by = "rate" if system else "system"
    of_what = f"{short_path(sweep)} · SLO {causes.rule} ({causes.definition}) · misses {of}, {seeds}"
    table = words.table(causes.rows, by, every=every).text()
    screen([*words.answer(causes.rows, by), of_what, *table], every=every)
    if out is None:
        return
    from plots import fig_causes

    again = ["bench", "explain", short_path(sweep), "--misses", *(["--system", system] if system else [])]
    stem = out.with_suffix("") if out.suffix in {".pdf", ".png", ".csv"} else out
    for path in fig_causes.render(
        fig_causes.frame(causes.rows), causes.scored, causes.definition, real(stem), shlex.join(again)
    ):
        click.echo(short_path(path))


def _stored(run: Path) -> tuple[Path, dict[str, Any]]:
    """Find a stored run, by path or by name in the results, with its facts. UserError if nothing ran."""
    from harness.policy.types import UserError
    from harness.rows import record

    if run.exists() and not run.is_dir():
        raise UserError(f"{run}: a file, and not the folder of a run")
    run = real(run if record.exists(run) or not record.exists(RESULTS / run) else RESULTS / run)
    about = record.meta(run)
    if why := about["skipped"] or about["infeasible"]:
        raise UserError(f"{run}: nothing ran: {why}")
    return run, about
