"""Time a device's steps, one model at a time, and fit what policies may know of them (costs.py).

python -m harness.validate.fit_torch    # three minutes on an idle machine; writes cpu.toml
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from harness.engines.costs.fit import dumps, error
from harness.engines.costs.quantities import sig
from harness.engines.torch import nets
from harness.engines.torch.costs import NAMES, TABLE, Work, fit
from harness.engines.torch.nets import Net
from harness.engines.torch.processes import Nursery, Seat
from harness.engines.torch.setting import Fields
from harness.engines.torch.wire import send_files
from harness.engines.wallclock import machine_facts
from harness.policy.types import GIB
from harness.rows.record import write_bytes
from harness.validate.torch_timed import Bench, Timed, steps
from workloads.models import shape

SHAPES = ("llama-tiny", "llama-small", "llama-3.2-1b", "llama-3.1-8b", "qwen-2.5-14b", "qwen-3-32b")


def start_s() -> float:
    """Time the start of a process of its own, until it takes orders."""
    nursery, memory = Nursery(), os.memfd_create("device")
    try:
        begun_s = time.monotonic()
        seat = Seat(nursery, 0, cold=True)
        seat.send("begin", 0, os.sched_getaffinity(0), {}, False)
        send_files(seat.conn, [memory])
        assert seat.conn.recv() == "ready"
        return time.monotonic() - begun_s
    finally:
        nursery.close()
        os.close(memory)


def work(of: Timed) -> Work | None:
    """Return the work of a timed step: of one prompt, or of decodes; None for a piece of a prompt."""
    if of.what == "prefill":
        tokens = of.params["tokens"]
        return Work(0, 0.0, 1, tokens, tokens**2 / 2)
    return Work(of.params["seqs"], of.facts["ctx_tokens"]) if of.what == "decode" else None


def measured(models: Iterable[str]) -> list[tuple[Net, Work, float]]:
    """Time the steps of models as `bench calibrate --engine torch` does; return (network, work, median seconds)."""
    timed = list[tuple[Net, Work, float]]()
    with TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), {name: shape(name) for name in models}, print, Fields(), {"pool_bytes": 2 * GIB})
        for name, of in bench.shapes.items():
            each, _ = steps(bench, name)
            known = ((work(step), step.seconds) for step in each)
            timed += [(nets.net(of), at, float(np.median(seconds))) for at, seconds in known if at is not None]
            print(f"{name}: {len(each)} steps", flush=True)
    return timed


def main() -> None:
    """Measure, fit and write the numbers."""
    every = measured(SHAPES)
    fitted, off = fit(every)
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts("torch").items())
    file = {name: sig(value, 4) for name, value in zip(NAMES, fitted, strict=True)} | {
        "start_s": sig(float(np.median([start_s() for _ in range(3)])), 3),
        "source": f"python -m harness.validate.fit_torch on {facts}",
        "formula": "harness/engines/torch/costs.py",
        "fit": error(1 + off, np.ones(len(off))),
    }
    write_bytes(TABLE, dumps(file).encode())
    for (net, at, seconds), e in sorted(zip(every, off.tolist(), strict=True), key=lambda pair: -abs(pair[1]))[:10]:
        print(f"{100 * e:+.0f} %  {net.shape.name} {at}: {1e3 * seconds:.3g} ms")
    print(f"{TABLE}: {len(every)} steps, median error {100 * float(np.median(np.abs(off))):.1f} %")


if __name__ == "__main__":
    main()
