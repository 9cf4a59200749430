"""The report on raw.jsonl: a README with the expected and the measured results."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from probe.conduct import HOST, RAW, lines
from probe.duels import Work
from probe.plan import ROWS, Plan

Line = dict[str, Any]
MIB = 1 << 20
WIDTH = 100  # characters in the report's lines
PAGES = (2, 16, 64, 256)  # MiB
CALLS = ("create", "map", "allow", "unmap", "release")
FEW = 60e6  # bytes; smaller kernels mostly take their launch


class Book:
    """The samples of a folder. Of samples with equal parameters, only the latest one counts."""

    def __init__(self, samples: Iterable[Line]) -> None:
        self.samples = [line for line in samples if "quantity" in line]

    def all(self, what: str, **params: Any) -> list[Line]:
        """Return the samples of a kind with these parameters."""
        latest: dict[str, Line] = {}
        for line in self.samples:
            if line["quantity"] == what and all(line["at"].get(k) == v for k, v in params.items()):
                latest[json.dumps(line["at"], sort_keys=True)] = line
        return list(latest.values())

    def line(self, what: str, **params: Any) -> Line | None:
        """Return the first sample that `all` returns; None if there is none."""
        return next(iter(self.all(what, **params)), None)


def read(folder: Path) -> Book:
    """Read the samples of a folder of results."""
    return Book(lines(folder / RAW))


def rate(line: Line, of: str = "bytes") -> float:
    """Return the rate of a sample: its fact `of` (bytes or FLOPs), divided by its median seconds."""
    return float(line["facts"][of] / line["seconds"])


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Format the smallest and the largest value, or just one if both have the same text; "" for no values."""
    if not values:
        return ""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def us(seconds: float) -> str:
    """Format seconds as microseconds, in three digits."""
    return f"{1e6 * seconds:.3g} us"


Found = Iterator[tuple[str, str]]  # what, measured


def _median(samples: Sequence[Line], form: Callable[[float], str]) -> str:
    return spread([line["seconds"] if "seconds" in line else line["value"] for line in samples], form)


def _fact(samples: Sequence[Line], name: str, form: Callable[[float], str]) -> str:
    return spread([line["facts"][name] for line in samples], form)


def _rate(samples: Sequence[Line], form: str, of: str = "bytes", unit: float = 1e12) -> str:
    return spread([rate(line, of) / unit for line in samples], form.format)


def _equal(comparisons: Sequence[Line]) -> str:
    every = "yes" if all(line["min"] == 1 for line in comparisons) else "NO"
    return every if comparisons else ""


def _asks(book: Book, what: str) -> list[int]:
    return sorted({line["at"]["ask"] for line in book.all(what)})


def _device(book: Book) -> Found:
    for words, name in (("SMs", "MULTIPROCESSOR_COUNT"), ("copy engines", "ASYNC_ENGINE_COUNT")):
        yield words, _median(book.all("attribute", name=name), "{:.0f}".format)
    yield "granularity", _median(book.all("granularity"), lambda b: f"{b / MIB:g} MiB")
    yield "copy, read and written", _rate(book.all("copy"), "{:.2f} TB/s")
    for data in ("random", "zeros"):
        yield f"8192^3 bf16, {data}", _rate(book.all("matmul", data=data), "{:.0f} TFLOP/s", "flops")


def _splits(book: Book) -> Found:
    splits = book.all("split")
    yield "asked: got + rest", ", ".join(f"{s['at']['ask']}: {s['sms']} + {s['facts']['rest']}" for s in splits)
    yield "SMs seen by both", _fact(splits, "shared", "{:.0f}".format)
    yield "a context and its stream", _fact(splits, "create_s", lambda s: f"{1e3 * s:.2g} ms")


def _vmm(book: Book) -> Found:
    for mib in PAGES:
        calls = [(what, book.line(what, size=mib * MIB)) for what in CALLS]
        yield f"{mib} MiB", ", ".join(f"{what} {us(line['seconds'])}" for what, line in calls if line)
    for what in ("unmap_run", "map_offset"):
        for line in book.all(what)[:1]:
            yield what.replace("_", " "), line["facts"]["refused"] or "allowed"
    yield "this thread beside another's calls", _median(book.all("thread"), "{:.2f} x".format)


