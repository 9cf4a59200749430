"""The plan of the torch engine's stages, and their results as runs like any other.

    python -m harness.validate.torch_runs                 writes torch_stages.jsonl, which the stages take requests from
    python -m harness.validate.torch_runs whole.jsonl 1   a plan of one device, for torch_stages --plan

The stages run on machines that have only torch and NumPy (torch_stages.py). This module turns specs into requests
before the stages, and what the stages recorded of the requests into runs after them.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.calibrate.rows import lines
from harness.engines import rows, stamps
from harness.engines.costs import shapes
from harness.engines.stamps import NAMES, Noted
from harness.engines.torch import nets
from harness.engines.torch.kind import CPU
from harness.policy.types import Shape, UserError
from harness.rows import record
from harness.run import spec as specs
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec, another, as_dict
from harness.validate.predicted import PAGE, SERVED, TRACE
from harness.validate.torch_stages import JOURNAL, PLAN, REQUESTS, SEVEN, Workload, workloads

MODELS = "llama-3.2-1b*2,llama-3.2-3b,llama-3.1-8b"
DEVICES = 2  # two halves of one card
EACH = 16  # requests of each model, whose KV the devices hold beside the weights
WARMUP_S = 5.0  # graphs of shares of the SMs are captured at their first use
DRAIN_S = 60.0  # is enough for 512 tokens at the slowest pace that Aegaeon allows, about the TPOT limit
COUNTS = ("model", "prompt_tokens", "output_tokens")
# A whole card serves chats, a tenth of whose prompts have 1,555 tokens or more, by systems that need no second card.
ONE_CARD = {"chats": ("static", "prism", "pdmux"), "more chats": ("muxserve:plusplus", "qlm")}
LONG = 4096  # longest prompt + output
CHATS = f"aegaeon-like+rate_rps=1+lengths=sharegpt+max_tokens={LONG}"
CHATS_S = 16.0


class Serving(NamedTuple):
    """The load of a kind of device."""

    device: str
    slo_s: tuple[float, float]  # TTFT and TPOT
    rates: tuple[float, float]  # requests a second and model of stage validate; stage systems has the first
    chats: tuple[float, float]  # requests a second and model of chats, on one whole device


SERVINGS = (Serving("cpu", (3.0, 0.1), (0.5, 1.0), (0.1, 0.2)), Serving("cuda", (0.5, 0.05), (4.0, 6.0), (3.0, 6.0)))


def spec(
    serving: Serving,
    rate: float,
    seed: int,
    window_s: float,
    devices: int = DEVICES,
    trace: str = TRACE,
    served: int = SERVED,
) -> Spec:
    """Return the spec of a workload as the simulator of a card runs it; `workload` replaces its system."""
    base = Spec(
        "prism",
        models=MODELS,
        gpus=devices,
        trace=trace,
        served=served,
        rate_scale=rate,
        seed=seed,
        window_s=window_s,
        warmup_s=WARMUP_S,
        drain_s=DRAIN_S,
        chunk_tokens=2048,
        batch_cap=256,
        mem_fraction=0.9,
        admission="prompt",
    )
    ttft_s, tpot_s = serving.slo_s
    slo_s = tuple((name, ttft_s, tpot_s) for name in Setup(base).models.names)
    return replace(base, slo=f"absolute:ttft={ttft_s:g},tpot={tpot_s:g}", slo_s=slo_s)


def workload(stage: str, name: str, serving: Serving, base: Spec, systems: Sequence[str] = SEVEN) -> Workload:
    """Return a line of the plan: the requests and machine of the spec `base`, and a spec for each system."""
    by_system = {text: resolve(another(base, text)) for text in systems}
    setup = Setup(resolve(base))
    config, jobs = setup.config, setup.jobs()
    served = [_served(m.shape, serving.device) for m in config.models]
    assert base.served is not None
    longest = sum(EACH // config.gpus * base.served * kv_bytes for _, kv_bytes in served)
    heaviest = sorted(w for w, _ in served)[-(len(served) // config.gpus) :]  # a device's share of the models
    pool_bytes = math.ceil((sum(heaviest) + longest) / PAGE) * PAGE
    settings = "gpus node_gpus block_tokens batch_cap chunk_tokens prefill_tokens watermark seed start_s".split()
    columns = {name: getattr(jobs, name) for name in (*COUNTS, "arrival_s", "ttft_slo_s", "tpot_slo_s")}
    return Workload(
        stage,
        name,
        serving.device,
        setup.end_s,
        {"pool_bytes": pool_bytes} | {name: getattr(config, name) for name in settings},
        [[m.name, [m.ttft_slo_s, m.tpot_slo_s], list(_dense(m.shape))] for m in config.models],
        {model: list(plan) for model, plan in config.plan.items()},
        {name: _plain(column) for name, column in columns.items()},
        {text: as_dict(replace(each, pool_bytes=pool_bytes)) for text, each in by_system.items()},
    )


def _served(shape: Shape, device: str) -> tuple[int, int]:
    """Return the bytes of a shape's weights and of a token's KV on a kind of device."""
    if device == "cuda":
        return shapes.weight_bytes(shape), shapes.kv_token_bytes(shape)
    net = nets.net(shape, CPU.as_it_is, CPU.float_bytes)
    return net.weight_bytes, net.kv_token_bytes


def _dense(shape: Shape) -> Shape:
    if lacking := shapes.beyond_dense(shape):
        raise UserError(f"{shape.name} has {lacking}: engine torch serves dense models in 16 bits")
    return shape


def _plain(column: Any) -> list[Any]:
    values: list[Any] = column.tolist()
    return [x if math.isfinite(x) else None for x in values]


def plan(minute_s: float = 60.0, window_s: float = 20.0, devices: int = DEVICES) -> Iterator[Workload]:
    """Yield the lines of the plan for each kind of device.

    All seven systems run at one rate, those of `validate` at two. Each stage of chats on one device runs at two rates.
    """
    for serving in SERVINGS:
        base = spec(serving, serving.rates[0], 0, minute_s, devices)
        yield workload("systems", f"{serving.rates[0]:g} req/s a model", serving, base)
        for rate in serving.rates:
            yield workload("validate", f"{rate:g} req/s a model", serving, spec(serving, rate, 1, window_s, devices))
        for (stage, systems), rate in product(ONE_CARD.items(), serving.chats):
            chats = spec(serving, rate, 1, CHATS_S, 1, CHATS, LONG)
            yield workload(stage, f"{rate:g} req/s a model", serving, chats, systems)


def write(path: Path = PLAN, devices: int = DEVICES, **seconds: float) -> None:
    """Write the plan."""
    every = plan(devices=devices, **seconds)
    lines = [json.dumps(line._asdict(), separators=(",", ":"), allow_nan=False) + "\n" for line in every]
    record.write_bytes(path, "".join(lines).encode())


# ------------------------------------------------------------------ results


def runs(folder: Path) -> tuple[Path, list[str]]:
    """Write the stages of a folder as runs into its `runs`, replacing all runs there.

    Return that folder, and a line for each run of a system that is not done. Raises UserError if none is done.
    """
    last = {(line["stage"], line["run"]): line for line in lines(folder / JOURNAL)}
    served = {key: line for key, line in last.items() if key[0] in {"systems", "validate", *ONE_CARD}}
    if not served:
        raise UserError(f"{folder / JOURNAL} holds no runs of systems; make gpu writes them")
    notes = [f"{name}: {line['state']}: {line['why']}" for (_, name), line in served.items() if line["state"] != "done"]
    done = {key: line for key, line in served.items() if line["state"] == "done"}
    kept = set[Path]()
    for (stage, run), line in done.items():
        text, _, name = run.partition(", ")
        device = line["device"]
        (of,) = (w for w in workloads(folder / REQUESTS, device) if (w.stage, w.name) == (stage, name))
        kept.add(_write(folder / "runs", of, of.specs[text], line))
    if not done:
        raise UserError(f"{folder / JOURNAL}: no run of systems is done: {'; '.join(notes)}")
    for path in (folder / "runs").iterdir():
        if path not in kept:
            shutil.rmtree(path)
    return folder / "runs", notes


def _write(out: Path, of: Workload, values: Mapping[str, Any], line: Mapping[str, Any]) -> Path:
    """Write one run; return its folder."""
    measured_on = ", ".join(f"{key} {value}" for key, value in line["measured_on"].items())
    made = specs.stored(values)
    fields = tuple(sorted({**dict(made.fields), **line["fields"]}.items()))
    made = replace(
        made,
        engine="torch",
        gpu=line["gpu"],
        decision_s=0.0,
        control_s=0.0,
        noise=0.0,
        fields=fields,
        measured_on=measured_on,
    )
    about = {
        "spec": as_dict(made),
        "spec_hash": made.hash8,
        "code_hash": "",
        "fidelity": line["fidelity"],
        "tier": "synthetic",
        "fit": None,
        "plan_origin": made.plan,
        "stats": line["stats"],
        "skipped": None,
        "infeasible": None,
        "refused": line["refused"],
        "first_refused": line["first_refused"],
        "end_s": line["noted"]["end_s"],
        "measured_on": line["measured_on"],
    }
    about |= {"verdict": line["verdict"]} if "verdict" in line else {}
    batches = rows.noted(noted(line["noted"]), of.requests(), line["fidelity"], token_times=False)
    record.write(out / made.folder, batches, about, side=line["side"])
    return out / made.folder


def noted(line: Mapping[str, Any]) -> Noted:
    """Return an engine's record of its requests, read from the JSON of a journal's line."""
    R = np.zeros(len(line["ends"]), stamps.FIELDS)
    for name, column in line["R"].items():
        none = math.inf if name == "arrival" else math.nan
        R[name] = _values(column, len(R), none)
    places = [tuple(place) for place in line["places"]]
    ends = np.array(line["ends"], np.int8)
    assert ends.max(initial=0) < len(NAMES)
    late_s = np.array(_values(line["late_s"], len(R), math.nan), np.float64)
    return Noted(R, ends, [], places, late_s, line["end_s"])


def _values(column: Any, count: int, none: float) -> list[float]:
    """Return a column as a list: a single value stands for `count` equal ones, and None becomes `none`."""
    every = column if isinstance(column, list) else [column] * count
    return [none if x is None else x for x in every]


def judged(folder: Path, table: str | None, rule: str | None) -> tuple[Path, str | None, str, list[str]]:
    """Write a folder's runs; return their folder, a cost table, an SLO, and a line for each run that is not done.

    `table` defaults to the folder's own table, if it has any, and `rule` to the limits that its systems ran under.
    """
    at, notes = runs(folder)
    tables = sorted(folder.glob("torch-*.toml"))
    device = next(line["device"] for line in lines(folder / JOURNAL) if "device" in line)
    ttft_s, tpot_s = workloads(folder / REQUESTS, device)[0].models[0][1]
    by = table or (str(tables[0]) if tables else None)
    return at, by, rule or f"absolute:ttft={ttft_s:g},tpot={tpot_s:g}", notes


if __name__ == "__main__":
    at = Path(sys.argv[1]) if len(sys.argv) > 1 else PLAN
    write(at, int(sys.argv[2]) if len(sys.argv) > 2 else DEVICES)
    print(f"{at}: {len(at.read_text('utf-8').splitlines())} workloads, {at.stat().st_size // 1024} KiB")
