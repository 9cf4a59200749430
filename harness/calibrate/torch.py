"""Fit cost tables of the torch engine, on CPU cores or on a card, to steps timed inside it (validate/torch_timed.py).

Steps, and their slowdown when they run side by side, are fitted as for servers (`steps`), separately for each shape.
Link rates are the rates to which the engine limits its copies. The `fixed_s` of a way to load is the time of a load
beyond the time of its bytes at the link's rate. On cores, smaller networks stand in for the shapes. The table contains
the dimensions of these networks, so that the simulator counts the same bytes as the engine.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.calibrate import steps
from harness.calibrate.rows import F8, RAW, Measurement, disturbed, of, read
from harness.calibrate.tables import Table, error
from harness.engines import machine
from harness.engines.costs import quantities, shapes
from harness.engines.costs.coefficients import nonnegative
from harness.engines.costs.quantities import sig
from harness.engines.costs.whole import Network
from harness.engines.machine import Config, Served
from harness.engines.torch import costs, nets
from harness.engines.torch.kind import CPU, GRANULE, PART, WAYS
from harness.engines.torch.links import CHUNK_S, LEAST
from harness.engines.torch.nets import Net
from harness.engines.torch.setting import Fields, rates
from harness.engines.wallclock import machine_facts
from harness.policy.types import GIB, Inst, Shape, UserError

ABOUT = "calibrate.json"  # the card that a folder's rows are of
GPU, CTX = "h100", 128  # the GPU whose ratio of load to decode step is kept, and the step's tokens of context
MOST_OTHERS = 0.1  # cores that others may take during a measurement
Shapes = Mapping[str, Shape]  # keyed by name
KIND, POLICIES = "torch-cpu", costs.TABLE
NEVER = 1e15  # a rate that adds nothing
WORST = 10  # steps that are listed
RATIO_OFF = 0.10  # share by which the ratio of load to decode step may differ from the GPU's


def fields(make: Callable[..., Any], models: Shapes) -> Fields:
    """Check that the engine that `make` builds can be timed for these models, and return its fields.

    Raises UserError if the engine lacks something, or if a model is a mixture of experts.
    """
    made = make(Config(()), {}, None)
    if made.lacks:
        raise UserError(f"torch needs {made.lacks}")
    networks(models)
    given: Fields = made.fields
    return given


def networks(models: Shapes, wide: int = 1) -> dict[str, Shape]:
    """Return the network that stands in for each shape, as a shape of the same name with numbers of 4 bytes.

    Raises UserError for a mixture of experts, because a table of steps describes only dense models.
    """
    if mixture := next((name for name, shape in models.items() if shape.experts), ""):
        raise UserError(f"{mixture} is a mixture of experts: a table of steps has dense models")
    made = {name: nets.net(shape, wide=wide).shape for name, shape in models.items()}
    return {name: shapes.in_numbers(net._replace(name=name), CPU.float_bytes) for name, net in made.items()}


def link_gbps(rows: Iterable[Measurement], models: Shapes, wide: int) -> dict[str, float]:
    """Return link rates in GB/s for an engine on cores, keyed by the names of fields of `Config`.

    The host link's rate is set so that the time to load the largest model, over the time of its decode step, is as on a
    GPU. Every other rate keeps the ratio to the host link's rate that it has on that GPU.
    """
    sizes = {name: nets.net(shape, wide=wide).weight_bytes for name, shape in models.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    (step,) = of(rows, "decode", shape=largest, seqs=1, ctx=CTX)
    h2d = sig(sizes[largest] / (gpu_ratio(models[largest]) * step.seconds) / 1e9, 3)
    spec = quantities.gpu(GPU)
    return {
        "pcie_gbps": h2d,
        "nvlink_gbps": sig(h2d * spec.nvlink / spec.h2d, 3),
        "disk_gbps": sig(h2d * spec.disk / spec.h2d, 3),
    }


def gpu_ratio(shape: Shape) -> float:
    """Return the seconds of loading a shape's weights from the host, divided by those of its decode step, on a GPU.

    Both are predicted by the GPU's cost table.
    """
    config = machine.Config((Served(shape.name, shape),), gpu=GPU)
    profile = machine.profile(config, machine.machine(config))
    inst = Inst(shape.name, (0,))
    return profile.load_s(inst, "host") / profile.step_s(inst, 1, CTX)


class Card(NamedTuple):
    """The card on which the engine was timed, as a file in the folder of the measurements describes it."""

    gpu: str
    on: str  # the device in words
    pool_bytes: int  # bytes that it gave to weights and KV
    sms: int
    gbps: Mapping[str, float]  # its links' rates
    measured_on: Mapping[str, str]

    @property
    def conditions(self) -> str:
        """The machine and the card, in words."""
        return ", ".join((*(f"{key} {value}" for key, value in self.measured_on.items()), self.on))

    @property
    def spec(self) -> dict[str, tuple[float, str]]:
        """The numbers of the card's specification, each with its source."""
        part = self.on.partition(";")[0]
        links = {"nvlink" if link == "peer" else link: (1e9 * rate, part) for link, rate in self.gbps.items()}
        return steps.specification(self.gpu) | links | {"sms": (self.sms, part)}


