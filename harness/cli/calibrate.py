"""`bench calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.answers.commands import short_path
from harness.cli import options
from harness.cli.options import RESULTS, complete, examples, gpu_names
from harness.cli.terminal import Terminal
from harness.cli.values import PATH
from harness.policy.fields import asked
from harness.policy.types import GIB, UserError

if TYPE_CHECKING:
    from harness.calibrate.tables import Table

PUBLISHED = "profiles", "measured", "torch-steps"
KNOWN = ("llama-tiny", "llama-small", "llama-3.2-1b", "llama-3.1-8b", "qwen-2.5-14b", "qwen-3-32b")  # shapes
DRAWN = Path("plots/out/cost_fit")


def _sources() -> list[str]:
    from harness.loop import engine

    return [*PUBLISHED, *engine.names()]


@click.command(
    epilog=examples(
        "bench calibrate llamacpp --models llama-small -o results/cpu",
        "bench calibrate attach+urls=http://127.0.0.1:8000 --models llama-3.1-8b -o /tmp/attached",
        "bench calibrate results/h200",
        "bench calibrate results/h200/stages",
        "bench compare --systems static,unshared --gpu h200 --table results/h200/h200-measured.toml",
    )
)
@click.argument("source", metavar="SOURCE", shell_complete=complete(_sources))
@click.option(
    "--models", metavar="SHAPES", help="Of an engine: shapes (bench list models), with commas.  [default: llama-small]"
)
@options.count("--slots", "Of an engine: largest batch of a server.  [default: the engine's]")
@options.count("--rounds", "Of an engine: how often servers are measured, for hosts whose speed varies.  [default: 3]")
@click.option(
    "--gpu",
    shell_complete=complete(gpu_names),
    metavar="KIND",
    help="Of an engine or a folder: table to start from.  [default: by the card's name]",
)
@click.option(
    "-o",
    "--out",
    type=PATH,
    metavar="PATH",
    help="A file for a folder's table, else a folder.  [default: FOLDER/NAME.toml; results/ENGINE; where the "
    "committed tables lie]",
)
def calibrate(
    *, source: str, models: str | None, slots: int | None, rounds: int | None, gpu: str | None, out: Path | None
) -> None:
    """Fit cost tables to measurements.

    SOURCE is one of these: an engine, whose servers or devices are measured now. A folder that `make gpu` wrote, or
    engine torch on a card. `profiles`: public latencies in PROFILES_DIR, for the committed tables of GPUs. `measured`:
    public runs in MEASURED_DIR, for the hosts. `torch-steps`: steps on this machine's cores, which policies know of
    engine torch. Measurements that a folder holds are not repeated.
    """
    from harness.loop import engine as engines

    options = {"--models": models, "--slots": slots, "--rounds": rounds, "--gpu": gpu}
    match source:
        case "profiles":
            _only(source, options)
            _profiles(out)
        case "measured":
            from harness.engines.costs import quantities
            from harness.validate import hosts

            _only(source, options)
            _write(hosts.table(), (out or quantities.TABLES) / "hosts.toml")
        case "torch-steps":
            _only(source, options)
            _torch_steps(out)
        case _ if asked(source).name not in engines.names() and Path(source).is_dir():
            _only(source, options, "--gpu")
            _folder(Path(source), gpu, out)
        case _ if (name := asked(source).name) in engines.names() or name.endswith(".py"):
            given = {name: value for name, value in (("batch_cap", slots), ("gpu", gpu)) if value}
            _engine(source, models or "llama-small", out or RESULTS / name, rounds or 3, given)
        case _:
            others = ", ".join(PUBLISHED)
            raise UserError(f'"{source}" is no folder, no engine (bench list engines) and none of {others}')


def _only(source: str, options: Mapping[str, Any], *taken: str) -> None:
    """Raise UserError if an option is given that `source` does not take; `taken` names those that it takes."""
    if strange := next((name for name, value in options.items() if value is not None and name not in taken), ""):
        raise UserError(f"{strange} is of an engine's measurements: bench calibrate {source} takes none")


def _write(table: Table, path: Path, *, user: bool = False) -> None:
    """Write a table and print its notes; with `user`, read it back as `--table` does, to check it."""
    from harness.calibrate import tables
    from harness.rows.record import write_bytes

    write_bytes(path, tables.dumps(table.file).encode())
    if user:
        tables.check(path, table.file)
    for note in table.notes(path):
        click.echo(note)


def _profiles(out: Path | None) -> None:
    from harness.calibrate import kernels
    from harness.calibrate.tables import Table
    from harness.engines.costs import quantities
    from plots import scatter

    for stem, file in kernels.fit(click.echo).items():
        _write(Table(stem, file, lambda _: ()), (out or quantities.TABLES) / f"{stem}.toml")
    if out is not None:
        return
    quantities.forget()
    for what, ours, published in kernels.anchors():
        click.echo(f"{what}: {ours:.2f}x, published {published:.2f}x ({ours / published - 1:+.0%})")
    paths = scatter.render(scatter.kernels, kernels.points(), DRAWN, "bench calibrate profiles")
    click.echo(" · ".join(short_path(path) for path in paths))


def _torch_steps(out: Path | None) -> None:
    from harness.calibrate import torch
    from harness.validate import torch_timed
    from workloads.models import shape

    shapes = {name: shape(name) for name in KNOWN}
    rows, start_s = torch_timed.alone(shapes, click.echo)
    path = out / torch.POLICIES.name if out else torch.POLICIES
    _write(torch.known(rows, shapes, start_s), path)
    click.echo(f"wrote {short_path(path)}")


def _folder(folder: Path, gpu: str | None, out: Path | None) -> None:
    """Write the cost table for the measurements in a folder made by `make gpu`, or by engine torch on a card."""
    from harness.calibrate import card, torch
    from workloads.models import shape

    table = torch.of_folder(folder, shape) if (folder / torch.ABOUT).is_file() else card.table(folder, gpu)
    path = out or folder / f"{table.name}.toml"
    _write(table, path, user=True)
    click.echo(f"wrote {short_path(path)} (--table takes it)")


def _engine(engine: str, models: str, folder: Path, rounds: int, given: Mapping[str, Any]) -> None:
    """Measure an engine's servers or devices, and write their table and figure."""
    from harness.calibrate import servers, steps, torch
    from harness.loop import engine as engines
    from harness.validate import torch_timed
    from plots import scatter
    from workloads.models import model_set, named, shape

    make, names = engines.find(engine), tuple(dict.fromkeys(named(name.strip()) for name in models.split(",")))
    with Terminal("measurement") as teller:
        if asked(engine).name == "torch":
            shapes = {name: shape(name) for name in names}
            fields = torch.fields(make, shapes)
            rows = torch_timed.measure(folder, shapes, teller.say, fields, {"pool_bytes": GIB, **given})
            table, fitted = torch.table(rows, shapes, fields.wide, torch.card(folder))
        else:
            twins = ",".join(f"{name}*{servers.SIDE_BY_SIDE}" for name in names)
            shapes = {served.name: served.shape for served in model_set(twins).serving(servers.SERVED).members}
            table, fitted = servers.table(engine, make, shapes, folder, teller.say, rounds, given)
    path, stem = folder / f"{table.name}.toml", folder / "calibrate"
    _write(table, path, user=True)
    command = f"bench calibrate {engine} -o {short_path(folder)}"
    note = f"Real: {table.file['name']}. Fitted: the cost table."
    paths = scatter.render(scatter.steps, steps.points(fitted), stem, command, note)
    click.echo(" · ".join(short_path(path) for path in paths))
    click.echo(f"wrote {short_path(path)} (--table takes it)")
    click.echo(f"next: bench validate --engine {engine} --table {short_path(path)}")
