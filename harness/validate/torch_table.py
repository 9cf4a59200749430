"""The cost table of the torch engine's devices, fitted to what `torch_timed` measured; and what the table leaves out.

Steps and their interference are fitted as a server's are (`fit_whole`), a shape by itself. Links have the rates to
which the engine holds them. A way's `fixed_s` is what its loads took beyond their bytes at that rate. The networks that
stand in for shapes are in the table, so the simulator counts the bytes that the engine counts.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.engines import machine
from harness.engines.costs import fit, fit_whole, quantities, shapes
from harness.engines.costs.whole import Network
from harness.engines.machine import Config, Served
from harness.engines.torch import nets
from harness.engines.torch.kind import CPU, GRANULE, PART
from harness.engines.torch.links import CHUNK_S, LEAST
from harness.engines.torch.residents import WAYS
from harness.engines.torch.setting import Fields, rates
from harness.engines.wallclock import machine_facts
from harness.policy.types import GIB, Inst, Shape, UserError
from harness.rows.record import write_bytes
from harness.validate.torch_stages import ABOUT
from harness.validate.torch_timed import CTX, GPU, MOST_OTHERS, RAW, gpu_ratio, link_gbps, measure, missing, of
from workloads.models import shape

KIND = "torch-cpu"
NEVER = 1e15  # a rate that adds nothing
NOTHING = "not measured: nothing here reads it"
RATIO_OFF = 0.10  # between the ratio of a load to a decode step and the GPU's


def networks(names: Sequence[str], wide: int = 1) -> dict[str, Shape]:
    """Return the network that stands for each shape, under the shape's name and in its numbers of 4 bytes.

    Raises UserError for a mixture of experts: the form of a table has dense models.
    """
    if mixture := next((name for name in names if shape(name).experts), ""):
        raise UserError(f"{mixture} is a mixture of experts: a table of steps has dense models")
    made = {name: nets.net(shape(name), wide=wide).shape for name in names}
    return {name: shapes.in_numbers(net._replace(name=name), CPU.float_bytes) for name, net in made.items()}


CARD = ("gpu", "on", "pool_bytes", "sms", "gbps")  # of what the stage calibrate says of its devices


class Card(NamedTuple):
    """A card that stages of `make gpu` measured."""

    gpu: str
    on: str  # in words
    mem_bytes: int  # that it gave to weights and KV
    sms: int  # of it, or of the part of it that was a device
    gbps: Mapping[str, float]  # of its links, likewise

    @property
    def spec(self) -> dict[str, tuple[float, str]]:
        """Its numbers, each with its source."""
        known, sources = (
            quantities.gpu(self.gpu),
            {s.quantity: s.source for s in quantities.sources([], self.gpu, "none")},
        )
        each = {name: (getattr(known, name), sources[f"{self.gpu}.{name}"]) for name in quantities.GpuSpec._fields[2:]}
        part = self.on.partition(";")[0]
        links = {"nvlink" if link == "peer" else link: (1e9 * rate, part) for link, rate in self.gbps.items()}
        return each | links | {"sms": (self.sms, part)}


def table(
    lines: Sequence[Mapping[str, Any]], names: Sequence[str], wide: int = 1, card: Card | None = None,
    conditions: str = "",
) -> tuple[dict[str, Any], fit_whole.Fitted]:  # fmt: skip
    """Fit the table of these shapes from a journal's lines, and return it with the fit behind it.

    The devices are cores of this host, or those of a journal from elsewhere: a `card`, `conditions` in words.
    """
    served = networks(names, wide) if card is None else {name: shape(name) for name in names}
    conditions = conditions or ", ".join(f"{key} {value}" for key, value in machine_facts("torch").items())
    source = f"bench calibrate --engine torch on {conditions}"
    spec = _cores(lines, names, wide) if card is None else card.spec
    bytes_s = {
        link: spec[name][0] for link, name in (("h2d", "h2d"), ("d2h", "d2h"), ("peer", "nvlink"), ("disk", "disk"))
    }
    weights = {name: shapes.weight_bytes(net) for name, net in served.items()}
    settings = {"pool_bytes": CPU.mem_bytes if card is None else card.mem_bytes, "sharing": "fluid"}
    kind = KIND if card is None else f"torch-{card.gpu}"
    about = fit_whole.About(kind, conditions, source, settings, spec, (), weights)
    mine = [line for line in lines if line["params"].get("shape") in served]
    file, fitted = fit_whole.table(mine, about)
    if card is None:
        numbers = {"number_bytes": CPU.float_bytes}
        file["networks"] = {
            name: {key: numbers.get(key) or getattr(net, key) for key in Network.__dataclass_fields__}
            for name, net in served.items()
        }
    piece_bytes = PART if card is not None else max(LEAST, int(bytes_s["h2d"] * CHUNK_S))
    file = {"kind": file.pop("kind"), "name": file.pop("name"), "piece_bytes": piece_bytes, **file}
    file["pages"] = {"buffer_bytes": CPU.buffer if card is None else GRANULE, "kept": 0}
    timed = [line for line in of(mine, "load") if math.isclose(1e9 * line["params"]["gbps"], bytes_s["h2d"])]
    file["ladder"] = ladder(timed, bytes_s, source)
    if card is not None:
        file["co_run"] = taking_turns(file["co_run"], lines, card.gpu)
    return file, fitted


def taking_turns(
    co_run: Mapping[str, Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], gpu: str
) -> dict[str, Mapping[str, Any]]:
    """Add to [co_run] how kernels of the card take turns, and each model's duty as far as its kernels were timed.

    The duty of a phase is the mean over its steps of the seconds of their kernels back to back over the step's.
    """
    out = {**co_run, "turns": quantities.quantities(gpu)["co_run"]}
    for phase in ("prefill", "decode"):
        parts = defaultdict[str, list[float]](list)
        for line in of(lines, "kernels", phase=phase):
            parts[line["params"]["shape"]].append(min(1.0, line["p50"] / line["facts"]["step_s"]))
        if parts:
            duty = {name: quantities.sig(float(np.mean(part)), 3) for name, part in parts.items()}
            source = f"{co_run[phase]['source']}; duty: seconds of a step's kernels back to back over those of the step"
            out[phase] = {**co_run[phase], "duty": duty, "source": source}
    return out


def _cores(lines: Sequence[Mapping[str, Any]], names: Sequence[str], wide: int) -> dict[str, tuple[float, str]]:
    """Describe cores in the words of a GPU's specification."""
    links: dict[str, Any] = link_gbps(lines, {name: shape(name) for name in names}, wide)
    gbps = rates(Config((), **links), CPU)
    limited = "to which the engine holds its copies"
    return {
        "h2d": (1e9 * gbps["h2d"], limited), "d2h": (1e9 * gbps["d2h"], limited),
        "nvlink": (1e9 * gbps["peer"], limited), "net": (1e9 * gbps["peer"], limited),
        "disk": (1e9 * gbps["disk"], limited), "flops": (NEVER, NOTHING), "hbm": (NEVER, NOTHING),
        "mem_bytes": (64 * GIB, "a bound: `pool_bytes` is what a run gives a device"),
        "host_bytes": (CPU.host_bytes, "KV in the host's memory"),
        "sms": (CPU.sms, "parts of a core, as many as an H100 has"), "sm_step": (CPU.sm_choices[0], "as on an H100"),
    }  # fmt: skip


