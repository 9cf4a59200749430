"""`bench timeline`."""

from __future__ import annotations

from pathlib import Path

import click

from harness.answers.commands import short_path
from harness.cli.explain import stored_run
from harness.cli.options import FIGURES, TRUST, examples
from harness.cli.terminal import Terminal
from harness.cli.values import PATH, TARGET
from harness.policy.types import UserError


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
    from harness.rows import record
    from harness.run import perfetto as trace_event
    from harness.run import retrace

    path = out or FIGURES / f"timeline-{run.name}.json"
    if not path.name.endswith((".json", ".json.gz")):
        raise UserError(f"{path}: a trace ends in .json or .json.gz")
    run, about = stored_run(run)
    table = record.read(run)
    with Terminal("request") as teller:
        trace = retrace.retrace(run, table, teller=teller)
    events = trace_event.events(trace, table)
    facts = {"run": run.name, "spec": about["spec"], "fidelity": about["fidelity"]}
    facts |= {"window_starts_us": round(-trace.start_s * 1e6, 3)}
    record.write_bytes(path, trace_event.document(events, facts, path))
    span = f"{trace.end_s - trace.start_s:.0f} s, {table.num_rows:,} requests on {len(trace.gpu_bytes)} GPUs"
    click.echo(f"{short_path(path)}: {len(events):,} events of {span}; open it at https://ui.perfetto.dev")
