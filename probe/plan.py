"""The probes in their order; those that may fault or hang come last, each in its own process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe: the generator `name(box)` of `module`.

    The probe is asked to stop after `box_s` seconds. If it is still running `grace_s` seconds later, it is killed.
    """

    name: str
    module: str
    box_s: float
    expect: str  # from public measurements of this or a near card, before the first run
    alone: bool = False  # may fault or hang: a process of its own
    grace_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A list of probes, and the module `rig` that their workers load.

    The function `hello` of that module returns the facts of the machine, and `tidy` cleans up between two probes.
    """

    rig: str
    probes: tuple[Probe, ...]
    start_s: float = 120.0  # seconds that a worker may take to import and to open the device


HERE = __package__
DUELS = f"{HERE}.duels"
# Rows of duels, in order of value; without a card (DEVICE=cpu) they run as the law of rounds predicts them.
ROWS = (
    Probe("graphs", DUELS, 50, "1B, 3B and two 8B: 50 s"),
    Probe("turns", DUELS, 40, "two layers of decode pass per layer of prompts, at ratios of 2 to 28"),
    Probe("decodes", DUELS, 18, "side by side they gain at most 1.25"),
    Probe("timelines", DUELS, 15, "kernels alternate; two of decode per one of prompts"),
    Probe("several", DUELS, 12, "slow-downs add as the law says"),
    Probe("mixed", DUELS, 10, "a step is one of prompts from 64 to 512 tokens on"),
    Probe("gaps", DUELS, 8, "a lane that is not there takes no turn"),
    Probe("partitions", DUELS, 35, "1.37 times as long beside a busy part; 1.17 times the bandwidth asked for"),
    Probe("shared", DUELS, 6, "lanes of one part take turns; of two parts they do not"),
    Probe("priorities", DUELS, 6, "turns of the preferred become 1.3 to 1.9 times as many"),
    Probe("processes", DUELS, 110, "without MPS the driver's turns of 2 ms or more; with, as streams", alone=True),
)


COMPUTE, MEMORY, SHARING = f"{HERE}.compute", f"{HERE}.memory", f"{HERE}.sharing"

PLAN = Plan(
    f"{HERE}.rig",
    (
        Probe("device", COMPUTE, 10, "132 SMs, granularity 2 MiB, at least 2 copy engines"),
        Probe("splits", COMPUTE, 15, "n and 132 - n for each n, disjoint; a context under 5 ms and few MiB"),
        Probe("vmm", MEMORY, 25, "2 MiB: create 200, map 2, access 36, unmap 26 us (A100)"),
        Probe("gemm", COMPUTE, 60, "80 % of HBM from 64 SMs on; 750 TFLOP/s at 8,192 tokens"),
        Probe("attention", COMPUTE, 50, "65 % of HBM or more; page layout under 10 %"),
        Probe("prefill", COMPUTE, 40, "8B at 2,048 tokens: 42 to 50 ms, about 1 / SMs"),
        Probe("step", COMPUTE, 30, "8B at 2,048 tokens: B 1 4.3 ms, B 64 9 ms; launch 20 us"),
        Probe("copies", MEMORY, 50, "50 GB/s or more each way; pinning 1 to 4 GiB/s"),
        Probe("evict", MEMORY, 50, "8B back in 0.3 s, replay bitwise equal"),
        Probe("swap", MEMORY, 20, "within 10 % of the link"),
        Probe("host", SHARING, 25, "300 us a step or less with 8 models"),
        *(row for row in ROWS if not row.alone),  # last of those that share a process: their models stay there
        Probe("events", SHARING, 20, "1 to 5 us a hand-over", alone=True),
        Probe("memops", SHARING, 15, "1 to 3 us a hand-over", alone=True),
        Probe("polling", SHARING, 20, "1 to 2 us a hand-over", alone=True),
        Probe("unmap", MEMORY, 25, "another model's steps: jitter under 100 us", alone=True),
        *(row for row in ROWS if row.alone),
        Probe("hole", MEMORY, 15, "CUDA_ERROR_ILLEGAL_ADDRESS", alone=True),
    ),
)
DRY = Plan(f"{HERE}.dry", ROWS)
