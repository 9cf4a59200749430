"""Kinds of devices, with the numbers that the engine's bookkeeping needs, and ways to load weights.

With the environment variable `DEVICE=cuda`, devices are NVIDIA cards, which one process serves (cuda.py). Without it, a
device is a core of the processor (cpu.py). If a run asks for more devices than there are cards, each card is split. The
parts have equal shares of its SMs, its memory, and its link to the host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from harness.engines.costs import quantities
from harness.engines.machine import Config
from harness.policy.types import GIB, MIB, Fidelity, UserError

CARDS = Path("/proc/driver/nvidia/gpus")  # one folder per card
DEVICES = Path("/dev")  # one file nvidiaN per card
GRANULE, PART = 2 * MIB, 32 * MIB  # bytes mapped at once; bytes of the parts that a load is split into
HOST = 16 * GIB  # locked for KV on a host of cards, an eighth of its memory at most; 1 to 4 GiB take a second
MARGIN = 6 * GIB  # bytes of a card that torch itself takes: activations, graphs, libraries


class Way(NamedTuple):
    """A way to load weights (`Load.way`): where this engine reads them, and over which links it copies them."""

    source: Literal["host", "disk"] = "host"
    starts: bool = False  # a process is started for it
    spread: bool = False  # equal parts over every device's link
    part: float = 1.0  # it gets this part of the link's rate; Aegaeon's `naive` got 2.83 of 55 GB/s


WAYS: Mapping[str, Way] = {
    "host": Way(),
    "pool": Way(),
    "sleep": Way(),
    "parallel": Way(spread=True),
    "disk": Way("disk"),
    "sleep2": Way("disk"),
    "cold": Way("disk", starts=True),
    "naive": Way(part=0.05),
    "reinit": Way(starts=True, part=0.05),
}


class Kind(NamedTuple):
    """A kind of device: the memory sizes, numbers of SMs and link rates that the engine's bookkeeping uses."""

    name: Literal["cpu", "cuda"]
    fidelity: Fidelity
    float_bytes: int  # bytes of a weight or a number of KV
    granule: int  # bytes: the least that can be mapped
    buffer: int  # bytes per layer of an elastic page, for K and as many for V
    block_tokens: int  # the fewest in a block of KV
    as_it_is: float  # bytes of weights up to which a shape is served as it is; a larger one by its twin
    mem_bytes: int  # a device's memory, unless `pool_bytes` sets it
    host_bytes: int  # for KV in the host's memory
    part: int  # bytes of the parts that a load's copy is split into
    sms: int
    sm_choices: tuple[int, ...]
    links: Mapping[str, float]  # GB/s in one direction
    starts: bool  # a worker may be a process of its own
    on: str  # the device in words, and what stands for what
    parts: int = 1  # devices of a card


# SMs, and the least that can be given to a partition, are an H100's. Links have about 1/550 of the rates of an H100's,
# which are 55, 55, 450 and 5.5 GB/s; host memory is taken as it is used. The buffer, whole granules, stands for
# kvcached's 2 MiB, whose models are about 2,000 times as large.
CPU = Kind(
    "cpu",
    "emulated",
    4,
    4096,
    64 * 1024,
    1,
    64 * MIB,
    512 * MIB,
    8 * GIB,
    16 * 4096,
    132,
    tuple(range(8, 132, 8)),
    {"h2d": 0.1, "d2h": 0.1, "peer": 0.8, "disk": 0.01},
    True,
    "",
)


def kind(config: Config) -> Kind:
    """Return the kind of device that the environment variable DEVICE names.

    Raises UserError if it is not cpu or cuda. With cuda, raises UserError if there is no card, or if a model cannot be
    served on one.
    """
    name, count = os.environ.get("DEVICE", "cpu"), len(os.sched_getaffinity(0))
    if name == "cpu":
        return CPU._replace(on=f"1 of {count} cores, SMs by sleeping, memory by mmap")
    if name != "cuda":
        raise UserError(f"DEVICE is {name}; an engine on torch runs on cpu or cuda")
    models = cards()
    if not models:
        raise UserError("DEVICE is cuda, and this machine has no NVIDIA card")
    if mixture := next((m.shape.name for m in config.models if m.shape.experts), ""):
        raise UserError(f"{mixture} is a mixture of experts: engine torch serves those with DEVICE=cpu")
    spec, each = quantities.gpu(config.gpu, config.table), -(-config.gpus // len(models))
    sms = spec.sms if each == 1 else spec.sms // each // spec.sm_step * spec.sm_step
    links = {"h2d": spec.h2d / each, "d2h": spec.d2h / each, "peer": spec.nvlink, "disk": spec.disk / each}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    mem_bytes = int(config.mem_fraction * spec.mem_bytes - MARGIN) // each
    return Kind(
        "cuda",
        "real" if each == 1 else "emulated",
        4 if os.environ.get("DTYPE") == "float32" else 2,
        GRANULE,
        GRANULE,
        64,
        float("inf"),
        mem_bytes,
        min(HOST, memory // 8),
        PART,
        sms,
        tuple(range(spec.sm_step, sms, spec.sm_step)),
        {link: rate / 1e9 for link, rate in links.items()},
        False,
        ("" if each == 1 else f"1 part of {each}, {sms} SMs, of ") + f"{models[0]}; disk at its rate from host memory; "
        "a process is a thread with a stream",
        each,
    )


def cards() -> list[str]:
    """Return the names of this machine's NVIDIA cards."""
    lines = [line for path in sorted(CARDS.glob("*/information")) for line in path.read_text("utf-8").splitlines()]
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return named or ["a card"] * sum(path.name[6:].isdecimal() for path in DEVICES.glob("nvidia*"))
