"""The settings of runs in words, for captions and tables: machine, plans, and requests left out of logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SHARED = {"turns": "processes take turns on a GPU", "fluid": "GPUs shared as under MPS by all"}


PLANS = {  # the requests that offline planners saw, as captions name them
    "held-out": "planners saw other requests than these",
    "window": "oracle: plans know the window",
    "trace": "oracle: plans know the trace",
    "prefix": "plans from the first tenth of the trace",
}
LAW = "kernels take turns"  # the law by which models share a GPU in the simulator (docs/semantics.md)


def fidelities(kinds: Iterable[str]) -> str:
    """List the fidelities of runs, each once. Simulated runs also have the law by which models share a GPU."""
    return ", ".join(f"{kind} ({LAW})" if kind == "simulated" else kind for kind in dict.fromkeys(kinds))


def plans(origins: Iterable[str]) -> str:
    """Describe which requests planners saw when they made their plans.

    Plans that know the window or the whole trace serve only as a bound. They are not mentioned if there are other plans
    (held-out or prefix).
    """
    asked = {origin for origin in origins if origin}
    known = {"window", "trace"} if asked & {"held-out", "prefix"} else set()
    return " and ".join(PLANS.get(origin, f"plans from the {origin}") for origin in sorted(asked - known))


def scaled(factors: Mapping[str, float]) -> str:
    """List the constants of the machine that a run scales, each with its scale factor."""
    return ", ".join(f"{name} x {factor:g}" for name, factor in factors.items())


def left_out(panels: Iterable[Mapping[str, Any]]) -> str:
    """Describe the requests of each log that were left out, because no model serves them; empty if there are none."""
    texts = {
        str(panel["trace"]).partition("+")[0]: text
        for panel in panels
        if (text := panel.get("left_out")) and not text.startswith("0 of ")
    }
    return "Left out: " + "; ".join(f"{text} of {log}" for log, text in texts.items()) + "." if texts else ""


def degrees(chosen: Iterable[tuple[str, str | None]]) -> str:
    """Say which systems chose their own degrees of parallelism; empty if none did.

    `chosen` has a pair for each system: its label, and "own" or None. None means that the model set gives the degrees.
    """
    names = sorted({label for label, word in chosen if word == "own"})
    return f"own degrees of parallelism: {', '.join(names)}; all others have the model set's" if names else ""


ASSIGNED = {"shuffled": "streams shuffled", "square": "streams by a Latin square"}


def machine(spec: Mapping[str, Any]) -> str | None:
    """Describe those settings of a run's spec that are not the defaults, for a caption; None if all are defaults."""
    links = {"pcie_gbps": "PCIe", "nvlink_gbps": "NVLink", "net_gbps": "network", "disk_gbps": "disk"}
    held, pool = spec.get("process_bytes"), spec.get("pool_bytes")
    facts = [
        ASSIGNED.get(spec.get("assign", ""), ""),
        f"placed as {Path(placed).stem}" if (placed := spec.get("placement")) else "",
        f"policies see the steps of {Path(seen).stem}" if (seen := spec.get("profile")) else "",
        "" if (share := spec.get("mem_fraction")) in {None, 0.9} else f"{share:g} of a GPU's memory for the engine",
        "" if pool is None else f"{pool / 2**30:.4g} GiB a GPU for weights and KV",
        "" if (host := spec.get("host_bytes")) is None else f"{host / 2**30:.4g} GiB a node for weights",
        "one process a model for all" if spec.get("process") == "model" else "",
        SHARED.get(spec.get("sharing", "own"), ""),
        "greedy sampling" if spec.get("sampling") == "greedy" else "",
        "" if held is None else f"{held / 2**30:.3g} GiB a process beside weights",
        *(f"{name} {spec[key]:g} GB/s" for key, name in links.items() if spec.get(key) is not None),
        scaled(spec.get("scaled") or {}),
    ]
    return ", ".join(fact for fact in facts if fact) or None
