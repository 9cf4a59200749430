"""Source: rows of the torch engine timed from inside (validate/torch_timed.py), on cores or on a card.

Steps and their interference are fitted as a server's are (`steps`), a shape by itself. Links have the rates to which
the engine holds them. A way's `fixed_s` is what its loads took beyond their bytes at that rate. The networks that stand
in for shapes are in the table, so the simulator counts the bytes that the engine counts.
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

ABOUT = "calibrate.json"  # says what a stage's rows are
GPU, CTX = "h100", 128  # the GPU whose ratio of load to decode step is kept, and the step's tokens of context
MOST_OTHERS = 0.1  # cores that others may take during a measurement
Shapes = Mapping[str, Shape]  # keyed by name
KIND, POLICIES = "torch-cpu", costs.TABLE
NEVER = 1e15  # a rate that adds nothing
WORST = 10  # steps that are listed
RATIO_OFF = 0.10  # share by which the ratio of load to decode step may differ from the GPU's


def fields(make: Callable[..., Any], models: Shapes) -> Fields:
    """Return the fields of the engine that `make` builds, after a check that it can be timed for these models.

    Raises UserError if the engine lacks something, or if a table of steps has no place for a model.
    """
    made = make(Config(()), {}, None)
    if made.lacks:
        raise UserError(f"torch needs {made.lacks}")
    networks(models)
    given: Fields = made.fields
    return given


def networks(models: Shapes, wide: int = 1) -> dict[str, Shape]:
    """Return the network that stands in for each shape, as a shape of the same name with numbers of 4 bytes.

    Raises UserError for a mixture of experts, because a table of steps has dense models.
    """
    if mixture := next((name for name, shape in models.items() if shape.experts), ""):
        raise UserError(f"{mixture} is a mixture of experts: a table of steps has dense models")
    made = {name: nets.net(shape, wide=wide).shape for name, shape in models.items()}
    return {name: shapes.in_numbers(net._replace(name=name), CPU.float_bytes) for name, net in made.items()}


def link_gbps(rows: Iterable[Measurement], models: Shapes, wide: int) -> dict[str, float]:
    """Return link rates in GB/s, by their fields of `Config`, for an engine on cores.

    The rate of a load is set so that loading the largest model takes as many decode steps as on a GPU. The other links
    have the same ratios to that rate as on the GPU.
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
    """Return the seconds of a load of a shape from the host over those of a decode step, by a GPU's cost table."""
    config = machine.Config((Served(shape.name, shape),), gpu=GPU)
    profile = machine.profile(config, machine.machine(config))
    inst = Inst(shape.name, (0,))
    return profile.load_s(inst, "host") / profile.step_s(inst, 1, CTX)


CARD = ("gpu", "on", "pool_bytes", "sms", "gbps")  # facts that the stage calibrate writes about its devices


class Card(NamedTuple):
    """A card that stages of `make gpu` measured."""

    gpu: str
    on: str  # the device in words
    mem_bytes: int  # bytes that it gave to weights and KV
    sms: int  # SMs of the card, or of the part of it that was a device
    gbps: Mapping[str, float]  # its links' rates

    @property
    def spec(self) -> dict[str, tuple[float, str]]:
        """The numbers of the card's specification, each with its source."""
        part = self.on.partition(";")[0]
        links = {"nvlink" if link == "peer" else link: (1e9 * rate, part) for link, rate in self.gbps.items()}
        return steps.specification(self.gpu) | links | {"sms": (self.sms, part)}


def fitted(
    rows: Sequence[Measurement], models: Shapes, wide: int = 1, card: Card | None = None, conditions: str = ""
) -> tuple[dict[str, Any], steps.Fitted]:
    """Fit the table of these shapes, and return it with the fit behind it.

    The devices are cores of this host; for a journal from elsewhere, `card` and `conditions`, in words, describe them.
    """
    served = networks(models, wide) if card is None else models
    conditions = conditions or ", ".join(f"{key} {value}" for key, value in machine_facts("torch").items())
    source = f"bench calibrate torch on {conditions}"
    spec = _cores(rows, models, wide) if card is None else card.spec
    bytes_s = {link: spec["nvlink" if link == "peer" else link][0] for link in ("h2d", "d2h", "peer", "disk")}
    weights = {name: shapes.weight_bytes(net) for name, net in served.items()}
    settings = {"pool_bytes": CPU.mem_bytes if card is None else card.mem_bytes, "sharing": "fluid"}
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
    return file, fit