def card(folder: Path) -> Card | None:
    """Return the card on which a folder's rows were measured; None if they were measured on cores."""
    if not (folder / ABOUT).is_file():
        return None
    about = json.loads((folder / ABOUT).read_text("utf-8"))
    return Card(*(about[key] for key in Card._fields))


def table(
    rows: Sequence[Measurement], models: Shapes, wide: int = 1, card: Card | None = None
) -> tuple[Table, steps.Fitted]:
    """Fit a cost table for these shapes, and return it with the result of the fit.

    The devices are `card` or, without it, cores of this host. Raises UserError if measurements for the fit are missing.
    """
    if not any(of(rows, "load")):
        raise UserError("no load was measured; the same command again measures it")
    served = networks(models, wide) if card is None else models
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts("torch").items())
    conditions = facts if card is None else card.conditions
    source = f"bench calibrate torch on {conditions}"
    spec = _cores(rows, models, wide) if card is None else card.spec
    bytes_s = {link: spec["nvlink" if link == "peer" else link][0] for link in ("h2d", "d2h", "peer", "disk")}
    weights = {name: shapes.weight_bytes(net) for name, net in served.items()}
    settings = {"pool_bytes": CPU.mem_bytes if card is None else card.pool_bytes, "sharing": "fluid"}
    kind = KIND if card is None else f"torch-{card.gpu}"
    about = steps.About(kind, conditions, source, settings, spec, (), weights)
    mine = [row for row in rows if row.at.get("shape") in served]
    file, fit = steps.table(mine, about)
    if card is None:
        numbers = {"number_bytes": CPU.float_bytes}
        file["networks"] = {
            name: {key: numbers.get(key) or getattr(net, key) for key in Network.__dataclass_fields__}
            for name, net in served.items()
        }
    piece_bytes = PART if card is not None else max(LEAST, int(bytes_s["h2d"] * CHUNK_S))
    file = {"kind": file.pop("kind"), "name": file.pop("name"), "piece_bytes": piece_bytes, **file}
    file["pages"] = {"buffer_bytes": CPU.buffer if card is None else GRANULE, "kept": 0}
    loads = [row for row in of(mine, "load") if math.isclose(1e9 * row.at["gbps"], bytes_s["h2d"])]
    file["ladder"] = ladder(loads, bytes_s, source)
    if card is not None:
        file["co_run"] = taking_turns(file["co_run"], rows, card.gpu)
        return Table(kind, file, lambda _: steps.notes(file)), fit
    return Table(kind, file, lambda path: [*steps.notes(file), *notes(rows, path, models)]), fit