def _gemm(book: Book) -> Found:
    for ask in _asks(book, "gemm"):
        few = [g for g in book.all("gemm", ask=ask, target=0) if g["at"]["m"] <= 64 and g["facts"]["bytes"] > FEW]
        yield f"{ask} SMs, at most 64 tokens", _rate(few, "{:.2f} TB/s")
    yield "8,192 tokens", _rate(book.all("gemm", m=8192, target=0), "{:.0f} TFLOP/s", "flops")
    told = [(g, book.line("gemm", **{**g["at"], "target": 0})) for g in book.all("gemm", target=1)]
    yield (
        "speed with an SM target",
        spread([other["seconds"] / g["seconds"] for g, other in told if other], "{:.3f} x".format),
    )


def _attention(book: Book) -> Found:
    usual = {"of": "8B", "splits": 0, "stages": 7}
    yield "error", _median(book.all("attention_error"), "{:.2g}".format)
    for ask in _asks(book, "attention"):
        large = [a for a in book.all("attention", **usual, ask=ask, page=0) if a["facts"]["bytes"] > FEW / 2]
        yield f"8B, {ask} SMs", _rate(large, "{:.2f} TB/s")
    plain = book.line("attention", **usual, B=64, ctx=2048, page=0)
    for page in PAGES:
        on = book.line("attention", **usual, B=64, ctx=2048, page=page * MIB)
        if plain and on:
            yield f"on {page} MiB pages", f"{on['seconds'] / plain['seconds']:.2f} x the time"


def _prefill(book: Book) -> Found:
    yield "mask error", _median(book.all("mask_error"), "{:.2g}".format)
    for line in book.all("prefill"):
        whole = line["seconds"] * 32 / line["at"]["layers"]
        yield f"{line['at']['tokens']} tokens, {line['sms']} SMs", f"{1e3 * whole:.1f} ms an 8B, by layers"


def _step(book: Book) -> Found:
    for line in book.all("step"):
        p, launch = line["at"], book.line("launch", **line["at"])
        more = f", launch {us(launch['seconds'])}" if launch else ""
        yield (
            f"{p['of']}, B {p['B']}, ctx {p['ctx']}",
            f"{1e3 * line['seconds']:.2f} ms, {rate(line) / 1e12:.2f} TB/s{more}",
        )


def _duels(row: str, book: Book) -> Found:
    """List the results of a row of duels: slowdowns of a cell's lanes, seconds of builds, kernels of timelines."""
    for line in book.all("build") if row == "graphs" else ():
        yield line["at"]["work"], f"{line['seconds']:.1f} s"
    for line in book.all("timeline", row=row):
        of = [f"{count} kernels of lane {name[4:]}" for name, count in line["facts"].items() if name.startswith("lane")]
        yield line["at"]["cell"], ", ".join(of)
    for duel in duelled(book):
        if duel.row == row:
            clocks = f" ({duel.sm_mhz:.0f} MHz)" if duel.sm_mhz else ""
            way = f", {duel.way}" if duel.way else ""
            yield duel.text + way, " and ".join(f"{times:.2f} x" for times in duel.slow) + clocks


def _copies(book: Book) -> Found:
    for line in book.all("pin"):
        yield f"pinning by {line['at']['method']}", f"{rate(line) / (1 << 30):.2f} GiB/s"
    for line in [line for what in ("h2d", "d2h") for line in book.all(what, chunk=64 * MIB)]:
        beside = line["at"]["beside"]
        yield line["quantity"] + (f" beside {beside}" if beside else ""), f"{rate(line) / 1e9:.1f} GB/s"
    for line in book.all("decode_beside"):
        p, alone = line["at"], book.line("decode_beside", B=line["at"]["B"], copy="")
        if alone and p["copy"]:
            yield f"decode B {p['B']} under {p['copy']}", f"{line['seconds'] / alone['seconds']:.3f} x"


def _evict(book: Book) -> Found:
    yield "out, all", _median(book.all("evict", part=1.0), "{:.3f} s".format)
    yield "back, all", _median(book.all("restore", part=1.0), "{:.3f} s".format)
    yield "same bits", _equal(book.all("restore_equal"))


def _swap(book: Book) -> Found:
    for method in ("gather", "batch", "pages"):
        yield f"{method}, 2,048 tokens", _rate(book.all("swap", method=method, tokens=2048), "{:.1f} GB/s", unit=1e9)
    yield "same bits", _equal(book.all("swap_equal"))


def _host(book: Book) -> Found:
    for line in book.all("host_step"):
        yield f"{line['at']['models']} models", f"{us(line['seconds'])} a step, P95 {us(line['p95'])}"


