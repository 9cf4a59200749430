"""The kernel's records at the start of a run, created from the engine options and the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from harness.engines.costs import constants, process, shapes
from harness.engines.machine import CONTIGUOUS, Config, Machine, laid_out
from harness.engines.sim import records
from harness.engines.sim.state import State, assign
from harness.policy.types import Cluster, Option


class Mode(NamedTuple):
    """The engine options that are in force in a run."""

    kv: str
    layout: process.Layout
    sharing: str
    swap: bool  # a preempted request's KV goes to the host
    unlimited: bool  # memory never runs short
    reserves: bool  # a request's KV is reserved when it is let in

    @classmethod
    def of(cls, config: Config, options: Mapping[str, Option]) -> Mode:
        """Return the mode that a spec and its engine options select.

        The spec's `sharing` overrides the `sharing` of the options, unless the spec says "own" or the options say
        "none".
        """
        kv, layout = str(options.get("kv", "paged")), options.get("process", "model")
        preferred = str(options.get("sharing", "fluid"))
        return cls(
            kv,
            layout,  # type: ignore[arg-type]
            preferred if config.sharing == "own" or preferred == "none" else config.sharing,
            options.get("preempt", "recompute") == "swap",
            options.get("memory", "real") == "unlimited",
            kv in CONTIGUOUS or config.admission == "output",
        )

    @property
    def elastic(self) -> bool:
        """Tell whether KV memory is mapped in pages that the models of a GPU share."""
        return self.kv == "elastic"

    @property
    def contiguous(self) -> bool:
        """Tell whether the KV of each request is one contiguous chunk."""
        return self.kv in CONTIGUOUS


def initial(c: Config, cluster: Cluster, machine: Machine, mode: Mode) -> State:
    """Return the kernel's records at the start of a run, without instances and requests."""
    nodes = c.nodes[-1] + 1
    specs = [machine.of(kind).spec for kind in c.kinds]
    specs += [specs[c.nodes.index(node)] for node in range(nodes)]  # hosts come behind GPUs
    n = len(specs)
    S = State()
    S.set(
        quiet_s=-math.inf,
        formed_s=-math.inf,
        end=math.inf,
        now=c.start_s,
        sigma=c.noise,
        seed=c.seed,
        reserves=mode.reserves,
        piecewise=c.admission == "chunk" and not mode.reserves,
        watermark=0.0 if mode.reserves else c.watermark,  # is room for growth; reserved KV does not grow
        unlimited=mode.unlimited,
        alone=mode.sharing == "none",
        quantum_s=machine.quantum_s,
        switching=machine.switching,
        poll_s=machine.poll_s,
        sliced=mode.sharing == "turns" and laid_out(c, mode.layout) != "gpu",  # one process takes no turns
        co_run=constants.of(c.scaled, "co_run"),
        swap=mode.swap,
        elastic=mode.elastic,
        piece_bytes=c.piece_bytes,
        first_host=c.gpus,
        block_tokens=c.block_tokens,
        batch_cap=c.batch_cap,
        chunk_tokens=c.chunk_tokens,
        prefill_tokens=c.prefill_tokens,
        log_tokens=c.token_times,
        lookahead_steps=machine.host.lookahead_steps,
    )
    heads = ("sent", "transfer", "ending", "turn", "dirty")
    S.set(**dict.fromkeys([f"{name}_head" for name in heads] + ["sent_tail", "transfer_tail"], -1))
    S.set(**dict.fromkeys(("transfer_free", "action_free", "page_free", "extent_free"), -1))
    weights = sum(shapes.weight_bytes(m.shape) for m in c.models)
    G = assign(
        np.zeros(n, records.GPU),
        sms=[spec.sms for spec in specs],
        pool=np.arange(n),
        kv_since=c.start_s,
        node=[*c.nodes, *range(nodes)],
        cap=[gpu.mem_bytes for gpu in cluster.gpus] + [spec.host_bytes for spec in specs[c.gpus :]],
        head=-1,
        lane=-1,
        end=math.inf,
    )
    assign(G[c.gpus :], used=weights if c.host_bytes is None else min(weights, c.host_bytes))
    K = assign(np.zeros(4 * n, records.LINK), current=-1, kv_head=-1, kv_tail=-1, end=math.inf)
    assign(K, weights_head=-1, weights_tail=-1)
    for at, name in enumerate(("h2d", "d2h", "nvlink", "net")):
        assign(K[at : 4 * c.gpus : 4], bytes_per_s=[getattr(spec, name) for spec in specs[: c.gpus]])
    assign(K[4 * c.gpus :: 4], bytes_per_s=[spec.disk for spec in specs[c.gpus :]])
    M = assign(np.zeros(len(c.models), records.MODEL), since=c.start_s, layers=[m.shape.layers for m in c.models])
    S.put(gpus=G, links=K, models=M, events=np.zeros(4 * c.batch_cap + 1024, records.EVENT))
    if c.token_times:
        S.put(log=np.zeros(65536, records.LOG))
    S.more_free("transfer", 9 * c.batch_cap + 256)
    S.price(machine.stacked, np.full(len(c.models), -1))
    return S
