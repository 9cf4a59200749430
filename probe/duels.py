"""Duels: measurements of steps of several models that run on one GPU at the same time.

A lane repeats one unit of work, such as a step of a model. A cell is one to eight lanes that run at the same time. A
row is a list of cells, with its own time limit. A row is measured in rounds: in each round, first each of its lanes
alone, then its cells in a new random order. Each lane of a cell yields a sample `lane`: the seconds from the end of one
unit to the end of the next. The sample also has clocks and watts at the end of the duel. This module does not import
torch: `card` runs the lanes on a GPU. With DEVICE=cpu, `dry` returns what the law of rounds predicts.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from probe.worker import Box, Sample, Value, sample

ROUNDS = 3
SHORT_S, LONG_S, SLOW_S = 0.25, 1.0, 0.010  # a duel takes SHORT_S; LONG_S where a unit takes over SLOW_S
CTX = 1024  # tokens of context of a sequence that decodes
MPS = "nvidia-cuda-mps-control"
MPS_PLACES = ("/usr/local/nvidia/bin", "/usr/bin")  # beside PATH: containers mount the driver's programs there
MPS_S = 10.0  # within which the daemon answers


class Work(NamedTuple):
    """The work that a lane repeats: one unit.

    A unit is a step of a model, or a kernel that only waits (spin) or copies.
    """

    act: str  # decode, prefill, mixed (prompts and 32 decodes in one step), spin, copy
    of: str = ""  # the model
    size: int = 0  # sequences of decode; tokens of prompts
    part: str = ""  # "64": about 64 SMs; "64-": the rest of that split; "": all
    gap_ms: float = 0.0  # from the end of a unit to the launch of the next, as a host's work leaves it
    priority: int = 0  # its stream's; smaller goes first

    @property
    def text(self) -> str:
        """The lane in words, as the key of a sample."""
        size = {"decode": f" B {self.size}", "prefill": f" {self.size}", "mixed": f" {self.size}+32"}
        words = f"{self.of} {self.act}{size.get(self.act, '')}".strip()
        words += f" on {self.part}" if self.part else ""
        words += f" gap {self.gap_ms:g} ms" if self.gap_ms else ""
        return words + (f" priority {self.priority}" if self.priority else "")

    @property
    def alone(self) -> Work:
        """The same lane without gaps between its units, at priority 0."""
        return self._replace(gap_ms=0.0, priority=0)


Cell = tuple[Work, ...]


class Ran(NamedTuple):
    """The result of a lane in a duel: the seconds of its units, and its number of SMs."""

    seconds: list[float]  # from the end of a unit to the end of the next
    sms: int


class Device(Protocol):
    """A module that runs lanes: `probe.card` on a GPU, `probe.dry` without one."""

    def build(self, work: Work, twin: int) -> float:
        """Prepare a lane, and return the seconds of the preparation; `twin` is the lane's number from `twins`."""
        ...

    def duel(self, cell: Sequence[tuple[Work, int]], seconds: float) -> list[Ran]:
        """Run lanes concurrently for `seconds`."""
        ...

    def timeline(self, cell: Sequence[tuple[Work, int]], seconds: float) -> list[tuple[int, str, float, float]]:
        """Run lanes concurrently; return (lane, kernel name, begin, seconds) of each kernel, ordered by begin."""
        ...

    def facts(self, work: Work) -> dict[str, float]:
        """Return the number of layers in a lane's unit, and the bytes that the unit reads and writes."""
        ...

    def clocks(self) -> dict[str, float]:
        """Return clocks and power at the end of the last duel: sm_mhz, mem_mhz, watts."""
        ...


def device() -> Device:
    """Return the module that runs lanes on this machine."""
    name = "probe.dry" if os.environ.get("DEVICE") == "cpu" else "probe.card"
    return cast("Device", importlib.import_module(name))


# ------------------------------------------------------------------------------------------------------- cells


def decode(of: str, size: int = 1, part: str = "", **more: Any) -> Work:
    """Return a lane of decode steps: model `of`, `size` sequences, on the partition `part` of the SMs."""
    return Work("decode", of, size, part, **more)


