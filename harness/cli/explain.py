"""`bench explain`: of a run, a comparison, or an answer of `bench size`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.answers.commands import explain_command, real, short_path
from harness.answers.table import WIDTH
from harness.cli.options import ALL, DEFINITION, RESULTS, TRUST, examples, slo_rule
from harness.cli.terminal import Terminal, folded, prose, screen
from harness.cli.values import PATH, Number
from harness.policy.types import UserError


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
@click.option("--misses", is_flag=True, help="Explain all SLO misses, by cause; the default without --request.")
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

    RUN is the folder of a run or of a comparison, which bench compare prints. It may be the folder of an answer of
    bench size. Then the output says what binds on fewer GPUs, and which change helps.
    """
    from harness.rows import record
    from harness.study.misses import is_sweep

    folders = (run, RESULTS / run)
    if (folder := next((path for path in folders if (path / record.SIZE).is_file()), None)) is not None:
        if request is not None or slo is not None or out is not None or definition is not None:
            raise UserError(f"{run} is an answer of bench size, with its own SLO: --system alone may be given")
        _of_size(real(folder), system)
    elif (folder := next(filter(is_sweep, folders), None)) is not None:
        if request is not None or slo is not None:
            raise UserError(f"{run} is a comparison, with its own SLO: --request and --slo are for a run of it")
        _of_comparison(real(folder), system, out, definition, every)
    elif system is not None or out is not None:
        raise UserError(f"{run}: {'--system' if system else '-o'} is for a comparison's folder")
    elif slo is None and slo_scale is not None:
        raise UserError("--slo-scale has no --slo to scale")
    else:
        _of_run(run, request, misses, (slo, slo_scale), definition, every)


def _of_run(
    name: Path,
    request: int | None,
    misses: bool,
    slo: tuple[str | None, float | None],
    definition: str | None,
    every: bool,
) -> None:
    """Print where the time of one request of a run went, and with `misses` what caused the run's SLO misses."""
    from harness.answers import explain as words
    from harness.rows import record
    from harness.run import retrace
    from harness.run import slo as slos
    from harness.run.spec import stored
    from harness.run.stretches import Part
    from harness.study import judged

    run, about = stored_run(name)
    validity = list(words.verdict(about))
    click.echo("".join(f"{line}\n" for line in validity), nl=False)
    spec, table = stored(about["spec"]), record.read(run)
    row = None if request is None else words.row_of(table, request)
    rule = None if slo[0] is None else slo_rule(*slo, spec.models)
    with Terminal() as teller:
        under, lines = judged.target(run, spec, rule, slo_rule(None, None, spec.models), teller)
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
    if misses or request is None:
        window_s = spec.window_s if spec.window_s is not None else float("inf")
        again = explain_command(run, under.rule)
        first, *others = words.misses(table, window_s, limits, definition or under.definition, again)
        screen([first, *lines, *others[:-1]], tail=others[-1:], every=every)


def _of_size(folder: Path, system: str | None) -> None:
    """Print which limit binds on fewer GPUs than an answer of `bench size` needs, and which change would help."""
    from harness.answers import size as words
    from harness.study import size_kept, size_why

    with Terminal() as teller:
        reasons = size_why.why(size_kept.read(folder), folder.parent, system=system, teller=teller)
    first, second, *rest = words.why(reasons)
    prose(first)
    prose(second)
    folded(rest, WIDTH)
    click.echo(f"next: bench report {short_path(folder)}")


def _of_comparison(sweep: Path, system: str | None, out: Path | None, definition: str | None, every: bool) -> None:
    """Print what caused the SLO misses of a comparison, and draw a figure if `out` is given."""
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


def stored_run(run: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the metadata of a stored run, found by its path or by its name in the results.

    Raises UserError for a file, and for a run that was skipped or infeasible.
    """
    from harness.rows import record

    if run.exists() and not run.is_dir():
        raise UserError(f"{run}: a file, and not the folder of a run")
    run = real(run if record.exists(run) or not record.exists(RESULTS / run) else RESULTS / run)
    about = record.meta(run)
    if why := about["skipped"] or about["infeasible"]:
        raise UserError(f"{run}: nothing ran: {why}")
    return run, about