def of_folder(folder: Path, shape: Callable[[str], Shape]) -> Table:
    """Fit a card's cost table again to the measurements in a folder; `shape` returns the shape of a given name."""
    rows = read(folder / RAW)
    names = dict.fromkeys(row.at["shape"] for row in of(rows, "decode"))
    return table(rows, {name: shape(name) for name in names}, card=card(folder))[0]


def taking_turns(
    co_run: Mapping[str, Mapping[str, Any]], rows: Sequence[Measurement], gpu: str
) -> dict[str, Mapping[str, Any]]:
    """Return `co_run` with two additions: the constants by which kernels take turns, and the duty of models.

    The constants are those of the GPU kind `gpu`. The duty of a model in a phase is the fraction of a step's time that
    its kernels take when they run back to back, averaged over steps. Only models with timed kernels get a duty.
    """
    out = {**co_run, "turns": quantities.quantities(gpu)["co_run"]}
    for phase in ("prefill", "decode"):
        parts = defaultdict[str, list[float]](list)
        for row in of(rows, "kernels", phase=phase):
            parts[row.at["shape"]].append(min(1.0, row.seconds / row.facts["step_s"]))
        if parts:
            duty = {name: quantities.sig(float(np.mean(part)), 3) for name, part in parts.items()}
            source = f"{co_run[phase]['source']}; duty: seconds of a step's kernels back to back over those of the step"
            out[phase] = {**co_run[phase], "duty": duty, "source": source}
    return out


def _cores(rows: Sequence[Measurement], models: Shapes, wide: int) -> dict[str, tuple[float, str]]:
    """Return the specification of the host's cores in the form of a GPU's: numbers, each with its source."""
    links: dict[str, Any] = link_gbps(rows, models, wide)
    gbps = rates(Config((), **links), CPU)
    by_name = {"h2d": "h2d", "d2h": "d2h", "nvlink": "peer", "net": "peer", "disk": "disk"}
    return {
        **{name: (1e9 * gbps[link], "to which the engine holds its copies") for name, link in by_name.items()},
        **dict.fromkeys(("flops", "hbm"), (NEVER, steps.NOTHING)),
        "mem_bytes": (64 * GIB, "a bound: `pool_bytes` is what a run gives a device"),
        "host_bytes": (CPU.host_bytes, "KV in the host's memory"),
        "sms": (CPU.sms, "parts of a core, as many as an H100 has"),
        "sm_step": (CPU.sm_choices[0], "as on an H100"),
    }


def ladder(rows: Sequence[Measurement], bytes_s: Mapping[str, float], source: str) -> dict[str, dict[str, Any]]:
    """Return the cost of each measured way to load: its link, and the seconds of a load beyond those of its bytes."""
    rungs = {}
    for name, way in WAYS.items():
        link = "disk" if way.source == "disk" else "spread" if way.spread else "pcie"
        rate = bytes_s["disk" if way.source == "disk" else "h2d"] * way.part
        beyond = [
            row.seconds - row.facts["bytes"] / rate / row.facts.get("links", 1) for row in of(rows, "load", way=name)
        ]
        if not beyond:
            continue  # a card's process has no start of its own
        rungs[name] = {
            "fixed_s": quantities.sig(max(0.0, float(np.median(beyond))), 4),
            "link": link,
            **({"bytes_s": rate} if way.part < 1 else {}),
            "source": f"{source}: from the order to its end",
        }
    return rungs


class Ratio(NamedTuple):
    """The seconds of a shape's load, divided by those of its decode step of one sequence.

    The ratio is given three times: as measured, as the cost table predicts, and on a GPU.
    """

    shape: str
    measured: float
    table: float
    gpu: float

    @property
    def text(self) -> str:
        """The ratios in words, on one line."""
        off = self.measured / self.gpu - 1
        within = "within" if abs(off) <= RATIO_OFF else "not within"
        return (
            f"{self.shape}: a load over a decode step is {self.measured:.3g}, and {self.gpu:.3g} on {GPU}: "
            f"{100 * off:+.0f} %, {within} {100 * RATIO_OFF:.0f} %; by this table {self.table:.3g}"
        )


