"""`bench tune`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.answers.commands import real, short_path
from harness.answers.table import aligned
from harness.cli import options
from harness.cli.terminal import Terminal, room, screen
from harness.cli.values import TARGET, listed
from harness.policy.types import UserError

if TYPE_CHECKING:
    from harness.run.shard import Shard
    from harness.study.tune import Tuned

TUNED = options.ROOT / "systems" / "tuned.toml"
SYSTEMS = "prism,muxserve,static,elastic,qlm,swap"


@click.command(epilog=options.examples("bench tune", "bench tune --systems prism --draws 24 --to /tmp/prism.toml"))
@options.systems("Systems by name.", default=SYSTEMS, show_default=True)
@options.count("--draws", "Settings that each system tries, the first its defaults.", least=2, default=16)
@options.count("--gpus", "GPUs for the eight models, where a system does not fit on two.  [default: 2]")
@click.option(
    "--to",
    type=TARGET,
    default=TUNED,
    metavar="FILE",
    help="File for the draws and the choice.  [default: systems/tuned.toml]",
)
@options.ALL
@options.PARTS
@options.RUNNING
@options.OUT
def tune(
    *,
    systems: str,
    draws: int,
    gpus: int | None,
    to: Path,
    every: bool,
    shard: Shard | None,
    collect: bool,
    workers: int | None,
    out: Path | None,
) -> None:
    """Tune systems alike, on seeds that no evaluation uses.

    Each system tries the same number of random settings. Only fields that a system's source leaves open are drawn
    (tuned=True where the field is declared). Runs are kept, so the same command resumes. To adopt a
    choice, make its values the defaults in the system's file.
    """
    from datetime import UTC, datetime

    from harness.rows import record
    from harness.run import sweep
    from harness.study import tune as tuning

    names = listed("--systems", systems) or []
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f'--systems "{systems}": {twice} is there twice')
    folder = real(out or options.RESULTS)
    with Terminal() as progress, sweep.stored_only() if collect else nullcontext():
        results = tuning.tune(names, folder, draws=draws, gpus=gpus, workers=workers, teller=progress, shard=shard)
    if shard is not None:
        made = ", ".join(tuned.system for tuned in results) or "no system"
        click.echo(f"shard {shard}: the runs of {made} are stored in {short_path(folder)}")
        return
    better = sum(tuned.chosen > 0 for tuned in results)
    answer = f"{better} of {len(results)} systems have a setting better than their defaults"
    screen([answer, *(line for tuned in results for line in _lines(tuned, every))], tail=[short_path(to)], every=every)
    command = f"bench tune --systems {','.join(names)} --draws {draws}" + (f" --gpus {gpus}" if gpus else "")
    day = datetime.now(UTC).date().isoformat()
    record.write_bytes(to.resolve(), tuning.as_toml(results, day, command, gpus).encode())


def _lines(tuned: Tuned, every: bool) -> Sequence[str]:
    """Return what was chosen for a system, and a table of its draws.

    With `every` the table holds all draws, else the defaults and the choice.
    """
    from harness.rows import vetted
    from harness.rows.estimate import POINTS
    from harness.study.tune import shown

    rows: list[Sequence[str]] = [("draw", "held %", "gain in points", "attainment %", "fields")]
    for k, draw in enumerate(tuned.draws):
        star = " *" if k == tuned.chosen else ""
        if k not in {0, tuned.chosen} and not every:
            continue
        gain = draw.gain.times(100).text(POINTS._replace(decimals=2))
        name, held, score = f"{k}{star}", f"{100 * draw.held:.2f}", f"{100 * draw.score:.2f}"
        rows.append((name, held, gain, score, shown(draw.fields)))
    mark = f" ({vetted.mark(tuned.system)})" if vetted.mark(tuned.system) else ""
    why = f"draw {tuned.chosen} is chosen" if tuned.chosen else "the defaults stay: no draw is better"
    why = f"{why} (of {len(tuned.draws)} draws); regret of the defaults {100 * tuned.regret:.2f} points"
    return [f"{tuned.system}{mark}: {why}", *aligned(rows, None if every else room())]
