"""Draw what grows with models: `python -m tests.tools.linear` times View calls and requests.

Left, each GPU has four models, and there are more and more GPUs: nothing should grow, as only the models on the GPUs
concerned count. Right, one GPU has more and more models: time may grow in proportion. Requests are those of `elastic`,
which decides nothing while it runs. Their time is that of loop and kernel, without the start.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from harness.engines.machine import Config
from harness.engines.sim.engine import Sim
from harness.policy.actions import Load
from harness.policy.types import Batch, Inst, Plan
from plots import style
from tests.tools.scale import OUTPUT, PROMPT, jobs
from tests.tools.speed import run, served

OUT = Path(".make/linear.png")
EACH = 4  # models on a GPU, left
GPUS, MODELS = (2, 8, 32, 128), (2, 4, 8, 16)
RPS, REQUESTS, CALLS = 8.0, 20_000, 20_000  # of all models together on a GPU; of a run; of a query
SHAPE = "llama-3.2-1b"


def config(models: int, gpus: int) -> Config:
    """Return a machine with so many equal models and GPUs."""
    members, plan = served(f"{SHAPE}*{models}"), Plan(RPS * gpus / models, PROMPT, OUTPUT, "trace")
    return Config(members, gpus=gpus, plan={m.name: plan for m in members})


def queries(models: int, gpus: int) -> dict[str, float]:
    """Return microseconds of each View call, models being dealt to GPUs in turn."""
    engine = Sim(config(models, gpus))
    insts = [Inst(m.name, (k % gpus,)) for k, m in enumerate(engine.config.models)]
    for inst in insts:
        if refused := engine.do(Load(inst)):
            raise RuntimeError(f"{refused}")
    view, last, gpu = engine.view(), insts[-1], (models - 1) % gpus
    calls: dict[str, Callable[[], object]] = {
        "insts": lambda: view.insts(gpu),
        "weights": lambda: view.weights(last),
        "free_bytes": lambda: view.free_bytes(gpu),
        "kv": lambda: view.kv(last.model, gpu),
        "batch": lambda: view.batch(Batch(last)),
        "members": lambda: view.members(Batch(last)),
        "lane": lambda: view.lane(Batch(last), "decode"),
    }
    return {name: min(_timed(call) for _ in range(3)) for name, call in calls.items()}


def _timed(call: Callable[[], object]) -> float:
    call()
    begun = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - begun) / CALLS * 1e6


def request(models: int, gpus: int) -> float:
    """Return microseconds of a request, the start and the writing of rows left out."""
    asked = config(models, gpus)
    names = tuple(m.name for m in asked.models)
    with tempfile.TemporaryDirectory() as folder:
        took = [
            min(
                run("elastic", asked, jobs(names, n, RPS * gpus), Path(folder) / f"{n}-{again}")[0]
                for again in range(3)
            )
            for n in (50, REQUESTS + 50)
        ]
    return (took[1] - took[0]) / REQUESTS * 1e6


def grows(x: Sequence[int], y: Sequence[float]) -> float:
    """Return the exponent of y over x, by least squares of the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def main() -> None:
    """Print the exponents and draw the figure."""
    sides = {
        f"{EACH} models on each GPU": ([(EACH * gpus, gpus) for gpus in GPUS], "models in all"),
        "all on one GPU": ([(models, 1) for models in MODELS], "models on the GPU"),
    }
    print("how time grows with models: exponents (0: not at all, 1: in proportion), least to largest in us")
    with style.theme():
        figure = Figure(figsize=(style.PAGE_IN, 2.6), layout="constrained")
        axes = figure.subplots(1, len(sides), sharey=True)
        for ax, (title, (sizes, label)) in zip(axes, sides.items(), strict=True):
            lines: dict[str, list[float]] = {}
            for models, gpus in sizes:
                for name, us in {**queries(models, gpus), "a request": request(models, gpus)}.items():
                    lines.setdefault(name, []).append(us)
            x = [models for models, _ in sizes]
            for (name, y), color in zip(lines.items(), sns.color_palette("colorblind"), strict=False):
                ax.plot(x, y, marker="o", color=color, label=name)
                print(f"{title:22} {name:11} {grows(x, y):6.2f}  {min(y):8.2f} to {max(y):8.2f}", flush=True)
            guide = [lines["insts"][0] * n / x[0] for n in x]
            ax.plot(x, guide, ":", color="0.5", label="in proportion")
            ax.set(xscale="log", yscale="log", xlabel=label, title=title)
            ax.set_xticks(x, [str(n) for n in x])
            ax.minorticks_off()
        axes[0].set_ylabel("us of a call")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
        OUT.parent.mkdir(exist_ok=True)
        figure.savefig(OUT, dpi=200)
    print(f"figure: {OUT}")


if __name__ == "__main__":
    main()