def ladder(lines: Sequence[Mapping[str, Any]], bytes_s: Mapping[str, float], source: str) -> dict[str, dict[str, Any]]:
    """Return a rung for each way to load: its link, and the seconds that it takes beyond its bytes."""
    rungs = {}
    for name, way in WAYS.items():
        link = "disk" if way.source == "disk" else "spread" if way.spread else "pcie"
        rate = bytes_s["disk" if way.source == "disk" else "h2d"] * way.part
        beyond = [
            line["p50"] - line["facts"]["bytes"] / rate / line["facts"].get("links", 1)
            for line in of(lines, "load", way=name)
        ]
        if not beyond:
            continue  # a card's process has no start of its own
        rungs[name] = {
            "fixed_s": quantities.sig(max(0.0, float(np.median(beyond))), 4), "link": link,
            **({"bytes_s": rate} if way.part < 1 else {}), "source": f"{source}: from the order to its end",
        }  # fmt: skip
    return rungs


class Ratio(NamedTuple):
    """A load over a decode step of one sequence, of a shape: as measured, by the cost table of it, and on a GPU."""

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


def ratios(lines: Sequence[Mapping[str, Any]], path: Path, names: Sequence[str]) -> Iterator[Ratio]:
    """Yield for each shape the measured ratio of load and decode step, that of the table, and that of a GPU."""
    measured = quantities.machine(str(path))
    assert measured is not None
    served = tuple(Served(name, measured.served(shape(name))) for name in names)
    config = machine.Config(served, gpu=KIND, host=KIND, table=str(path))
    profile = machine.profile(config, machine.machine(config))
    for name in names:
        (load,) = of(lines, "load", shape=name, way="host", gbps=quantities.sig(measured.spec.h2d.value / 1e9, 3))
        (step,) = of(lines, "decode", shape=name, seqs=1, ctx=CTX)
        inst = Inst(name, (0,))
        by_table = profile.load_s(inst, "host") / profile.step_s(inst, 1, round(step["facts"]["ctx_tokens"]))
        yield Ratio(name, load["p50"] / step["p50"], by_table, gpu_ratio(shape(name)))