def _hand_over(book: Book, by: Sequence[str]) -> Found:
    for line in [*book.all("edge"), *book.all("hand_over")]:
        p, gave = line["at"], (line.get("facts") or {}).get("gave_up")
        if p["by"] in by:
            yield f"{p['by']}, {p['mode']}", us(line["seconds"]) + (f", gave up {gave} times" if gave else "")


def _unmap(book: Book) -> Found:
    still = book.line("step_beside", change="")
    for line in book.all("step_beside"):
        if still and line["at"]["change"]:
            times, late = line["seconds"] / still["seconds"], line["facts"]["max"] - still["seconds"]
            yield f"beside {line['at']['change']}", f"P50 {times:.3f} x, worst step {us(late)} late"


def _hole(book: Book) -> Found:
    for line in book.all("error", read="hole"):
        yield "reading a hole", line["facts"]["said"] or "no error"


SECTIONS: dict[str, Callable[[Book], Found]] = {
    "device": _device,
    "splits": _splits,
    "vmm": _vmm,
    "gemm": _gemm,
    "attention": _attention,
    "prefill": _prefill,
    "step": _step,
    "copies": _copies,
    "evict": _evict,
    "swap": _swap,
    "host": _host,
    "events": lambda book: _hand_over(book, ("graph", "host")),
    "memops": lambda book: _hand_over(book, ("memops",)),
    "polling": lambda book: _hand_over(book, ("polling",)),
    "unmap": _unmap,
    "hole": _hole,
    **{row.name: partial(_duels, row.name) for row in ROWS},
}


class Duel(NamedTuple):
    """A cell of lanes that ran at the same time, with medians over rounds.

    `seconds` has the seconds of each lane's unit next to the other lanes. `alone_s` has those of the same lane alone on
    the same SMs, without gaps.
    """

    row: str
    works: tuple[Work, ...]
    seconds: tuple[float, ...]  # each lane's unit, beside the others
    alone_s: tuple[float, ...]  # the same on the same SMs, alone and without gaps
    layers: tuple[int, ...]
    bytes: tuple[float, ...]  # read and written by a unit
    way: str = ""  # how processes share: turns, mps
    sm_mhz: float = 0.0

    @property
    def text(self) -> str:
        """The lanes in words."""
        return " + ".join(work.text for work in self.works)

    @property
    def slow(self) -> list[float]:
        """The slowdown of each lane: the seconds of its unit next to the other lanes, divided by those alone.

        Both times include the lane's gap between units.
        """
        every = zip(self.seconds, self.alone_s, self.works, strict=True)
        return [s / (alone_s + 1e-3 * work.gap_ms) for s, alone_s, work in every]


def duelled(book: Book) -> list[Duel]:
    """Return every measured cell of two or more lanes, and the pairs that the earlier probe `interfere` measured.

    A cell is left out if its measurement was cut off, or if one of its lanes was not measured alone.
    """
    cells: dict[tuple[str, ...], dict[int, list[Line]]] = {}
    for line in book.all("lane"):
        p = line["at"]
        cells.setdefault((p["row"], p["cell"], p.get("way", "")), {}).setdefault(p["lane"], []).append(line)
    medians = {
        key: [median(line["seconds"] for line in lanes[k]) for k in sorted(lanes)] for key, lanes in cells.items()
    }
    singles: dict[str, float] = {}
    for (_, cell, _), seconds in medians.items():
        if " + " not in cell:
            singles.setdefault(cell, seconds[0])
    out = []
    for (row, cell, way), lanes in cells.items():
        first = [lanes[k][0] for k in sorted(lanes)]
        works = tuple(Work(*(line["at"][name] for name in Work._fields)) for line in first)
        names = [work.alone.text for work in works]
        if len(works) < 2 or " + ".join(work.text for work in works) != cell or not set(names) <= set(singles):
            continue  # cut off, or a lane was not measured alone
        alone_s = tuple(medians.get((row, name, ""), [singles[name]])[0] for name in names)
        facts = [line["facts"] for line in first]
        layers, moved = tuple(int(f["layers"]) for f in facts), tuple(float(f["bytes"]) for f in facts)
        mhz = float(facts[0].get("sm_mhz", 0.0))
        out.append(Duel(row, works, tuple(medians[row, cell, way]), alone_s, layers, moved, way, mhz))
    return [*out, *_interfered(book)]