def prefill(of: str, size: int = 2048, part: str = "", **more: Any) -> Work:
    """Return a lane of prefills: model `of`, prompts of `size` tokens, on the partition `part` of the SMs."""
    return Work("prefill", of, size, part, **more)


MODELS = ("1B", "3B", "8B")
GRAPHS: list[Cell] = [(decode(of, size),) for of in MODELS for size in (1, 64)]  # row 0
TURNS: list[Cell] = list(  # row 1: decodes beside prompts, at ratios of a layer's seconds of 2 to 28
    product(
        (decode("1B"), decode("3B"), decode("8B"), decode("8B", 64)),
        (prefill("8B"), prefill("8B", 512), prefill("8B", 128), prefill("1B")),
    )
)
DECODES: list[Cell] = [  # row 2: decodes beside decodes
    *combinations_with_replacement([decode(of, size) for of in MODELS for size in (1, 64)], 2)
]
D1, D3, D8, D64 = decode("1B"), decode("3B"), decode("8B"), decode("8B", 64)
P8, P512 = prefill("8B"), prefill("8B", 512)
TIMELINES: list[Cell] = [(D8, P8), (D1, P8), (D8, D64)]  # row 3
SEVERAL: list[Cell] = [  # row 4: three to eight lanes
    (D8, D8, P8),
    (P8, P8, D8),
    (D1, D1, D3, D8),
    (D1, D1, D1),
    (D1,) * 4,
    (D1,) * 8,
    (D1, D3, P8),
    (D1, D1, D3, D3, D8, D8),
]
MIXED: list[Cell] = [  # row 5: where a step of prompts and 32 decodes becomes one of prompts
    (Work("mixed", "8B", size), other) for size, other in product((64, 128, 256, 512, 1024), (D8, D1))
]
GAPS: list[Cell] = [  # row 6: a lane's host leaves gaps between its steps
    *((D8._replace(gap_ms=gap), other) for gap, other in product((0.2, 0.5, 1.0), (D8, P8))),
    (D8._replace(gap_ms=0.5), D8._replace(gap_ms=0.5)),
    (D1._replace(gap_ms=0.5), P8),
]
SPLITS = ("64", "32", "96", "16")  # SMs of one part; the other is the rest
BUSY = Work("spin"), Work("copy")
PAIRS = (D8, D8), (D64, D64), (D8, P512), (P512, D8), (P512, P512), (D64, P512), (P512, D64)
PARTITIONS: list[Cell] = [  # row 7: disjoint parts of the SMs, also beside kernels that only wait or copy
    (a._replace(part=n), b._replace(part=f"{n}-"))
    for n, (a, b) in [
        *product(SPLITS, (*PAIRS, *product((D8,), BUSY))),
        *product(("64",), product((D64, P512), BUSY)),
    ]
]
ON64, ON68 = decode("8B", part="64"), decode("8B", part="64-")
SHARED: list[Cell] = [  # row 8: two lanes on one part, and a third on the other or on all SMs
    (ON64, ON64),
    (ON64, prefill("8B", 512, "64")),
    (ON64, ON68, decode("8B")),
    (ON64, prefill("8B", 512, "64-"), D8),
    (ON64, ON64, ON68),
    (prefill("8B", 512, "64"), decode("8B", 64, "64-"), D8),
]
PRIORITIES: list[Cell] = [  # row 9: three levels, 0 the last
    (a._replace(priority=level), b) for level, (a, b) in product((-1, -3, -5), ((D8, P8), (D8, D8)))
]
PROCESSES: list[Cell] = [(D1, D1), (D8, D8), (D8, P8), (D1, P8), (D1, D1, D1), (D1, D8, P8)]  # row 10


# ---------------------------------------------------------------------------------------------------- measuring