def ratios(rows: Sequence[Measurement], path: Path, models: Shapes) -> Iterator[Ratio]:
    """Yield the ratio of a load to a decode step for each shape: measured, by the table `path`, and on a GPU."""
    measured = quantities.machine(str(path))
    assert measured is not None
    served = tuple(Served(name, measured.served(shape)) for name, shape in models.items())
    config = machine.Config(served, gpu=KIND, host=KIND, table=str(path))
    profile = machine.profile(config, machine.machine(config))
    for name, shape in models.items():
        (load,) = of(rows, "load", shape=name, way="host", gbps=sig(measured.spec.h2d.value / 1e9, 3))
        (step,) = of(rows, "decode", shape=name, seqs=1, ctx=CTX)
        inst = Inst(name, (0,))
        by_table = profile.load_s(inst, "host") / profile.step_s(inst, 1, round(step.facts["ctx_tokens"]))
        yield Ratio(name, load.seconds / step.seconds, by_table, gpu_ratio(shape))


def notes(rows: Sequence[Measurement], path: Path, models: Shapes) -> list[str]:
    """List the ratios of loads to decode steps, the rates of the links, and what disturbed the measurements."""
    texts = [ratio.text for ratio in ratios(rows, path, models)]
    bytes_s = {link: 1e9 * rate for link, rate in rates(Config((), table=str(path)), CPU).items()}
    texts.append("links, GB/s: " + ", ".join(f"{link} {rate / 1e9:g}" for link, rate in bytes_s.items()))
    return [*texts, *disturbed(rows, MOST_OTHERS)]


def known(rows: Iterable[Measurement], models: Shapes, start_s: float) -> Table:
    """Fit the step costs that policies may know about the engine on cores: seven numbers for all networks.

    They are fitted to prefills and decode steps (engines/torch/costs.py). `start_s` is the time that a process takes to
    start.
    """
    made = {name: nets.net(shape) for name, shape in models.items()}
    every = [(made[row.at["shape"]], _work(row), row) for row in rows if row.quantity in steps.PHASES]
    numbers, off = seven([(net, work, row.seconds) for net, work, row in every])
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts("torch").items())
    file = {name: sig(value, 4) for name, value in zip(costs.NAMES, numbers, strict=True)} | {
        "start_s": sig(start_s, 3),
        "source": f"bench calibrate torch-steps on {facts}",
        "formula": "harness/engines/torch/costs.py",
        "fit": error(1 + off, np.ones(len(off))),
    }
    worst = sorted(zip(every, off.tolist(), strict=True), key=lambda pair: -abs(pair[1]))[:WORST]
    texts = [f"{100 * e:+.0f} %  {row.at['shape']} {row.text}: {1e3 * row.seconds:.3g} ms" for (*_, row), e in worst]
    return Table(
        POLICIES.stem, file, lambda _: [*texts, f"{len(off)} steps, median error {np.median(np.abs(off)):.1%}"]
    )


def _work(row: Measurement) -> costs.Work:
    step = steps.work(row)
    return costs.Work(step.seqs, step.ctx_tokens, int(step.prompt > 0), step.prompt, step.prompt**2 / 2)


def seven(timed: Sequence[tuple[Net, costs.Work, float]]) -> tuple[list[float], F8]:
    """Fit the numbers in costs.NAMES to timed steps; return them, and the relative error of each step."""
    X = np.array([costs.features(net, work) for net, work, _ in timed])
    y = np.array([seconds for *_, seconds in timed])
    unit = X.max(axis=0)
    solved = nonnegative(X / unit, y, 1 / y) / unit
    return solved.tolist(), X @ solved / y - 1