class Act(NamedTuple):
    """A kind of lane of the earlier probe `interfere`, on an 8B model: its `Work`, and its unit's layers and bytes."""

    work: Work
    layers: int
    bytes: float


ACTS = {
    "decode1": Act(Work("decode", "8B", 1), 32, 15.14e9),
    "decode64": Act(Work("decode", "8B", 64), 32, 23.6e9),
    "prefill": Act(Work("prefill", "8B", 2048), 8, 4.5e9),
}


def _interfered(book: Book) -> Iterator[Duel]:
    """Yield the pairs that the earlier probe `interfere` measured, as duels.

    The first lane of a pair has median seconds. The second lane has mean seconds while both lanes run. Its seconds
    alone were measured on the first lane's SMs.
    """
    for line in book.all("unit", of="8B"):
        p = line["at"]
        pair, split = (p["victim"], p["other"]), p["mode"] == "split"
        alone = [book.line("unit", victim=act, other="", mode=p["mode"], of="8B") for act in pair]
        if p["mode"] == "priority" or not set(pair) <= set(ACTS) or "other_s" not in line.get("facts", {}):
            continue
        if alone[0] and alone[1]:
            parts = ("64", "64-") if split else ("", "")
            acts = [ACTS[act] for act in pair]
            works = tuple(act.work._replace(part=part) for act, part in zip(acts, parts, strict=True))
            seconds = (line["seconds"], float(line["facts"]["other_s"]))
            layers, moved = tuple(act.layers for act in acts), tuple(act.bytes for act in acts)
            yield Duel("interfere", works, seconds, (alone[0]["seconds"], alone[1]["seconds"]), layers, moved)


def finding(book: Book) -> list[str]:
    """Return Markdown on the slowdown of a decode step by a prefill, on all SMs and on split SMs.

    Return an empty list unless both were measured.
    """
    beside: dict[str, list[float]] = {}
    for duel in duelled(book):
        if tuple(work.act for work in duel.works) == ("decode", "prefill") and not any(w.priority for w in duel.works):
            beside.setdefault("split" if duel.works[0].part else "plain", []).append(duel.slow[0])
    if set(beside) != {"plain", "split"}:
        return []
    plain, split = (spread(beside[mode], "{:.1f}".format) for mode in ("plain", "split"))
    text = (
        f"Beside another model's prefill a decode step takes {plain} times as long as alone where both use all SMs."
        f" Where the SMs are split between them, it takes {split} times as long as alone on that part."
    )
    return [text, ""]


def parts(folder: Path, plan: Plan) -> list[str]:
    """Return Markdown: a table of probes, then the measured results.

    The table has each probe's state at its end and its expected result.
    """
    known = list(lines(folder / RAW))
    book, out, measured = Book(known), ["| probe | ended | expected |", "|---|---|---|"], list[str]()
    for probe in plan.probes:
        mine = [line for line in known if line["source"] == probe.name]
        last = next((line for line in reversed(mine) if "state" in line), {})
        how = last.get("state", "cut off" if mine else "not run")
        why = f" ({last['why']})" if "why" in last else ""
        cells = (probe.name, how + why, probe.expect)
        out.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        if here := [f"- {what}: {text}" for what, text in SECTIONS[probe.name](book) if text]:
            measured += ["", f"## {probe.name}", "", *(line for text in here for line in _wrapped(text, "  "))]
    return out + measured


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def write(folder: Path, plan: Plan) -> str:
    """Write the README.md of a folder; return its text, and after it a line with the name of the file."""
    calls = json.loads((folder / HOST).read_text(encoding="utf-8"))["calls"]
    host, path = calls[-1], folder / "README.md"
    packages = ", ".join(f"{name} {version}" for name, version in host.get("packages", {}).items())
    head = (
        f"Measured by `make gpu` in {len(calls)} call(s): {host.get('sms')} SMs, CUDA {host.get('cuda')}, driver"
        f" {host.get('driver')}, {packages}, Python {host.get('python')}, {host.get('cpus')} CPUs. Each line of `{RAW}`"
        f" is one measurement; `{HOST}` holds the machine of each call. Medians; data is random."
    )
    first = [line for text in [*finding(read(folder)), head] for line in _wrapped(text) or [""]]
    text = "\n".join([f"# An {host['name']}, probed", "", *first, "", *parts(folder, plan), ""])
    path.write_text(text, encoding="utf-8")
    return f"{text}wrote {path}"