def twins(cell: Cell) -> list[tuple[Work, int]]:
    """Return each lane of a cell with a number, which counts from 0 the lanes of the same model and kind.

    There are two kinds: lanes of decode steps, and all other lanes.
    """
    kinds = [(work.of, work.act == "decode") for work in cell]
    return [(work, kinds[:k].count(kinds[k])) for k, work in enumerate(cell)]


def text(cell: Cell) -> str:
    """Return a cell in words."""
    return " + ".join(work.text for work in cell)


def params(row: str, cell: Cell, lane: int, turn: int, **more: Value) -> dict[str, Value]:
    """Return the parameters of the sample of lane `lane` of a cell in round `turn`."""
    work = cell[lane]
    return {"row": row, "cell": text(cell), "lane": lane, "round": turn, **work._asdict(), **more}


def lanes(row: str, cell: Cell, turn: int, ran: Sequence[Ran], about: Device, **more: Value) -> Iterator[Sample]:
    """Yield a sample for each lane of a duel.

    A lane that ended fewer than two units is marked `late`. The value of its sample is then the total seconds of the
    lane that ran longest. Raises RuntimeError if all lanes are late.
    """
    clocks = about.clocks()
    if not any(each.seconds for each in ran):
        raise RuntimeError(f"no lane of {text(cell)} ended two units")
    for k, (work, each) in enumerate(zip(cell, ran, strict=True)):
        mean = {"mean_s": sum(each.seconds) / len(each.seconds)} if each.seconds else {"late": 1}
        facts: dict[str, Value] = {**about.facts(work), "units": len(each.seconds), **mean, **clocks}
        values = each.seconds or [max(sum(other.seconds) for other in ran)]  # longer than the whole duel
        yield sample("lane", values, "s", each.sms, facts, **params(row, cell, k, turn, **more))


def missing(box: Box, row: str, cell: Cell, turn: int, **more: Value) -> bool:
    """Tell whether any lane of a cell has not been measured yet."""
    return any(box.todo("lane", **params(row, cell, k, turn, **more)) for k in range(len(cell)))


def duelled(row: str, cells: Sequence[Cell], box: Box, rounds: int = ROUNDS) -> Iterator[Sample]:
    """Measure a row: in each round, its lanes alone, then its cells in a new random order.

    A lane that is measured alone runs at priority 0 and without gaps.
    """
    on = device()
    singles: list[Cell] = [(work,) for work in dict.fromkeys(w.alone for cell in cells for w in cell)]
    unit_s: dict[Work, float] = {}
    for turn in range(rounds):
        order = list(cells)
        random.Random(f"{row} {turn}").shuffle(order)
        for cell in [*singles, *order]:
            if not missing(box, row, cell, turn):
                continue
            members = twins(cell)
            for work, twin in members:
                on.build(work, twin)
            long = any(unit_s.get(work.alone, 0.0) > SLOW_S for work in cell)
            ran = on.duel(members, LONG_S if long else SHORT_S)
            if len(cell) == 1:
                unit_s[cell[0]] = max(ran[0].seconds, default=SHORT_S)
            yield from lanes(row, cell, turn, ran, on)


def graphs(box: Box) -> Iterator[Sample]:
    """Build the models and graphs of row 0, and yield the seconds of each build."""
    on = device()
    for (work,) in GRAPHS:
        for twin in range(2 if work.of == "8B" else 1):
            if box.todo("build", work=work.text, twin=twin):
                yield sample("build", on.build(work, twin), "s", work=work.text, twin=twin)


def timelines(box: Box) -> Iterator[Sample]:
    """Record which kernel of which lane ran at which time (row 3).

    The fact `events` is a list of [lane, index of the kernel's name, begin in us, duration in us].
    """
    on = device()
    for cell in TIMELINES:
        name = text(cell)
        if not box.todo("timeline", row="timelines", cell=name):
            continue
        for work, twin in twins(cell):
            on.build(work, twin)
        events = on.timeline(twins(cell), 0.02)
        kernels = list(dict.fromkeys(kernel for _, kernel, _, _ in events))
        rows = [[lane, kernels.index(k), round(1e6 * at, 1), round(1e6 * s, 1)] for lane, k, at, s in events]
        facts: dict[str, Value] = {
            "kernels": json.dumps(kernels),
            "events": json.dumps(rows),
            **{f"lane{k}": sum(lane == k for lane, *_ in events) for k in range(len(cell))},
        }
        yield sample("timeline", [s for *_, s in events], "s", None, facts, row="timelines", cell=name)


