"""`bench claims`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.cli.codes import Code
from harness.cli.options import JSON_PROGRESS, LIMIT, RESULTS, TARGET, WORKERS, examples, listed
from harness.cli.terminal import room, screen, teller
from harness.report.commands import real, short_path

FILE = "claims.md"


@click.command(epilog=examples("bench claims", "bench claims --only fig7,weaver", "bench claims --check"))
@click.option("--only", metavar="NAME,...", help="Only the claims that these hold; then they are printed, without -o.")
@click.option("--all", "every", is_flag=True, help="Of --only: print the whole page, as Markdown.")
@LIMIT
@WORKERS
@JSON_PROGRESS
@click.option("-o", "--out", type=TARGET, metavar="FILE",
              help="Where the page goes.  [default: results/claims.md]")  # fmt: skip
@click.option("--check", is_flag=True,
              help="Exit with 1 where a class rests on fewer than 10 misses of either side, or 5 windows.")  # fmt: skip
def claims(*, only: str | None, every: bool, workers: int | None, machine: bool, out: Path | None, check: bool) -> None:
    """Hold every paper's claims against runs made here.

    One page has each statement once, with its class and what it rests on.
    """
    from harness.rows import record
    from harness.study import ledger

    names = listed("--only", only)
    with teller(machine=machine) as told:
        found = ledger.ledger(names, real(RESULTS), workers=workers, teller=told)
    page = "\n".join(ledger.markdown(found)).rstrip() + "\n"
    path = out or (RESULTS / FILE if names is None else None)
    if path is None and every:
        click.echo(page, nl=False)
    elif path is None:
        screen([ledger.counted(found.statements), *ledger.listed(found.statements, room())], every=False)
    else:
        record.write_bytes(real(path), page.encode())
        click.echo(f"{ledger.counted(found.statements)} · {short_path(path)}")
    for name, why in found.missing.items():
        click.echo(f"{name}: {why}", err=True)
    weak = ledger.weak(found) if check else []
    for line in weak:
        click.echo(f"rests on too little: {line}", err=True)
    if found.missing:
        sys.exit(Code.REFUSED)
    if weak:
        sys.exit(Code.FAILED)
