"""Every figure that the bench draws, of rows made for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from plots import (
    fig_causes,
    fig_compare,
    fig_size,
    fig_staggered,
    fig_switch,
    fig_tornado,
    fig_trace,
    fig_turns,
    fig_weaver,
    lines,
    matrix,
    overview,
    parts,
    scatter,
    tradeoff,
)
from tests.harness.answers import test_tradeoff as settings
from tests.harness.validate import test_staggered as ramps
from tests.plots import test_fig_study as studies
from tests.plots import test_overview as overviews
from tests.plots import test_plots as compared

SINGLE = compared.sweep({"values": compared.values(0.9)})
LONG = "A note that no line of a caption holds, since it goes on for many words after it has said what it had to say."


def _comparison(count: int) -> Figure:
    good = {"prism": 900.0, "muxserve:plusplus+quotas=none": 400.0, "static:equal": 300.0}
    bad = {"qlm+way=host": 5.0, "qlm:pool": 4.0, "serverlessllm_released:plus": 3.0}
    rates = (0.35, 0.71, 1.42, 2.83, 5.67, 11.3)[:count]
    met = {(label, x): 1 - x / knee for label, knee in good.items() for x in rates}
    met |= {(label, x): max(0.0, 0.95 - x / knee) for label, knee in bad.items() for x in rates}
    runs = [
        {"label": label, "rate_scale": x, "values": compared.values(share, 0.1 * x, x)}
        for (label, x), share in met.items()
    ]
    return fig_compare.draw(compared.sweep(*runs), LONG)


def _fleet(*, first: bool) -> Figure:
    rules = ("5/2xP95", "30/2xP95", "absolute:ttft=2,tpot=0.1")
    facts = studies.fleet(range(4), rules, 20.6)
    needed = {(slo, label): least for slo in rules for label, least in (("prism", 4), ("static", 99))}
    return lines.pages(studies.of_fleet(facts, needed, (2, 4, 16, 32)), facts, LONG)[not first]


def _size(kinds: tuple[str, ...]) -> Figure:
    rows = [
        (gpu, label, 8 * k, 576.0 * k * (1 + n), share, None, None, share, "m", k == 2)
        for n, gpu in enumerate(kinds)
        for label in ("prism", "static:rate")
        for k, share in ((1, 0.26), (2, 0.98), (4, 1.0))
    ]
    return fig_size.draw(pd.DataFrame(rows, columns=fig_size.COLUMNS), 0.95, LONG)


def _tornado() -> Figure:
    rows = [("", "", "as it is", 0.05)] + [
        (name, "0.8 ms, of one step", f"x {x:g}", 0.05 * x)
        for name in ("step_overhead_ms", "link_bandwidth_gb_s")
        for x in (0.5, 2.0)
    ]
    leads = pd.DataFrame(rows, columns=["constant", "value", "setting", "mean"]).assign(
        low=0.01, high=0.09, n=3, note=""
    )
    facts = {"rates": [1.0], "first": "prism", "second": "static"}
    return fig_tornado.draw(leads, facts, SINGLE.to_pandas(), LONG)


def _causes() -> Figure:
    rows = [
        {"label": label, "cause": cause, "seconds": 0.1 * k, "share": k / 36}
        for label in ("prism", "muxserve:plusplus")
        for k, cause in enumerate(fig_causes.LOOKS)
    ]
    points = pd.DataFrame(rows).assign(rate_scale=1.0, offered_rps=6.0, runs=3, offered=900, missed=90)
    return fig_causes.draw(points, SINGLE, "both")


SPEC = {
    "system": "aegaeon",
    "preset": None,
    "trace": "aegaeon-like",
    "models": "light8",
    "gpus": 2,
    "gpu": "h100",
    "host": "vllm-graph",
    "seed": 0,
}


def _turns() -> Figure:
    kinds = ("llama-3.1-8b", "qwen-3-4b")
    rows = [
        {"gpus": gpu, "model": f"{kinds[k % 2]}/{k}", "start_s": 5.0 * k, "end_s": 5.0 * k + 4}
        for gpu in "01"
        for k in range(12)
    ]
    return fig_turns.draw(pd.DataFrame(rows).assign(phase="decode"), {"spec": SPEC}, LONG)


def _switch() -> Figure:
    shown = {
        "system": ["aegaeon", "aegaeon:no-sync"],
        "engine start": [0.1, 1.0],
        "weights": [0.4, 2.0],
        "KV and waiting": [0.0, 0.5],
        "hidden": [0.3, 0.0],
    }
    return fig_switch.draw(pd.DataFrame(shown), LONG)


def _trace() -> Figure:
    draw, models = np.random.default_rng(0), tuple(f"m{k}" for k in range(6))
    arrival_s, model = np.sort(draw.uniform(0, 7200, 400)), draw.integers(0, 6, 400).astype(np.int32)
    prompt, output = draw.integers(1, 9000, 400), draw.integers(1, 900, 400)
    trace = {"arrival_s": arrival_s, "model": model, "prompt_tokens": prompt, "output_tokens": output, "span_s": 7200.0}
    return fig_trace.draw(fig_trace.points(arrival_s, model, models, 7200.0), trace, LONG)


def _weaver() -> Figure:
    series = {
        "hot": ("Weaver", "dedicated"),
        "cold": ("Weaver", "dedicated"),
        "muxserve": ("Weaver", "MuxServe", "MuxServe-Temporal"),
        "share": ("hot model", "cold model"),
        "highest": ("dedicated", "Weaver", "Weaver, long outputs"),
        "control": ("CPU", "GPU", "GPU, split"),
    }
    rows = [
        {"panel": panel, "series": name, "x": x, "seed": seed, "value": 20 + x + seed}
        for panel, names in series.items()
        for name in names
        for seed in range(3)
        for x in ([0.05, 0.5] if panel == "share" else [0.0] if panel in fig_weaver.PAPER else [1.0, 14.0, 29.0])
    ]
    return fig_weaver.draw(pd.DataFrame(rows))


def _kernels() -> Figure:
    rows = [
        {"panel": panel, "gpu": gpu, "op": "gemm", "held": held, "measured_s": 10.0**-k, "predicted_s": 1.1 * 10.0**-k}
        for panel in scatter.KERNELS
        for gpu in scatter.GPUS
        for held in (False, True)
        for k in range(1, 7)
    ]
    return scatter.kernels(pd.DataFrame(rows))


def _runs() -> Figure:
    rows = [
        {"row": k, "engine": engine, "metric": metric, "measured": 0.03 * k, "ours": 0.033 * k, "fitted": k == 1}
        for engine in ("vllm-0.6", "sglang-0.4", "llamacpp")
        for metric in scatter.RUNS
        for k in (1, 2, 40)
    ]
    return scatter.runs(pd.DataFrame(rows).assign(file="f", gpu="a100-80g", unscored=""))


def _calibrated() -> Figure:
    rows = [
        {"model": model, "what": what, "held": held, "measured_s": s, "fitted_s": 1.05 * s}
        for model in ("llama-3.2-1b", "qwen-3-4b", "llama-3.1-8b", "qwen-3-0.6b")
        for what in scatter.OF_STEPS
        for held in (False, True)
        for s in (0.01, 0.03)
    ]
    return scatter.steps(pd.DataFrame(rows), LONG)


def _servers() -> Figure:
    rows = [
        {"measure": measure, "servers": 0.5 * k, "simulator": 0.45 * k, "spread": 0.1, "error": 0.1}
        for measure in ("both", *(f"{metric}_p{q}_s" for metric in ("ttft", "tpot") for q in (50, 95, 99)))
        for k in (1, 2)
    ]
    return scatter.servers(pd.DataFrame(rows), "both", LONG)


def _overview() -> Figure:
    figure = overview.draw(overviews.TABLE, overviews.FACTS, LONG)
    assert figure is not None
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "compare": lambda: _comparison(6),
    "compare, a rate": lambda: _comparison(1),
    "compare, a grid": lambda: fig_compare.draw(compared.GRID, LONG),
    "lines": lambda: lines.draw(studies.CURVES, studies.ABOUT, LONG),
    "lines, pages": lambda: lines.pages(overviews.TABLE, overviews.FACTS, LONG)[-1],
    "overview": _overview,
    "matrix": lambda: matrix.draw(studies.RATIOS, studies.MATRIX, LONG),
    "steps": lambda: matrix.draw(studies.STEPPED, studies.STEPS, LONG),
    "fleet": lambda: _fleet(first=True),
    "fleet, curves": lambda: _fleet(first=False),
    "parts": lambda: parts.draw(studies.WITHOUT, studies.PARTS, LONG),
    "tradeoff": lambda: tradeoff.draw(settings.TABLE, settings.FACTS, LONG),
    "size": lambda: _size(("h200",)),
    "size, kinds": lambda: _size(("h200", "l40s")),
    "tornado": _tornado,
    "causes": _causes,
    "turns": _turns,
    "switch": _switch,
    "trace": _trace,
    "weaver": _weaver,
    "staggered": lambda: fig_staggered.draw(ramps.frame({"measured": 4.0, "ours": 5.0, "low": 5.1, "high": 4.9}), LONG),
    "kernels": _kernels,
    "validate": _runs,
    "calibrate": _calibrated,
    "predicted": _servers,
}
