"""`bench claims`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.answers.commands import real, short_path
from harness.cli.codes import Code
from harness.cli.options import PARTS, RESULTS, ROOT, RUNNING, examples
from harness.cli.terminal import room, screen, teller
from harness.cli.values import TARGET, listed
from harness.policy.types import UserError

if TYPE_CHECKING:
    from harness.run.shard import Shard
    from harness.run.teller import Teller

FILE = "claims.md"
DRAFT = ROOT / ".make" / FILE


@click.command(epilog=examples("bench claims", "bench claims --only fig7,weaver", "bench claims --check --publish"))
@click.option("--only", metavar="NAME,...", help="Only the claims of these studies; prints them, unless -o is given.")
@click.option("--all", "every", is_flag=True, help="With --only: print the whole page, as Markdown.")
@PARTS
@RUNNING
@click.option("-o", "--out", type=TARGET, metavar="FILE", help="File for the page.  [default: .make/claims.md]")
@click.option("--publish", is_flag=True, help="Write results/claims.md, the page of the documentation.")
@click.option(
    "--check", is_flag=True, help="Exit with 1 if a class has fewer than 10 misses of either side, or 5 windows."
)
def claims(
    *,
    only: str | None,
    every: bool,
    shard: Shard | None,
    collect: bool,
    workers: int | None,
    machine: bool,
    out: Path | None,
    publish: bool,
    check: bool,
) -> None:
    """Test every paper's claims against runs made here.

    One page has each statement once, with its class and its evidence.
    """
    from harness.answers import ledger as words
    from harness.rows import record
    from harness.run import sweep
    from harness.study import ledger

    if publish and (only is not None or out is not None):
        raise UserError(f"--publish writes all claims into results/claims.md: leave out {'--only' if only else '-o'}")
    names = listed("--only", only)
    with teller(machine=machine) as progress, sweep.stored_only() if collect else nullcontext():
        if shard is not None:
            runs = _make_part(shard, names, workers, progress)
            click.echo(f"shard {shard}: {runs:,} runs are stored in {short_path(RESULTS)}")
            return
        claimed = ledger.ledger(names, real(RESULTS), workers=workers, teller=progress)
    page = "\n".join(words.markdown(claimed)).rstrip() + "\n"
    path = RESULTS / FILE if publish else out or (DRAFT if names is None else None)
    if path is None and every:
        click.echo(page, nl=False)
    elif path is None:
        screen([words.counted(claimed.statements), *words.listed(claimed.statements, room())], every=False)
    else:
        record.write_bytes(real(path), page.encode())
        click.echo(f"{words.counted(claimed.statements)} · {short_path(path)}")
    for name, why in claimed.missing.items():
        click.echo(f"{name}: {why}", err=True)
    weak = ledger.weak(claimed) if check else []
    for line in weak:
        click.echo(f"too little evidence: {line}", err=True)
    if claimed.missing:
        sys.exit(Code.MISSING if collect else Code.REFUSED)
    if weak:
        sys.exit(Code.FAILED)


def _make_part(shard: Shard, only: list[str] | None, workers: int | None, told: Teller) -> int:
    """Run one shard of the runs behind the claims, and return the number of runs.

    `only` lists sources of claims; None is all of them.
    """
    from harness.study import ledger, load, shards

    runs = 0
    for name in ledger.named(only):
        told.say(f"claims of {name}")
        folder = real(RESULTS) / name
        runs += shards.measure_shard(load.study(name), folder, shard, workers=workers, teller=told).runs
    return runs
