"""Measure servers of an engine over their API, and fit their cost table: `bench calibrate ENGINE`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.calibrate import steps
from harness.calibrate.rows import HOST, RAW, Journal, Measurement, disturbed, measured
from harness.calibrate.tables import Table
from harness.engines import machine
from harness.engines.costs import quantities
from harness.engines.machine import Served
from harness.policy.fields import asked
from harness.policy.types import Shape, UserError

SIDE_BY_SIDE = 4  # servers of a shape, at most
SERVED = 1024  # longest prompt + output that is measured, unless models take less
MOST_OTHERS = 0.2  # cores that others may take during a measurement, as in the verdict on a run
COPIES = "not measured: on a processor no copy is timed apart, a start holds them; so large that it adds nothing"


class Gap(NamedTuple):
    """A measurement that was left out, and the reason."""

    wanted: Measurement  # its seconds are 0
    why: str


def table(
    engine: str,
    make: Callable[..., Any],
    models: Mapping[str, Shape],
    folder: Path,
    say: Callable[[str], None],
    rounds: int,
    given: Mapping[str, Any],
) -> tuple[Table, steps.Fitted]:
    """Measure an engine's servers for models, and return their cost table and its fit.

    Measurements that are already in `folder` are not repeated. `given` has further fields of the engine's
    configuration. Raises UserError if the servers cannot be measured.
    """
    config = machine.Config(tuple(Served(name, shape) for name, shape in models.items()), **given)
    servers = _servers(engine, make, config)
    if slots := servers.kind.slots:
        config = replace(config, batch_cap=min(slots, config.batch_cap))
        servers = _servers(engine, make, config)
    try:
        with servers.timed(config, folder) as rig:
            rows, gaps = timed(rig, folder, say, rounds)
    finally:
        servers.close()
    try:
        file, fitted = steps.table(rows, _about(engine, servers.kind, config, rig.about))
    except UserError as error:
        raise UserError(f"{error}{'; ' * bool(gaps)}{'; '.join(lacking(rows, gaps))}") from None
    return Table(file["kind"], file, lambda _: [*notes(file, rows), *lacking(rows, gaps)]), fitted


def _servers(engine: str, make: Callable[..., Any], config: machine.Config) -> Any:
    made = make(config, {}, machine.machine(config))
    if not hasattr(made, "timed"):
        raise UserError(f"engine {engine} has no servers to measure; make gpu measures a GPU")
    return made


def timed(rig: Any, folder: Path, say: Callable[[str], None], rounds: int) -> tuple[list[Measurement], list[Gap]]:
    """Make the measurements that are missing from the folder's journal.

    `rig` has the plan of all measurements, and makes each of them. Return all rows of the journal, and the measurements
    that were left out. Raises UserError if a server fails.
    """
    book = Journal(folder / RAW)
    _same_machine(folder / HOST, rig.about)
    made = {(row.key, row.source) for row in book.rows}
    plan = rig.plan(rounds)
    left = [wanted for wanted in plan if (Measurement(wanted.quantity, wanted.at, 0.0).key, wanted.source) not in made]
    if len(left) < len(plan):
        say(f"{len(plan) - len(left)} of {len(plan)} measurements stand in {book.path}")
    gaps = list[Gap]()
    for count, wanted in enumerate(left, 1):
        timing = rig.measured(wanted)
        if timing.seconds:
            row = measured(wanted.quantity, wanted.at, timing.seconds, wanted.source, **timing.facts)
            book.add(row)
            others = "".join(f" (others took {row.facts['other_cores']} cores)" for _ in disturbed([row], MOST_OTHERS))
            say(f"{count}/{len(left)} {wanted.text}: {1e3 * row.seconds:.3g} ms{others}")
        elif timing.why:
            gaps.append(Gap(Measurement(wanted.quantity, wanted.at, 0.0, 0, wanted.source), timing.why))
            say(f"{count}/{len(left)} {wanted.text}: left out: {timing.why}")
    return book.rows, gaps


def _same_machine(path: Path, about: Mapping[str, str]) -> None:
    """Write facts about the machine to the file `path`.

    Raises UserError if the file already describes another machine.
    """
    if path.exists():
        known = json.loads(path.read_text("utf-8"))
        if known != dict(about):
            other = next(name for name in {**known, **about} if known.get(name) != about.get(name))
            raise UserError(f"{path}: measured with {other} {known.get(other)!r}, here it is {about.get(other)!r}: -o")
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dict(about), indent=1) + "\n", "utf-8")
    part.replace(path)


def _about(engine: str, kind: Any, config: machine.Config, facts: Mapping[str, str]) -> steps.About:
    cluster = kind.cluster
    gpu, model = cluster.gpus[0], next(iter(cluster.models.values()))
    conditions = ", ".join(f"{key} {value}" for key, value in facts.items())
    settings = {
        "block_tokens": model.page_bytes // model.kv_token_bytes,
        "batch_cap": config.batch_cap,
        "chunk_tokens": config.chunk_tokens,
        "prefill_tokens": config.prefill_tokens,
        "pool_bytes": gpu.mem_bytes,
        "sharing": "fluid",
    }
    numbers = steps.specification(gpu.kind) if gpu.kind in quantities.gpu_kinds() else _processor()
    numbers["mem_bytes"] = max(numbers["mem_bytes"], (gpu.mem_bytes, "what the engine gives to weights and KV"))
    source = f"bench calibrate {engine} on {conditions}"
    weights = {m.shape.name: cluster.models[m.name].weight_bytes for m in config.models}
    starts = sorted(kind.ways - kind.sleeps.keys())
    return steps.About(f"{asked(engine).name}-{gpu.kind}", conditions, source, settings, numbers, starts, weights)


def _processor() -> dict[str, tuple[float, str]]:
    """Return the specification of the host's processor in the form of a GPU's: numbers, each with its source."""
    cores, memory = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    numbers: dict[str, tuple[float, str]] = dict.fromkeys(("h2d", "d2h", "nvlink", "net", "disk"), (1e15, COPIES))
    numbers |= dict.fromkeys(("flops", "hbm"), (1e15, steps.NOTHING))
    numbers |= dict.fromkeys(("mem_bytes", "host_bytes"), (memory, "the host's memory"))
    numbers |= {"sms": (cores, "the host's cores"), "sm_step": (cores, "no part of them can be given to a server")}
    return numbers


def lacking(rows: Sequence[Measurement], gaps: Sequence[Gap]) -> list[str]:
    """List the measurements that were left out, each with the reason and its effect on the table."""
    every, texts, by_cell = {row.key: row for row in rows}, list[str](), dict[tuple[str, str], list[Gap]]()
    for gap in gaps:
        by_cell.setdefault(gap.wanted.key, []).append(gap)
    for key, omitted in by_cell.items():
        first, why = omitted[0]
        if key in every:
            follows = "other rounds have it"
        else:
            like = [row for row in every.values() if row.quantity == first.quantity and row.held_out == first.held_out]
            part = "how servers slow each other down" if first.quantity == "beside" else f"its {first.quantity}"
            part += " error of held-out rows" if first.held_out else ""
            follows = f"no round has it: {part} uses {len(like)} others"
        texts.append(f"left out {len(omitted)} x: {first.text}: {why}; {follows}")
    return [*texts, "the same command again measures what was left out"] if texts else []


def notes(file: Mapping[str, Any], rows: Sequence[Measurement]) -> list[str]:
    """List the fitted numbers with their errors, and what disturbed the measurements."""
    spans = dict[str, list[float]]()
    for row in rows:
        if row.quantity in {"start", "stop", "sleep", "wake"}:
            way = row.at.get("way")
            spans.setdefault(f"{row.quantity} ({way})" if way else row.quantity, []).extend(row.facts["all"])
    texts = [f"{what}: {min(seconds):.3g} to {max(seconds):.3g} s" for what, seconds in spans.items()]
    texts = [*steps.notes(file), *texts, *disturbed(rows, MOST_OTHERS)]
    naps = any(row.quantity == "wake" for row in rows)
    return texts if naps else [*texts, "sleep and wake were not measured: these servers take no orders for them"]
