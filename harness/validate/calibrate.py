"""Calibration of an engine's servers to a cost table with its own machine: `bench calibrate --engine E`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from harness.engines import machine
from harness.engines.costs import fit, fit_whole, quantities
from harness.engines.servers import probe
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Fleet, Kind
from harness.loop import engine as engines
from harness.policy.fields import asked
from harness.policy.types import Inst, UserError
from harness.rows.record import write_bytes
from workloads.models import model_set

SERVED = 1024  # longest prompt + output that is measured, unless models take less
NOTHING = "not measured: nothing here reads it"
COPIES = "not measured: on a processor no copy is timed apart, a start holds them; so large that it adds nothing"


class Calibrated(NamedTuple):
    """The outcome of a calibration: the table's path, name, notes and points."""

    table: Path
    machine: str  # in words
    notes: list[str]
    points: pd.DataFrame  # measured and fitted seconds: a line a step


def calibrate(
    engine: str,
    models: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
    rounds: int = probe.ROUNDS,
    **given: Any,
) -> Calibrated:
    """Measure the servers of an engine for each of these shapes, as far as the folder has not, and write their table.

    Engine `torch` has no servers, and its devices are measured from inside. `given`: further fields of the engine's
    configuration. UserError where they cannot be measured.
    """
    if asked(engine).name == "torch":
        return _torch(engine, models, folder, say, given)
    members = model_set(",".join(f"{model}*{max(probe.BESIDE)}" for model in models)).serving(SERVED).members
    served = tuple(machine.Served(member.name, member.shape) for member in members)
    config = machine.Config(served, **given)
    servers = _servers(engine, config)
    if slots := servers.kind.slots:
        config = replace(config, batch_cap=min(slots, config.batch_cap))
        servers = _servers(engine, config)
    try:
        servers.kind.ready(folder)
        subject = _subject(servers.kind, config, servers.measured_on)
        lines, gaps = probe.profile(subject, folder, say, rounds)
    finally:
        servers.close()
    _needed(lines, gaps)
    try:
        file, fitted = fit_whole.table(lines, _about(engine, servers.kind, config, subject))
    except UserError as error:
        raise UserError(f"{error}{'; ' * bool(gaps)}{'; '.join(lacking(lines, gaps))}") from None
    path = folder / f"{file['kind']}.toml"
    write_bytes(path, fit.dumps(file).encode())
    quantities.forget()
    quantities.machine(str(path))  # it reads as any user's table
    return Calibrated(path, file["name"], [*notes(file, lines), *lacking(lines, gaps)], points(fitted))


def _torch(
    engine: str, models: Sequence[str], folder: Path, say: Callable[[str], None], given: Mapping[str, Any]
) -> Calibrated:
    """Measure the devices of the torch engine, on this host's processors."""
    from harness.engines.torch.engine import Torch
    from harness.validate import torch_table

    made = engines.find(engine)(machine.Config(()), {}, None)
    if made.lacks:
        raise UserError(f"torch needs {made.lacks}")
    assert isinstance(made, Torch)
    path, fitted, lines, file = torch_table.write(folder, models, say, made.fields, given)
    texts = [*fitted_notes(file), *torch_table.notes(lines, path, models)]
    return Calibrated(path, file["name"], texts, points(fitted))


def _servers(name: str, config: machine.Config) -> Servers:
    engine = engines.find(name)(config, {}, machine.machine(config))
    if not isinstance(engine, Servers):
        raise UserError(f"engine {name} has no servers to measure; make gpu measures a GPU")
    return engine


def _subject(kind: Kind, config: machine.Config, about: Mapping[str, str]) -> probe.Subject:
    servers: dict[str, list[Inst]] = {}
    for model in config.models:
        servers.setdefault(model.shape.name, []).append(Inst(model.name, (0,)))
    longest = min(model.max_tokens for model in kind.cluster.models.values())
    most = min(config.chunk_tokens or config.prefill_tokens, longest - 1)
    return probe.Subject(servers, seats(kind), kind.roots, kind.style, config.batch_cap, most, dict(about), kind.sleeps)


def seats(kind: Kind) -> Callable[[Inst, Path], Any]:
    """Return a maker of servers, each with the KV memory that it takes where there is room for it."""
    fleet, room = Fleet(kind), kind.cluster.gpus[0].mem_bytes
    return lambda inst, log: kind.seat(inst, fleet.kv_bytes(inst, room), log, None)


def _about(engine: str, kind: Kind, config: machine.Config, subject: probe.Subject) -> fit_whole.About:
    cluster = kind.cluster
    gpu, model = cluster.gpus[0], next(iter(cluster.models.values()))
    conditions = ", ".join(f"{key} {value}" for key, value in subject.about.items())
    settings = {
        "block_tokens": model.page_bytes // model.kv_token_bytes,
        "batch_cap": config.batch_cap,
        "chunk_tokens": config.chunk_tokens,
        "prefill_tokens": config.prefill_tokens,
        "pool_bytes": gpu.mem_bytes,
        "sharing": "fluid",
    }
    numbers = _card(gpu.kind) if gpu.kind in quantities.gpu_kinds() else _processor()
    numbers["mem_bytes"] = max(numbers["mem_bytes"], (gpu.mem_bytes, "what the engine gives to weights and KV"))
    source = f"bench calibrate --engine {engine} on {conditions}"
    weights = {m.shape.name: cluster.models[m.name].weight_bytes for m in config.models}
    starts = sorted(kind.ways - kind.sleeps.keys())
    return fit_whole.About(f"{asked(engine).name}-{gpu.kind}", conditions, source, settings, numbers, starts, weights)