def table(rows: Sequence[Measurement], models: Shapes, wide: int = 1) -> tuple[Table, steps.Fitted]:
    """Fit the table of shapes on cores of this host, and return it with the fit behind it."""
    file, fit = fitted(rows, models, wide)
    return Table(file["kind"], file, lambda path: [*steps.notes(file), *notes(rows, path, models)]), fit


def staged(folder: Path) -> Table:
    """Fit a cost table to the measurements that stages of `make gpu` stored in a folder.

    Measurements that are missing become a note if the table can do without them. Raises UserError if it cannot.
    """
    if not (folder / ABOUT).is_file() or not (folder / RAW).is_file():
        raise UserError(f"{folder}: nothing of the stage calibrate is there; the same command of the stages resumes it")
    about, rows = json.loads((folder / ABOUT).read_text("utf-8")), read(folder / RAW)
    models = {name: Shape(name, *rest) for name, *rest in about["shapes"]}
    left = missing(rows, models)
    if needed := [(what, name) for what, name in left if what == "decode" or not any(of(rows, "load"))]:
        raise UserError(f"{folder / RAW}: no {' of '.join(needed[0])}; the same command of the stages resumes it")
    card = None if about["device"] == "cpu" else Card(*(about[key] for key in CARD))
    conditions = ", ".join(f"{key} {value}" for key, value in about["measured_on"].items())
    file, _ = fitted(rows, models, 1, card, conditions + (f", {card.on}" if card else ""))
    later = [f"not measured yet: {', '.join(map(' of '.join, left))}"] if left else []
    if card is None:
        return Table(file["kind"], file, lambda path: [*notes(rows, path, models), *later])
    return Table(file["kind"], file, lambda _: [f"loads by {', '.join(file['ladder'])}", *parts(rows), *later])