class Sizes(NamedTuple):
    """Sizes of a shape: bytes, and seconds of a decode step and of a load from the host."""

    weights: float
    kv_token: float
    step: float
    load: float


def sizes(names: Sequence[str], path: Path | None) -> dict[str, Sizes]:
    """Return the sizes of shapes by a table, or by their own numbers on a GPU."""
    measured = None if path is None else quantities.machine(str(path))
    kind = GPU if measured is None else KIND
    each = {name: shape(name) if measured is None else measured.served(shape(name)) for name in names}
    served, table = tuple(Served(name, of) for name, of in each.items()), None if path is None else str(path)
    config = Config(served, gpu=kind, host=Config(()).host if measured is None else KIND, table=table)
    known = machine.profile(config, machine.machine(config))
    return {
        name: Sizes(
            shapes.weight_bytes(of), shapes.kv_token_bytes(of), known.step_s(Inst(name, (0,)), 1, CTX),
            known.load_s(Inst(name, (0,)), "host"),
        )
        for name, of in each.items()
    }  # fmt: skip


def relative(names: Sequence[str], path: Path) -> list[str]:
    """Say what each shape takes of what the first one does, by the table, beside the originals on a GPU."""
    here, there, first = sizes(names, path), sizes(names, None), names[0]
    lines = []
    for name in names[1:]:
        pairs = zip(Sizes._fields, here[name], here[first], there[name], there[first], strict=True)
        parts = (
            f"{what.replace('_', ' ')} {ours / by:.3g} ({theirs / over:.3g})" for what, ours, by, theirs, over in pairs
        )
        lines.append(f"{name} over {first}, and originals on {GPU}: {', '.join(parts)}")
    return lines