# The other rows, each a probe by its name:
turns = partial(duelled, "turns", TURNS)
decodes = partial(duelled, "decodes", DECODES)
several = partial(duelled, "several", SEVERAL)
mixed = partial(duelled, "mixed", MIXED)
gaps = partial(duelled, "gaps", GAPS)
partitions = partial(duelled, "partitions", PARTITIONS, rounds=1)
shared = partial(duelled, "shared", SHARED, rounds=1)
priorities = partial(duelled, "priorities", PRIORITIES, rounds=1)


# ---------------------------------------------------------------------------------------------------- processes


WITHOUT = nullcontext[Mapping[str, str] | None]({})  # processes without MPS have no variables of their own


def processes(box: Box) -> Iterator[Sample]:
    """Measure cells with one process per lane (row 10): without MPS and, if the MPS daemon starts, with MPS."""
    for way in ("turns", "mps"):
        todo = [cell for cell in PROCESSES if missing(box, "processes", cell, 0, way=way)]
        with daemon() if way == "mps" else WITHOUT as env:
            if env is None:
                if box.todo("mps", found=False):
                    yield sample("mps", 0, "1", found=False)
                continue
            for cell in todo:
                yield from _processes(cell, way, env)


def _processes(cell: Cell, way: str, env: Mapping[str, str]) -> Iterator[Sample]:
    children = [
        subprocess.Popen(
            [sys.executable, "-m", __package__, "lane", json.dumps(work)],
            env={**os.environ, **env},
            cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for work in cell
    ]
    try:
        for child in children:  # one after the other: each builds while none runs
            assert child.stdout is not None
            if not child.stdout.readline():
                raise RuntimeError(f"a process of {text(cell)} ended before it was ready")
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = [json.loads(child.stdout.readline()) for child in children if child.stdout is not None]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    ran = [Ran(answer["seconds"], answer["sms"]) for answer in answers]
    yield from lanes("processes", cell, 0, ran, device(), way=way)


def lane(asked: str) -> None:
    """Run one lane in this process for the row `processes`.

    Print "ready", wait for a line, run the lane, and print the result as JSON.
    """
    work, on = Work(*json.loads(asked)), device()
    on.build(work, 0)
    on.duel([(work, 0)], SHORT_S)
    print("ready", flush=True)
    sys.stdin.readline()
    (ran,) = on.duel([(work, 0)], 4 * LONG_S)
    inside = len(ran.seconds) // 4  # the ends are left out: neighbours may not run yet or any more
    print(json.dumps({"seconds": ran.seconds[inside : len(ran.seconds) - inside], "sms": ran.sms}), flush=True)
    sys.stdin.readline()  # until it is killed


@contextmanager
def daemon() -> Iterator[Mapping[str, str] | None]:
    """Start the MPS daemon, and yield the environment variables that its clients need.

    Yield None if the daemon is missing or does not answer.
    """
    program = shutil.which(MPS) or next((str(p) for at in MPS_PLACES if (p := Path(at, MPS)).is_file()), None)
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in env.values():
            Path(path).mkdir()
        ours = {**os.environ, **env}
        running = subprocess.Popen([program, "-f"], env=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def answer(order: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([program], input=order, env=ours, capture_output=True, text=True, check=False)

        try:
            end_s = time.monotonic() + MPS_S
            answers = False
            while not answers and running.poll() is None and time.monotonic() < end_s:
                asked = answer("get_default_active_thread_percentage\n")
                answers = asked.returncode == 0 and asked.stdout.strip().replace(".", "", 1).isdecimal()
            yield env if answers else None
        finally:
            answer("quit\n")
            running.kill()
            running.wait()