def missing(rows: Sequence[Measurement], names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the quantities that are still to be measured, each with its shape."""
    kinds = "decode", "beside", "load", "move", "turn"
    return [(what, name) for name in names for what in kinds if not any(of(rows, what, shape=name))]


def taking_turns(
    co_run: Mapping[str, Mapping[str, Any]], rows: Sequence[Measurement], gpu: str
) -> dict[str, Mapping[str, Any]]:
    """Add to [co_run] how kernels of the card take turns, and the duty of each model whose kernels were timed.

    The duty in a phase is the seconds of a step's kernels back to back over those of the step, as a mean over steps.
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
    """Describe the host's cores by the numbers that a GPU's specification has."""
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
    """Return a rung for each measured way to load: its link, and the seconds of a load beyond those of its bytes."""
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
    """A shape's ratio of a load to a decode step of one sequence: as measured, by its cost table, and on a GPU."""

    shape: str
    measured: float
    table: float
    gpu: float

    @property
    def text(self) -> str:
        """The ratio in a line."""
        off = self.measured / self.gpu - 1
        within = "within" if abs(off) <= RATIO_OFF else "not within"
        return (
            f"{self.shape}: a load over a decode step is {self.measured:.3g}, and {self.gpu:.3g} on {GPU}: "
            f"{100 * off:+.0f} %, {within} {100 * RATIO_OFF:.0f} %; by this table {self.table:.3g}"
        )


def ratios(rows: Sequence[Measurement], path: Path, models: Shapes) -> Iterator[Ratio]:
    """Yield for each shape the measured ratio of load and decode step, that of the table, and that of a GPU."""
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


SIZES = ("weights", "kv token", "step", "load")  # bytes, and seconds of a decode step and of a load from the host


def sizes(models: Shapes, path: Path | None) -> dict[str, tuple[float, ...]]:
    """Return the values that SIZES names, for each shape.

    They come from the table at `path`. Without a table, they are those of the shape itself on a GPU.
    """
    measured = None if path is None else quantities.machine(str(path))
    each = {name: shape if measured is None else measured.served(shape) for name, shape in models.items()}
    served = tuple(Served(name, shape) for name, shape in each.items())
    config = Config(served, gpu=GPU) if measured is None else Config(served, gpu=KIND, host=KIND, table=str(path))
    known = machine.profile(config, machine.machine(config))
    return {
        name: (
            shapes.weight_bytes(shape),
            shapes.kv_token_bytes(shape),
            known.step_s(Inst(name, (0,)), 1, CTX),
            known.load_s(Inst(name, (0,)), "host"),
        )
        for name, shape in each.items()
    }


def relative(models: Shapes, path: Path) -> Iterator[str]:
    """Yield a line for each shape but the first: the values that SIZES names, as ratios to those of the first shape.

    Each ratio is given by the table, and for the original shapes on a GPU.
    """
    here, there, (first, *others) = sizes(models, path), sizes(models, None), models
    for name in others:
        each = zip(SIZES, here[name], here[first], there[name], there[first], strict=True)
        texts = (f"{what} {ours / by:.3g} ({theirs / over:.3g})" for what, ours, by, theirs, over in each)
        yield f"{name} over {first}, and originals on {GPU}: {', '.join(texts)}"


def notes(rows: Sequence[Measurement], path: Path, models: Shapes) -> list[str]:
    """List what was measured and is not in the table, the ratios, and what disturbed the measurements."""
    texts = [*(ratio.text for ratio in ratios(rows, path, models)), *relative(models, path)]
    bytes_s = {link: 1e9 * rate for link, rate in rates(Config((), table=str(path)), CPU).items()}
    texts.append("links, GB/s: " + ", ".join(f"{link} {rate / 1e9:g}" for link, rate in bytes_s.items()))
    for row in of(rows, "move", gbps=sig(bytes_s["h2d"] / 1e9, 3)):
        link, size = row.at["link"], row.facts["bytes"]
        texts.append(
            f"a move of {size / 1e6:.2g} MB of KV ({row.at['shape']}) over {link}: {1e3 * row.seconds:.3g} ms, "
            f"{1e3 * size / bytes_s[link]:.3g} by its rate"
        )
    texts += [
        f"a turn of a step of {row.at['shape']}: {1e3 * row.seconds:.3g} ms, its step {1e3 * row.facts['step_s']:.3g}"
        for row in of(rows, "turn")
    ]
    calls = {row.at["call"]: row.seconds for row in of(rows, "page")}
    texts += [f"to {call} a granule of 4 KiB takes {1e6 * s:.3g} us" for call, s in calls.items()]
    return [*texts, *disturbed(rows, MOST_OTHERS)]


def parts(rows: Iterable[Measurement]) -> Iterator[str]:
    """Yield how much longer steps take while another part of the card does the same.

    The table does not hold this, as it has whole devices only.
    """
    for row in of(rows, "apart"):
        seqs, times = row.at["seqs"], row.seconds / row.facts["alone_s"]
        what = f"a decode step of {seqs}" if seqs else "a prefill"
        yield f"{what} of {row.at['shape']} takes {times:.2f} x while another part of the card does the same"


def known(rows: Iterable[Measurement], models: Shapes, start_s: float) -> Table:
    """Fit the step costs that policies may know of the engine on cores: seven numbers for all networks.

    They are fitted on prefills and decode steps (engines/torch/costs.py). `start_s` is the seconds of starting a
    process.
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
    """Fit the numbers of costs.NAMES on steps and their seconds; return them, and each step's relative error."""
    X = np.array([costs.features(net, work) for net, work, _ in timed])
    y = np.array([seconds for *_, seconds in timed])
    unit = X.max(axis=0)
    solved = nonnegative(X / unit, y, 1 / y) / unit
    return solved.tolist(), X @ solved / y - 1