def notes(lines: Sequence[Mapping[str, Any]], path: Path, names: Sequence[str]) -> list[str]:
    """List what was measured and is not in the table, the ratios, and what disturbed the measurements."""
    texts = [*(ratio.text for ratio in ratios(lines, path, names)), *relative(names, path)]
    bytes_s = {link: 1e9 * rate for link, rate in rates(Config((), table=str(path)), CPU).items()}
    texts.append("links, GB/s: " + ", ".join(f"{link} {rate / 1e9:g}" for link, rate in bytes_s.items()))
    for line in of(lines, "move", gbps=quantities.sig(bytes_s["h2d"] / 1e9, 3)):
        link, size = line["params"]["link"], line["facts"]["bytes"]
        texts.append(
            f"a move of {size / 1e6:.2g} MB of KV ({line['params']['shape']}) over {link}: {1e3 * line['p50']:.3g} ms, "
            f"{1e3 * size / bytes_s[link]:.3g} by its rate"
        )
    texts += [
        f"a turn of a step of {line['params']['shape']}: {1e3 * line['p50']:.3g} ms, its step "
        f"{1e3 * line['facts']['step_s']:.3g}"
        for line in of(lines, "turn")
    ]
    calls = {line["params"]["call"]: line["p50"] for line in of(lines, "page")}
    texts += [f"to {call} a granule of 4 KiB takes {1e6 * s:.3g} us" for call, s in calls.items()]
    noisy = [line for line in lines if line["other_cores"] > MOST_OTHERS]
    if noisy:
        worst = max(line["other_cores"] for line in noisy)
        texts.append(
            f"{len(noisy)} of {len(lines)} measurements while others took more than {MOST_OTHERS:g} cores "
            f"(at most {worst:.2f}): measure again, in another folder, on a quiet machine"
        )
    return texts


def parts(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Say how much longer steps take while another part of the card does the same; the table knows devices alone."""
    for line in of(lines, "apart"):
        seqs, times = line["params"]["seqs"], line["p50"] / line["facts"]["alone_s"]
        what = f"a decode step of {seqs}" if seqs else "a prefill"
        yield f"{what} of {line['params']['shape']} takes {times:.2f} x while another part of the card does the same"


def write(
    folder: Path, names: Sequence[str], say: Callable[[str], None], fields: Fields, given: Mapping[str, Any]
) -> tuple[Path, fit_whole.Fitted, list[dict[str, Any]], dict[str, Any]]:
    """Measure what the folder lacks, and write its table; return its path, the fit, all lines, and the table."""
    lines = measure(folder, {name: shape(name) for name in names}, say, fields, {"pool_bytes": GIB, **given})
    file, fitted = table(lines, names, fields.wide)
    path = folder / f"{KIND}.toml"
    write_bytes(path, fit.dumps(file).encode())
    quantities.forget()
    quantities.machine(str(path))  # it reads as any user's table
    return path, fitted, lines, file


def staged(folder: Path, out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the table of what the stages of `make gpu` measured; return its path, `<folder>/torch-*.toml`, and notes.

    What is not measured yet is a note where the table can do without it. UserError where it cannot.
    """
    if not (folder / ABOUT).is_file() or not (folder / RAW).is_file():
        raise UserError(f"{folder}: nothing of the stage calibrate is there; the same command of the stages resumes it")
    about = json.loads((folder / ABOUT).read_text("utf-8"))
    lines = [json.loads(text) for text in (folder / RAW).read_text("utf-8").splitlines()]
    names = [name for name, *_ in about["shapes"]]
    left = missing(lines, names)
    if needed := [(what, name) for what, name in left if what == "decode" or not any(of(lines, "load"))]:
        raise UserError(f"{folder / RAW}: no {' of '.join(needed[0])}; the same command of the stages resumes it")
    card = None if about["device"] == "cpu" else Card(*(about[key] for key in CARD))
    conditions = ", ".join(f"{key} {value}" for key, value in about["measured_on"].items())
    file, _ = table(lines, names, 1, card, conditions + (f", {card.on}" if card else ""))
    path = out or folder / f"{file['kind']}.toml"
    write_bytes(path, fit.dumps(file).encode())
    quantities.forget()
    quantities.machine(str(path))  # it reads as any user's table
    told = notes(lines, path, names) if card is None else [f"loads by {', '.join(file['ladder'])}", *parts(lines)]
    return path, told + ([f"not measured yet: {', '.join(map(' of '.join, left))}"] if left else [])