def _card(kind: str) -> dict[str, tuple[float, str]]:
    spec, sources = quantities.gpu(kind), {s.quantity: s.source for s in quantities.sources([], kind, "none")}
    return {name: (getattr(spec, name), sources[f"{kind}.{name}"]) for name in quantities.GpuSpec._fields[2:]}


def _processor() -> dict[str, tuple[float, str]]:
    """Describe a processor in the words of a GPU's specification."""
    cores, memory = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    numbers: dict[str, tuple[float, str]] = dict.fromkeys(("h2d", "d2h", "nvlink", "net", "disk"), (1e15, COPIES))
    numbers |= dict.fromkeys(("flops", "hbm"), (1e15, NOTHING))
    numbers |= dict.fromkeys(("mem_bytes", "host_bytes"), (memory, "the host's memory"))
    numbers |= {"sms": (cores, "the host's cores"), "sm_step": (cores, "no part of them can be given to a server")}
    return numbers


def fitted_notes(file: Mapping[str, Any]) -> list[str]:
    """List the fitted numbers of steps and of their interference, with their errors."""
    host, co_run = file["host"], file["co_run"]
    texts = [f"before a request is queued: {1e3 * host['api_in_s']:.3g} ms; spread of steps {host['sigma']:.1%}"]
    for model, q in file["steps"].items():
        texts.append(f"{model}: {quantities.error(q)}")
        texts += [
            f"  {part}: {quantities.error({'fit': e}).removeprefix('fit ')}" for part, e in q["held_parts"].items()
        ]
    for phase, beside in co_run.items():
        demand = f"{beside['share']:.0%} of the machine, beside others {beside['factor']:.3g} x what that tells"
        texts.append(f"a step of {phase} asks for {demand}: {quantities.error(beside)}")
    return texts


def points(fitted: fit_whole.Fitted) -> pd.DataFrame:
    """Return a table of measured beside fitted seconds."""
    columns = ["model", "what", "seqs", "prompt", "ctx_tokens", "held", "measured_s", "fitted_s"]
    rows = [(s.model, s.what, s.seqs, s.prompt, s.ctx_tokens, s.held, s.seconds, ours) for s, ours in fitted.points]
    return pd.DataFrame(rows, columns=columns)


NEEDS = {"prefill": "no prefill", "decode": "no decode step", "beside": "no step of servers side by side"}


def _needed(lines: Sequence[Mapping[str, Any]], gaps: Sequence[probe.Gap]) -> None:
    """Raise UserError if no cell of a shape has a measurement of a kind that every table needs."""
    there = {(line["what"], line["params"]["shape"]) for line in lines}
    for gap in gaps:
        if (kind := (gap.probe.what, gap.probe.params["shape"])) not in there and gap.probe.what in NEEDS:
            lacks = f"{NEEDS[gap.probe.what]} could be measured, and a cost table needs some"
            raise UserError(f"{kind[1]}: {lacks}: {gap.why}")


def lacking(lines: Sequence[Mapping[str, Any]], gaps: Sequence[probe.Gap]) -> list[str]:
    """List measurements that were left out, why, and what follows for the table."""

    def cell(what: str, params: Mapping[str, Any]) -> tuple[Any, ...]:
        return what, *((name, value) for name, value in params.items() if name != "round")

    by_cell = dict[tuple[Any, ...], list[probe.Gap]]()
    for gap in gaps:
        by_cell.setdefault(cell(*gap.probe[:2]), []).append(gap)
    every = {cell(line["what"], line["params"]): line for line in lines}
    texts = []
    for key, omitted in by_cell.items():
        first, held = omitted[0].probe, omitted[0].probe.params.get("held", False)
        text = probe.Probe(first.what, {name: value for name, value in first.params.items() if name != "round"}).text
        if key in every:
            follows = "other rounds have it"
        else:
            like = [k for k, line in every.items() if k[0] == first.what and line["params"].get("held", False) == held]
            part = "how servers slow each other down" if first.what == "beside" else f"its {first.what}"
            follows = f"no round has it: {part}{' error of held-out rows' if held else ''} uses {len(like)} others"
        texts.append(f"left out {len(omitted)} x: {text}: {omitted[0].why}; {follows}")
    return [*texts, "the same command again measures what was left out"] if texts else []


def notes(file: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the fitted numbers with their errors, and disturbances of the measurements."""
    texts = fitted_notes(file)
    spans = dict[str, list[float]]()
    for line in lines:
        if line["what"] in {"start", "stop", "sleep", "wake"}:
            way = line["params"].get("way")
            spans.setdefault(f"{line['what']} ({way})" if way else line["what"], []).extend(line["all"])
    texts += [f"{what}: {min(seconds):.3g} to {max(seconds):.3g} s" for what, seconds in spans.items()]
    noisy = [line for line in lines if line["other_cores"] > probe.MOST_OTHERS]
    if noisy:
        worst = max(line["other_cores"] for line in noisy)
        texts.append(
            f"{len(noisy)} of {len(lines)} measurements while others took more than {probe.MOST_OTHERS:g} cores "
            f"(at most {worst:.2f}): measure again on a quiet machine"
        )
    naps = any(line["what"] == "wake" for line in lines)
    return texts if naps else [*texts, "sleep and wake were not measured: these servers take no orders for them"]
