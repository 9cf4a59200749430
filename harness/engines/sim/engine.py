"""The simulator as an `Engine`: names to rows, actions to kernel calls, codes to events. No physics lives here.

Over 600 lines: each action, event and query of the vocabulary is turned into rows and codes here, by the same names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness import spilled
from harness.engines.costs import constants, process, quantities, shapes
from harness.engines.machine import (
    CONTIGUOUS,
    PIECE_BYTES,
    Config,
    Machine,
    Refusal,
    Served,
    block_bytes,
    cluster,
    footprint_bytes,
    granule_bytes,
    kept_pages,
    laid_out,
    machine,
    memory,
    priced_models,
    profile,
    reserved_blocks,
)
from harness.engines.sim import kernel, records, state
from harness.engines.sim.host_memory import HostMemory
from harness.engines.sim.span import Span
from harness.engines.sim.state import State
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Failed, Finished, Freed, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.types import (
    GIB,
    Batch,
    Fidelity,
    Gpus,
    Host,
    Inst,
    Jobs,
    Option,
    Phase,
    Prefix,
    Request,
    UserError,
)
from harness.policy.view import BatchState, KvState, RequestState, Transit, View, Weights

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "PIECE_BYTES",
    "Config",
    "Machine",
    "Served",
    "Sim",
    "SimView",
    "block_bytes",
    "cluster",
    "granule_bytes",
    "machine",
    "memory",
    "profile",
]

TELLS: dict[type, int] = {
    Finished: state.E_FINISHED,
    Prefilled: state.E_PREFILLED,
    Preempted: state.E_PREEMPTED,
    TurnEnded: state.E_TURN,
    Arrived: state.E_ARRIVED,
}
ENDS: dict[int, Any] = {state.DONE: "done", state.DROPPED: "dropped", state.FAILED: "failed"}
STATES = np.array(
    ["unfinished"] * state.DONE + ["done", "dropped", "failed"],
)
MOST_BLOCK_TOKENS = records.BATCH["residues"].shape[0]
SOURCES: Mapping[quantities.Link, int] = {"pcie": state.PCIE, "spread": state.SPREAD, "disk": state.DISK}
WEIGHTS: tuple[Weights, ...] = ("out", "waiting", "loading", "in", "leaving", "leaving")
TRANSIT: tuple[Transit, ...] = ("none", "waiting", "moving")
PHASES: Mapping[Phase, int] = {"mixed": 0, "prefill": 1, "decode": 2}
PHASE: tuple[Phase, ...] = ("mixed", "prefill", "decode")
NOWHERE = (  # rows that a request does not know of yet
    "batch",
    "node",
    "home",
    "prev",
    "next",
    "next_piece",
    "heap_child",
    "heap_next",
    "heap_prev",
    "pending_batch",
    "first_inst",
    "last_inst",
    "extents",
)
NOT_THERE = "KV is attended on as many other GPUs as its batch has, and not on its own"
WHY: tuple[Literal["time", "steps", "empty", "stuck"], ...] = ("time", "steps", "empty", "stuck")


class Sim:
    """A deterministic engine in virtual time: same spec, same bytes."""

    fidelity: Fidelity = "simulated"
    wall_clock = exclusive = False
    lacks = ""
    measured_on: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, config: Config, options: Mapping[str, Option] | None = None, priced: Machine | None = None
    ) -> None:
        if config.block_tokens > MOST_BLOCK_TOKENS:
            raise UserError(f"block_tokens is {config.block_tokens}: the simulator takes at most {MOST_BLOCK_TOKENS}")
        options, self._machine = options or {}, priced or machine(config)
        self.config = config
        self.offers: Mapping[str, tuple[Option, ...]] = {
            "kv": ("paged", "elastic", *CONTIGUOUS),
            "preempt": ("recompute", "swap"),
            "sharing": ("fluid", "turns", "none"),
            "memory": ("real", "unlimited"),
            "process": process.LAYOUTS,
        }
        self._kv = str(options.get("kv", "paged"))
        self._elastic, self._contiguous = self._kv == "elastic", self._kv in CONTIGUOUS
        self._reserves = self._contiguous or config.admission == "output"
        layout: Any = options.get("process", "model")
        self._layout: process.Layout = layout
        preferred = options.get("sharing", "fluid")
        self._sharing = preferred if config.sharing == "own" or preferred == "none" else config.sharing
        self.cluster = cluster(config, self._elastic, self._machine, self._layout)
        self._kinds, self._nodes = config.kinds, config.nodes
        self._specs = [self._machine.of(kind).spec for kind in self._kinds]
        self._ways = self._machine.ladder
        self.can = frozenset(
            {
                "Load", "Evict", "Evict.drain", "Limit", "Admit", "Drop", "Run", "Run.phase:prefill",
                "Run.phase:decode", "Run.for_s", "Run.steps", "Run.steps:0", "Run.seqs", "Run.chunk_tokens", "Run.sms",
                "Run.slice_layers", "Run.op_s", "Move", "Move.to:gpu", "Move.to:host", "Move.to:none", "Move.attend",
                "view.oracle_tokens",
            }
            | {f"Load.way:{way}" for way in self._ways}
        )  # fmt: skip
        self.tells = frozenset({Woke, Arrived, Prefilled, Finished, Preempted, TurnEnded, Done, Load, Evict, Move})
        self._host = self._machine.host
        self._names = [m.name for m in config.models]
        self._model = {name: k for k, name in enumerate(self._names)}
        models, others = priced_models(config), [*self._machine.others]
        self._rows = {(m.name, m.tp): k for k, m in enumerate(models)}  # of the cost tables
        self._first_rows = [len(models) * (1 + others.index(kind)) if kind in others else 0 for kind in self._kinds]
        self._footprints: dict[tuple[str, int], int] = {}  # by model and degree
        self._inst: dict[Inst, int] = {}
        self._insts: list[Inst] = []
        self._places: list[Gpus] = []  # the GPUs of each, none for hosts
        self._of: dict[str, list[int]] = {}  # on GPUs, by model
        self._hosted: dict[tuple[str, int], int] = {}  # in host memory, by model and node: a Host takes long to hash
        self._loaded: dict[int, list[int]] = {}  # by GPU: instances in order of their last Load, some gone since
        self._batch: dict[Batch, int] = {}
        self._batches: list[Batch] = []
        self._attended: list[int] = []  # accounts to which KV was moved to be attended there, as they came
        self._limits: dict[tuple[str, int], int | None] = {}
        self._orders: dict[tuple[int, int], Run] = {}
        self._actions: dict[int, Action] = {}  # by the numbers under which the kernel has them
        self._told: deque[Event] = deque()
        self._landing: set[Inst] = set()  # an eviction was refused while their weights were on their way
        self._hears: frozenset[type] = frozenset()
        self._oracle = False
        self._settled = False
        self._begun = self._short = False  # there was no room for a load before the start
        self._jobs: Jobs | None = None
        self._states: NDArray[Any] = np.zeros(0)
        self._models: NDArray[Any] = np.zeros(0)
        self._logs: list[NDArray[Any]] = []
        self._view = SimView(self, config.start_s)
        self._span = Span(config.window_s)
        self._spare = 2 * config.batch_cap + 64, 2 * config.node_gpus + 16  # events, transfers that an action may need
        self._options = options
        self._weights: NDArray[Any] = np.zeros(0)
        self._memories = self._host_memories()
        self._ids: list[int] = []  # of prompts, by model; none: there is no prefix cache

    # ------------------------------------------------------------ set-up

    def _host_memories(self) -> list[HostMemory]:
        """Return the weights in each node's memory, the models of the highest planned rates; none if hosts hold all."""
        c = self.config
        if c.host_bytes is None:
            return []
        sizes = {m.name: shapes.weight_bytes(m.shape) for m in c.models}
        order = sorted(sizes, key=lambda m: c.plan[m].rate_rps if m in c.plan else 0.0)
        return [HostMemory(c.host_bytes, sizes, order, self._coming_in) for _ in range(self._nodes[-1] + 1)]

    def _coming_in(self, i: int) -> bool:
        return self._weights.item(i) in (state.QUEUED, state.LOADING)

    @cached_property
    def S(self) -> State:  # noqa: N802 - capital as in the kernel
        """The kernel's records, made when first needed: engines are also made to ask what they can do."""
        options = self._options
        c, nodes = self.config, self._nodes[-1] + 1
        specs = self._specs + [self._specs[self._nodes.index(node)] for node in range(nodes)]  # hosts behind GPUs
        n = len(specs)
        S = State()
        w = S.s
        w["quiet_s"], w["formed_s"], w["end"] = -math.inf, -math.inf, math.inf
        w["now"], w["sigma"], w["seed"] = c.start_s, c.noise, c.seed
        w["reserves"] = self._reserves
        w["piecewise"] = c.admission == "chunk" and not self._reserves
        w["watermark"] = 0.0 if self._reserves else c.watermark  # kept for growth, of which there is none
        w["unlimited"] = options.get("memory", "real") == "unlimited"
        w["alone"], w["quantum_s"] = self._sharing == "none", self._machine.quantum_s
        w["switching"] = self._machine.switching
        w["poll_s"] = self._machine.poll_s
        w["sliced"] = self._sharing == "turns" and laid_out(c, self._layout) != "gpu"  # one process takes no turns
        w["co_run"] = constants.of(c.scaled, "co_run")
        w["swap"] = options.get("preempt", "recompute") == "swap"
        w["elastic"] = self._elastic
        w["piece_bytes"], w["first_host"] = c.piece_bytes, c.gpus
        w["block_tokens"], w["batch_cap"] = c.block_tokens, c.batch_cap
        w["chunk_tokens"], w["prefill_tokens"] = c.chunk_tokens, c.prefill_tokens
        w["log_tokens"], w["lookahead_steps"] = c.token_times, self._machine.host.lookahead_steps
        w["sent_head"] = w["sent_tail"] = -1
        w["ending_head"] = -1
        w["transfer_head"] = w["transfer_tail"] = w["transfer_free"] = w["action_free"] = -1
        w["turn_head"] = w["dirty_head"] = -1
        G = np.zeros(n, records.GPU)
        G["sms"], G["pool"], G["kv_since"] = [spec.sms for spec in specs], np.arange(n), c.start_s
        G["node"] = [*self._nodes, *range(nodes)]
        G["cap"] = [gpu.mem_bytes for gpu in self.cluster.gpus] + [spec.host_bytes for spec in specs[c.gpus :]]
        weights = sum(shapes.weight_bytes(m.shape) for m in c.models)
        G["used"][c.gpus :] = weights if c.host_bytes is None else min(weights, c.host_bytes)
        G["head"] = G["lane"] = -1
        G["end"] = math.inf
        K = np.zeros(4 * n, records.LINK)
        for name in ("current", "kv_head", "kv_tail", "weights_head", "weights_tail"):
            K[name] = -1
        K["end"] = math.inf
        for at, name in enumerate(("h2d", "d2h", "nvlink", "net")):
            K["bytes_per_s"][at : 4 * c.gpus : 4] = [getattr(spec, name) for spec in self._specs]
        K["bytes_per_s"][4 * c.gpus :: 4] = [spec.disk for spec in specs[c.gpus :]]
        M = np.zeros(len(c.models), records.MODEL)
        M["since"], M["layers"] = c.start_s, [m.shape.layers for m in c.models]
        S.put(gpus=G, links=K, models=M, events=np.zeros(4 * c.batch_cap + 1024, records.EVENT))
        w["page_free"] = w["extent_free"] = -1
        if c.token_times:
            S.put(log=np.zeros(65536, records.LOG))
        more_free(S, "transfer", 9 * c.batch_cap + 256)
        S.price(state.Tables(*self._machine.stacked, np.full(len(c.models), -1)))
        return S

    def _inst_row(self, inst: Inst) -> int:
        """Return the row of an instance, made when it is first named.

        Raises KeyError for an unknown model, ValueError for a place or a degree that cannot be.
        """
        row = self._inst.get(inst)
        if row is not None:
            return row
        c, S = self.config, self.S
        k = self._model[inst.model]
        model = c.models[k]
        gpus: Gpus = ()
        host = isinstance(inst.place, Host)
        if isinstance(inst.place, Host):
            places = [c.gpus + inst.place.node]
        else:
            gpus, places = inst.place, list(inst.place)
            model = model.at(len(places))
            if len(set(places)) != len(places) or not all(0 <= g < c.gpus for g in places):
                raise ValueError(f"no such place {inst.place}")
            if len(kinds := {self._kinds[g] for g in places}) > 1:
                raise ValueError(f"GPUs {list(places)} are of several kinds: {', '.join(sorted(kinds))}")
        if places[0] >= len(S.gpus):
            raise ValueError(f"no such place {inst.place}")
        home = -1 if host else self._inst_row(Inst(inst.model, Host(self._nodes[places[0]])))
        S = self.S
        row = len(self._insts)
        I = more(S.insts, 1)
        i = I[row]
        size = block_bytes(c, model)
        i["model"], i["gpu_count"], i["host"], i["is_host"] = k, len(places), home, host
        i["cost"] = self._rows[model.name, model.tp] + (0 if host else self._first_rows[places[0]])
        i["block_bytes"] = size * model.tp if host else size
        i["granule"], i["granule_blocks"], i["open"] = i["block_bytes"], 1, -1
        i["weight_bytes"] = shapes.weight_bytes(model.shape, model.tp)
        i["footprint"] = 0 if host else self._footprint(model)
        if self._elastic and not host:
            page = granule_bytes(c, model, True)
            i["granule"], i["granule_blocks"] = page, max(1, page // size)
            i["reserve"] = int(kept_pages(c) * page)
            i["footprint"] += i["reserve"]
        i["state"] = state.IN if host else state.OUT
        i["limit"] = self._cap(inst.model, gpus)
        i["evict"], i["left_s"] = -1, -math.inf
        i["entries"] = i["oldest"] = i["youngest"] = -1
        i["gpus"][: len(places)] = places
        i["nodes"] = -1
        if not host:
            kin = self._of.setdefault(inst.model, [])
            kin.append(row)
            i["kin"] = kin[0]
            I[kin[-2:][0]]["kin"] = row
        S.put(insts=I)
        self._cache(row)
        self._plant(row)
        for g in gpus[1:]:
            kernel.tie(S.at, gpus[0], g)
        self._weights = S.insts.view(np.ndarray)["state"]
        self._inst[inst] = row
        self._insts.append(inst)
        self._places.append(gpus)
        return row

    def _plant(self, row: int) -> None:
        """Make the tree of an account whose KV is contiguous, unless it is a host's or memory never runs short."""
        S = self.S
        i = S.insts[row]
        if not self._contiguous or i["is_host"] or S.s["unlimited"]:
            return
        held = min(self.cluster.gpus[g].mem_bytes for g in i["gpus"][: i["gpu_count"]].tolist())
        blocks: int = (held - i["footprint"].item()) // i["block_bytes"].item()
        i["leaves"] = 1 << max(0, blocks - 1).bit_length()
        i["nodes"] = len(S.nodes)
        S.put(nodes=more(S.nodes, 2 * i["leaves"].item()))
        kernel.lay_out(S.at, row)

    def _node(self, i: int) -> int:
        """Return the node of an instance on GPUs."""
        return self._nodes[self._places[i][0]]

    def _footprint(self, model: Served) -> int:
        """Return `footprint_bytes`, which looks at all models, once for each model and degree."""
        known = self._footprints.get((model.name, model.tp))
        if known is None:
            known = self._footprints[model.name, model.tp] = footprint_bytes(self.config, model, self._layout)
        return known

    def _cap(self, model: str, gpus: Gpus) -> int:
        """Return the least KV limit on an account's GPUs; -1 if there is none."""
        limits = (self._limits.get((model, g)) for g in gpus)
        return min((x for x in limits if x is not None), default=-1)

    def _accounts(self, model: str, gpu: int) -> list[int]:
        """Return the rows of a model's instances on a GPU."""
        return [i for i in self._of.get(model, ()) if gpu in self._places[i]]

    def _batch_row(self, batch: Batch) -> int:
        """Return the row of a batch, made when it is first named."""
        row = self._batch.get(batch)
        if row is not None:
            return row
        i = self._inst_row(batch.inst)
        S, row = self.S, len(self._batches)

        B, N = more(S.batches, 1), more(S.lanes, 2)
        b = B[row]
        b["inst"], b["tag"], b["root"], b["clock_at"] = i, batch.tag, -1, S.s["now"]
        b["ends"] = b["due"] = b["remote"] = -1
        N["lent"][-2:] = N["op_s"][-2:] = -1
        N["pieces"][-2:] = N["next"][-2:] = N["seqs"][-2:] = N["chunk"][-2:] = N["sms"][-2:] = -1
        N["slice_layers"][-2:] = -1
        N["end"][-2:] = math.inf
        first, places = len(S.demands), self._places[i]
        D = more(S.demands, 2 * len(places))
        for slot in (0, 1):
            k = first + slot * len(places)
            N["demand"][slot - 2] = k if places else -1
            N["process"][slot - 2] = 2 * i + slot * (laid_out(self.config, self._layout) == "pair")
            D["gpu"][k : k + len(places)] = places
            D["next"][k : k + len(places)] = [*range(k + 1, k + len(places)), -1][: len(places)]
        S.put(batches=B, lanes=N, demands=D)
        self._batch[batch] = row
        self._batches.append(batch)
        for account in self._attended:
            self._reach(row, account)
        return row

    def _attend(self, i: int) -> None:
        """Let batches of an account's model, also later ones, attend to KV that lies there."""
        if i not in self._attended:
            self._attended.append(i)
            for row in range(len(self._batches)):
                self._reach(row, i)

    def _reach(self, b: int, i: int) -> None:
        """Let a batch attend to KV in another account of its model: of as many GPUs, each another than its own."""
        S, here, there = self.S, self._batches[b].inst, self._insts[i]
        mine, gpus = self._places[S.batches["inst"].item(b)], self._places[i]
        if here.model != there.model or not attendable(mine, gpus):
            return
        row, first = len(S.remotes), len(S.demands)
        F, D = more(S.remotes, 1), more(S.demands, len(gpus))
        D["gpu"][first:] = gpus
        k = S.cost[S.insts["cost"].item(i)]
        out_s, back_s = (self._link_s(*pair) for pair in ((mine[0], gpus[0]), (gpus[0], mine[0])))
        F[row]["link_s"] = k["query_bytes"] * out_s + k["result_bytes"] * back_s
        F[row]["inst"], F[row]["demand"], F[row]["next"] = i, first, -1
        last, e = -1, S.batches["remote"].item(b)
        while e >= 0:
            last, e = e, F["next"].item(e)
        if last < 0:
            S.batches["remote"][b] = row
        else:
            F["next"][last] = row
        S.put(remotes=F, demands=D)
        kernel.tie(S.at, mine[0], gpus[0])

    def _link_s(self, g: int, h: int) -> float:
        """Return the seconds a byte takes between two GPUs: over their own link, or else through the host."""
        K, node = self.S.links["bytes_per_s"], self.S.gpus["node"]
        peers = float(K[4 * g + (2 if node[g] == node[h] else 3)])
        return 1 / peers if peers > 0 else 1 / float(K[4 * g + 1]) + 1 / float(K[4 * h])

    def take(self, jobs: Jobs) -> None:
        """Keep the workload; see Engine."""
        if jobs.models != tuple(self._model):
            raise ValueError("the workload's models are not the engine's")
        self._jobs = jobs

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Start the clock; see Engine."""
        jobs = self._jobs
        assert jobs is not None
        self._hears, self._oracle, self._begun = hears, oracle, True
        if self._short:
            self._told.append(Freed())  # from now on a load may wait for memory
        n = len(jobs)
        R, w = spilled.like(n, records.REQUEST), self.S.s
        w["left"] = w["to_come"] = n
        w["round_trip_s"] = self._host.api_in_s + self._host.api_out_s
        w["end"] = end_s
        w["heard"] = sum(1 << code for kind, code in TELLS.items() if kind in hears) | 1 << state.E_DONE
        self.S.put(requests=R)
        if self._elastic and not w["unlimited"] and jobs.prefix is None:
            self._page(jobs)
        if n > spilled.MOST_HELD and jobs.after is None and jobs.prefix is None:
            self._fill(0, spilled.PIECE)
            return
        self._fill(0, n)
        if jobs.after is not None and jobs.think_s is not None:
            w["opened"] = self._closed(R, jobs.after, jobs.think_s)
        if jobs.prefix is not None and not self._contiguous:  # contiguous KV has no blocks to share
            self._reuse(R, jobs.model, jobs.prefix)

    def _page(self, jobs: Jobs) -> None:
        """Make as many pages and extents as GPUs, or the requests at both ends of a move, may have blocks."""
        c, S = self.config, self.S
        fit = int((S.gpus["cap"][: c.gpus] // min(block_bytes(c, m) for m in priced_models(c))).sum())
        tokens = int(jobs.prompt_tokens.sum(dtype=np.int64) + jobs.output_tokens.sum(dtype=np.int64))
        most = min(fit, 2 * (tokens // c.block_tokens + 2 * len(jobs)))
        S.s["paged"] = 1
        S.put(pages=np.zeros(most, records.PAGE), extents=np.zeros(most, records.EXTENT))

    def _fill(self, begin: int, end: int) -> None:
        """Make the records of the requests [begin, end), of which the first is the next that arrives by itself."""
        assert self._jobs is not None
        jobs, S = self._jobs.part(begin, end), self.S
        R = S.requests[begin:end]
        R["arrival"] = jobs.arrival_s + self._host.api_in_s
        R["model"], R["prompt"], R["output"] = jobs.model, jobs.prompt_tokens, jobs.output_tokens
        R["state"], R["heir"], R["found"] = state.FUTURE, -1, -1
        if self._reserves:
            R["chunk"] = reserved_blocks(self.config, self._kv, jobs)
        R["first"] = R["done"] = R["admit"] = math.nan
        for name in NOWHERE:
            R[name] = -1
        S.s["opened"] = end
        S.s["to_come"] = len(self._jobs) - end
        self._states, self._models = S.requests[:end].view(np.ndarray)["state"], self._jobs.model

    def _refill(self) -> None:
        """Make the records of the next piece of a long workload; those behind it leave memory until they are needed."""
        jobs, begin = self._jobs, int(self.S.s["opened"])
        assert jobs is not None
        spilled.release(self.S.requests, *jobs.columns)
        self._fill(begin, min(begin + spilled.PIECE, len(jobs)))

    def _reuse(self, R: NDArray[Any], model: NDArray[np.int32], prefix: Prefix) -> None:
        """Keep a prefix cache of each model's ids in each of its accounts on GPUs."""
        S, tokens = self.S, self.config.block_tokens
        if prefix.block_tokens % tokens:
            raise ValueError(
                f"block_tokens, {tokens}, is no divisor of the {prefix.block_tokens} that an id stands for"
            )
        R["ids"], R["chain"] = np.diff(prefix.offsets), prefix.offsets[:-1]
        chains, owner = np.zeros(len(prefix.ids), records.CHAIN), np.repeat(model, R["ids"])
        for k in range(len(self._model)):
            unique, chains["entry"][owner == k] = np.unique(prefix.ids[owner == k], return_inverse=True)
            self._ids.append(len(unique))
        S.s["reuse"], S.s["id_blocks"] = 1, prefix.block_tokens // tokens
        S.put(chains=chains, entries=np.zeros(len(R), records.ENTRY))
        for row in range(len(self._insts)):
            self._cache(row)

    def _cache(self, row: int) -> None:
        """Make entries for the ids of an account's model, if there is a prefix cache and the account is on GPUs."""
        S = self.S
        if self._ids and not S.insts[row]["is_host"]:
            S.insts["entries"][row] = len(S.entries)
            S.put(entries=more(S.entries, self._ids[S.insts[row]["model"]]))

    @staticmethod
    def _closed(R: NDArray[Any], after: NDArray[np.int32], think_s: NDArray[np.float64]) -> int:
        """Note each request's successor; return the number that arrive by themselves, which are the first rows."""
        later = np.flatnonzero(after >= 0)
        opened = len(after) - len(later)
        before = after[later]
        if len(np.unique(before)) < len(before) or (before >= later).any() or (later < opened).any():
            raise ValueError("each request of a closed loop comes after one of its own, and behind those that are open")
        R["heir"][before], R["think"][later] = later, think_s[later]
        return opened

    # ------------------------------------------------------------ the protocol

    def ready(self) -> None:
        """Do nothing: there is nothing to start; see Engine."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back; see Engine."""

    def view(self) -> View:
        """Return read-only queries; see Engine."""
        return self._view

    def idle(self) -> bool:
        """Tell whether every request has ended."""
        return not (self.S.left[0] or self._told)

    def poll(self, until_s: float) -> Event | None:
        """Return the next event due by `until_s`; see Engine."""
        S = self.S
        if until_s < S.quiet_s[0] and until_s < self._span.next_s:  # no call into the kernel
            if until_s > S.now[0]:
                S.now[0] = self._view.now_s = until_s
            return None
        while True:
            i = S.events_read[0]
            if i < S.events_told[0]:
                S.events_read[0] = i + 1
                event = self._event(*S.events.item(i))
                return self._landed(event) if self._landing else event
            if self._told:  # behind what happened before
                return self._told.popleft()
            code = kernel.advance(S.at, min(until_s, self._span.next_s))
            self._view.now_s = S.now[0]
            if code == state.NOTHING and S.now[0] >= self._span.next_s:
                self._span.note(S.gpus[: self.config.gpus])
                continue
            if code == state.NOTHING:
                return None
            if code == state.GROW:
                self._grow()
            elif code == state.OVER and not self._give_up():
                if (end_s := S.s["end"].item()) < math.inf:
                    S.now[0] = self._view.now_s = end_s
                return None

    def _landed(self, event: Event) -> Event:
        """Return `Freed` for the end of a load for which an eviction was refused, else the event itself."""
        if not (isinstance(event, Done) and isinstance(event.action, Load) and event.action.inst in self._landing):
            return event
        self._landing.remove(event.action.inst)
        if Load in self._hears:
            self.S.events_read[0] -= 1  # told next
        return Freed()

    def _grow(self) -> None:
        """Enlarge the logs that are short of room; take in the next piece of a long workload."""
        S, cap = self.S, self.config.batch_cap
        w = S.s
        if w["to_come"] and w["arrived"] == w["opened"]:
            self._refill()
        most = 4 * cap + 64 + int(S.batches["count"][:, state.WAITING].max(initial=0))
        if len(S.events) - w["events_told"] < 2 * most:
            S.put(events=more(S.events, len(S.events) + most))
        if w["transfer_spare"] < 18 * (cap + 8):
            more_free(S, "transfer", len(S.transfers) + 9 * cap)
        if self.config.token_times and len(S.log) - w["log_used"] < 2 * (most + len(S.lanes)):
            self._logs.append(np.array(S.log[: w["log_used"]]))
            w["log_used"] = 0
            S.put(log=np.zeros(max(len(S.log), 4 * (most + len(S.lanes))), records.LOG))

    def _room(self, events: int, transfers: int) -> None:
        """Make room for the events and transfers of one action, which only `advance` checks otherwise."""
        S = self.S
        if len(S.events) - S.events_told[0] < events:
            S.put(events=more(S.events, len(S.events) + events))
        if S.transfer_spare[0] < transfers:
            more_free(S, "transfer", len(S.transfers) + transfers)

    def _note(self, action: Action, parts: int = 1) -> int:
        """Return the number under which the kernel tells an action's end, if that is heard or a part of it failed."""
        S = self.S
        if S.action_spare[0] == 0:
            more_free(S, "action", len(S.actions) + 64)
        a: int = kernel.note(S.at, parts, int(type(action) in self._hears))
        self._actions[a] = action
        return a

    def _give_up(self) -> bool:
        """Fail the first transfer that still waits for memory, as nothing else will happen."""
        x = self._grant()
        if x < 0:
            return False
        self._withdraw(x, "never", "no memory, and nothing left that could free any")
        return True

    def _grant(self) -> int:
        """Return the first transfer that waits for memory; -1 if there is none."""
        X, x = self.S.transfers, int(self.S.s["transfer_head"])
        while x >= 0 and X[x]["stage"] != state.GRANT:
            x = int(X[x]["next"])
        return x

    def _coming(self, inst: int) -> int:
        """Return the transfer that loads an instance."""
        X, x = self.S.transfers, int(self.S.s["transfer_head"])
        while X[x]["inst"] != inst or X[x]["kind"] != state.LOAD:
            x = int(X[x]["next"])
        return x

    def _withdraw(self, x: int, *refusal: *Refusal) -> None:
        S, a = self.S, self.S.transfers["action"].item(x)
        if self._memories and S.transfers["kind"].item(x) == state.LOAD:
            i = S.transfers["inst"].item(x)
            self._memories[self._node(i)].withdrawn(self._insts[i].model, i)
        if kernel.withdraw(S.at, x):
            kernel.forget(S.at, a)
            self._told.append(Done(self._actions[a], *refusal))

    def _event(self, ran_s: float, kind: int, a: int, b: int, c: int) -> Event:
        if kind == state.E_ARRIVED:
            return Arrived(self._request(a))
        batch = self._batches[b] if b >= 0 else None
        if kind == state.E_FINISHED:
            return Finished(a, batch, ENDS[c])
        if kind == state.E_DONE:
            action = self._actions[a]
            if c == 0:
                return Done(action)
            failed: Failed = "never" if c % 2 else "gone"
            if isinstance(action, Move) and isinstance(action.who, Batch):
                return Done(action, failed, f"the KV of {c // 2} of its members could not go there")
            return Done(action, failed, "too much KV to go there" if c % 2 else "no KV that could go there")
        assert batch is not None
        if kind == state.E_TURN:
            return TurnEnded(batch, PHASE[c // 4], WHY[c % 4], a, ran_s)
        return Prefilled(a, batch) if kind == state.E_PREFILLED else Preempted(a, batch)

    def _request(self, r: int) -> Request:
        jobs = self._jobs
        assert jobs is not None
        arrival_s = jobs.arrival_s.item(r)
        if arrival_s == math.inf:  # of a closed loop
            arrival_s = self.S.requests["arrival"].item(r) - self._host.api_in_s
        return Request(
            r,
            jobs.models[jobs.model.item(r)],
            arrival_s,
            jobs.prompt_tokens.item(r),
            jobs.ttft_slo_s.item(r),
            jobs.tpot_slo_s.item(r),
        )

    def do(self, action: Action) -> Done | None:
        """Start an action; see Engine."""
        S, (events, transfers) = self.S, self._spare
        if len(S.events) - S.events_told[0] < events or S.transfer_spare[0] < transfers:
            self._room(events, transfers)
        S.quiet_s[0] = -math.inf
        arm = ARMS[type(action)]
        try:
            refusal = arm(self, action)
        except (KeyError, ValueError, IndexError) as error:
            refusal = "never", f"{type(error).__name__}: {error}"
        if refusal is None:
            return None
        if refusal[0] == "not now":
            return Done(action, *refusal)
        self._told.append(Done(action, *refusal))
        return None

    def _load(self, action: Load) -> Refusal | None:
        i, way = self._inst_row(action.inst), action.way
        if way not in self._ways:
            return "never", f'no way "{way}" to load'
        S, now = self.S, self._weights.item(i)
        if now in (state.IN, state.QUEUED, state.LOADING):
            if self._begun and Load in self._hears and now == state.IN:
                self._told.append(Done(action))
            return None
        if now in (state.DRAINING, state.LEAVING):
            evicted = self._evicted(i)
            kernel.set_weights(S.at, i, state.IN)
            self._told.append(Done(evicted, "gone", "loaded again"))
            if Load in self._hears:
                self._told.append(Done(action))
            return None
        if kernel.never(S.at, i, 0):
            need = S.insts[i]["footprint"] / GIB
            return "never", f"{action.inst.model} needs {need:.1f} GiB, more than the GPU has"
        if not self._begun:
            if not kernel.place(S.at, i):
                self._short = True
                return "not now", f"no room for {action.inst.model} on {list(self._places[i])}"
            if self._memories:
                self._memories[self._node(i)].read(action.inst.model)
        else:
            rung, bytes_s = self._ways[way], self._specs[self._places[i][0]].h2d
            source = rung.source
            if self._memories and not self._memories[self._node(i)].read(action.inst.model, i) and source != "disk":
                source, disk_s = "disk", S.links["bytes_per_s"].item(4 * (self.config.gpus + self._node(i)))
                bytes_s = min(bytes_s, disk_s / len(self._places[i]))
            tail_s = rung.after_s(S.insts["weight_bytes"].item(i), bytes_s)
            kernel.load(S.at, i, self._note(action), SOURCES[source], tail_s)
        for g in self._places[i]:
            here = self._loaded.get(g, ())
            self._loaded[g] = [*(k for k in here if k != i and self._weights.item(k) != state.OUT), i]
        return None

    def _evict(self, action: Evict) -> Refusal | None:
        i, drain = self._inst_row(action.inst), action.drain
        now = self._weights.item(i)
        if now == state.OUT or isinstance(action.inst.place, Host):
            return "gone", "its weights are not in"
        if now == state.LOADING:
            self._landing.add(action.inst)
            self.S.actions["heard"][self.S.transfers["action"].item(self._coming(i))] = 1  # the end of its load is told
            return "not now", "its weights are still on their way"
        if now == state.QUEUED:
            self._withdraw(self._coming(i), "gone", "evicted")
            if Evict in self._hears:
                self._told.append(Done(action))
            return None
        if now == state.LEAVING or (now == state.DRAINING and drain):
            return "gone", "it is leaving already"
        if now == state.DRAINING:
            self._told.append(Done(self._evicted(i), "gone", "evicted at its next boundary instead"))
        kernel.evict(self.S.at, i, int(drain), self._note(action))
        return None

    def _evicted(self, i: int) -> Action:
        """Pop the Evict under which an instance is leaving; the caller tells its end."""
        a = self.S.insts["evict"].item(i)
        kernel.forget(self.S.at, a)
        return self._actions[a]

    def _limit(self, action: Limit) -> Refusal | None:
        model, gpu = action.model, action.gpu
        if model not in self._model or not 0 <= gpu < self.config.gpus:
            return "never", f"no {model} on GPU {gpu}"
        self._limits[model, gpu] = action.kv_bytes
        for i in self._accounts(model, gpu):
            kernel.limit(self.S.at, i, self._cap(model, self._places[i]))
        return None

    def _gone(self, rid: int) -> Refusal | None:
        if not 0 <= rid < len(self._states) or (now := self._states.item(rid)) == state.FUTURE:
            return "never", f"no request {rid}"
        return ("gone", "the request has ended") if now >= state.DONE else None

    def came(self, rid: int) -> bool:
        """Tell whether there is such a request and it has arrived."""
        return 0 <= rid < len(self._states) and self._states.item(rid) != state.FUTURE

    def _drop(self, action: Drop) -> Refusal | None:
        if failed := self._gone(action.rid):
            return failed
        kernel.on_request(self.S.at, action.rid, state.P_DROP, 0)
        return None

    def _admit(self, action: Admit) -> Refusal | None:
        who, batch = action.who, action.batch
        model = batch.inst.model
        if isinstance(who, str):
            if model != who:
                return "never", f"a batch of {model} cannot serve {who}"
            self.S.route[self._model[who]] = self._batch_row(batch)
            return None
        if failed := self._gone(who):
            return failed
        if self._names[self._models.item(who)] != model:
            return "never", f"a batch of {model} cannot serve request {who}"
        kernel.on_request(self.S.at, who, state.P_ADMIT, self._batch_row(batch))
        return None

    def _run(self, order: Run) -> Refusal | None:
        if order.slice_layers is not None and (order.slice_layers < 1 or order.phase != "prefill"):
            return "never", "a slice is of a prefill, and has at least one layer"
        if order.op_s is not None and not order.op_s > 0:
            return "never", "kernels of no time"
        if (order.for_s is not None and not order.for_s >= 0) or (order.steps or 0) < 0:
            return "never", "a turn takes a time or a count of steps, none below 0"
        if isinstance(place := order.batch.inst.place, Host):
            return "never", "host memory runs nothing"
        most = min((self._specs[g].sms for g in place if 0 <= g < len(self._specs)), default=0)
        if order.sms is not None and not 0 < order.sms <= most:
            return "never", f"no partition of {order.sms} SMs"
        b = self._batch_row(order.batch)
        named = (order.seqs, order.chunk_tokens, order.sms, order.slice_layers)
        seqs, chunk, sms, layers = [-1 if x is None else x for x in named]
        for_s = math.inf if order.for_s is None else float(order.for_s)
        steps = -1 if order.steps is None else order.steps
        op_s = -1.0 if order.op_s is None else float(order.op_s)
        close = int(steps == 0)
        kernel.run_lane(self.S.at, b, PHASES[order.phase], close, for_s, steps, seqs, chunk, sms, layers, op_s)
        if steps != 0:
            self._orders[b, int(order.phase == "decode")] = order
        return None

    def _move(self, action: Move) -> Refusal | None:
        S, who, to = self.S, action.who, action.to
        if isinstance(who, Batch):
            b = self._batch_row(who)
            if action.attend and not attendable(self._places[self.S.batches["inst"].item(b)], to):
                return "never", NOT_THERE
            n = kernel.movables(S.at, b, int(to is None))
            if n == 0:
                return "gone", "no KV to move"
            model = self.config.models[self._model[who.inst.model]]
            parts = 2 * max(model.tp, *model.degrees, 1)
            self._room(self._spare[0] + n, (1 + parts) * n)  # a batch may be any size
            kernel.move_batch(S.at, b, self._account(who.inst.model, action), int(action.attend), self._note(action, n))
            return None
        if failed := self._gone(who):
            return failed
        if self._states.item(who) == state.HELD:
            return "gone", "a request in no batch has no KV"
        if action.attend and not attendable(self._places[S.batches["inst"].item(S.requests["batch"].item(who))], to):
            return "never", NOT_THERE
        model = self.config.models[self._models.item(who)].name
        kernel.move(S.at, who, self._account(model, action), int(action.attend), self._note(action))
        return None

    def _account(self, model: str, move: Move) -> int:
        """Return the account to which a model's KV goes; -1 if the KV is discarded."""
        if move.to is None:
            return -1
        if not isinstance(move.to, Host):
            i = self._inst_row(Inst(model, move.to))
        elif (row := self._hosted.get((model, move.to.node))) is not None:
            return row
        else:
            i = self._hosted[model, move.to.node] = self._inst_row(Inst(model, move.to))
        if move.attend:
            self._attend(i)
        return i

    def _members(self, b: int) -> Iterator[int]:
        """Return the ids of a batch in order of Admit."""
        r = kernel.members(self.S.at, b)
        while r >= 0:
            yield r
            r = kernel.next_member(self.S.at)

    # ------------------------------------------------------------ results

    def stats(self) -> dict[str, float]:
        """Return counters of the whole run, and sums over its window, for a run's metadata."""
        S, n = self.S, self.config.gpus
        w = S.s
        steps = max(1.0, float(S.batches["steps"].sum()))  # those of a span one by one
        return {
            "steps": float(w["steps"]),
            "loads": float(w["loads"]),
            "evicts": float(w["evicts"]),
            "migrations": float(w["migrations"]),  # weights that left a place for another
            "moves": float(w["moves"]),
            "preemptions": float(w["preempts"]),
            "cap_bound": float(w["by_cap"]) / steps,
            "chunk_bound": float(w["by_chunk"]) / steps,
            "prefill_bound": float(w["by_prefill"]) / steps,
            **self._hit_share(),
            **self._span.stats(S.gpus[:n], float(w["now"])),
            "link_busy_s": float(S.links["busy_s"].sum()),
            "gpus": float(n),
        }

    def _hit_share(self) -> dict[str, float]:
        """Return the share of prompt tokens found in the prefix cache at first admission; empty without a cache."""
        if not self._ids:
            return {}
        R = self.S.requests
        came = R["found"] >= 0
        asked = int(R["prompt"][came].sum())
        return {"hit_share": int(R["found"][came].sum()) / asked if asked else 0.0}

    def finish(self) -> None:
        """Charge the waits of requests that have not ended up to the clock's time, once."""
        if self._settled:
            return
        self._settled = True
        if self.config.token_times:
            self.S.put(log=more(self.S.log, len(self.S.requests) + len(self.S.lanes)))
        end_s = float(self.S.s["now"])
        kernel.settle(self.S.at, end_s)
        while self.S.s["to_come"]:  # the run ended before they came
            self._refill()
        R = self.S.requests
        for piece in spilled.pieces(len(R), R):
            kernel.settle_requests(self.S.at, end_s, piece.start, piece.stop)

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield rows of requests.parquet; see Engine."""
        from harness.engines import rows, stamps

        self.finish()
        R, jobs, host, end_s = self.S.requests, self._jobs, self._host, float(self.S.s["now"])
        assert jobs is not None
        arrivals_s, tokens, gaps = stamps.arrivals(R, jobs, end_s, host.api_in_s), None, None
        if self.config.token_times:
            log = np.concatenate([*self._logs, self.S.log[: self.S.s["log_used"]]])
            tokens, gaps = rows.token_times(R, arrivals_s, log, host.api_out_s)
        yield from rows.batches(
            R,
            lambda piece: np.maximum(R["state"][piece] - state.DONE + 1, 0),
            jobs,
            self._places,
            arrivals_s=arrivals_s,
            fidelity=self.fidelity,
            end_s=end_s,
            api_in_s=host.api_in_s,
            api_out_s=host.api_out_s,
            tokens=tokens,
            gaps=gaps,
            alone_s=self._alone_s,
        )

    def _alone_s(self, piece: slice) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds that prefill and decode of requests take alone, at their models' own degrees.

        On the kind of GPU that served them, which is that of the first prefill; of a request without one the first.
        """
        from harness.engines.costs.alone import alone_s

        assert self._jobs is not None
        jobs = self._jobs.part(piece.start, piece.stop)
        row: NDArray[np.int64] = np.array([self._rows[m.name, m.tp] for m in self.config.models])[jobs.model]
        if self._machine.others:
            first_rows = np.array([self._first_rows[gpus[0]] if gpus else 0 for gpus in self._places] + [0])
            row += first_rows[self.S.requests["first_inst"][piece]]  # the last, 0, of one that was served nowhere
        return alone_s(self._machine.stacked, row, jobs.prompt_tokens, jobs.output_tokens, self.config.chunk_tokens)


def attendable(mine: Gpus, to: Gpus | Host | None) -> bool:
    """Tell whether a step on some GPUs can attend to KV on others: rank by rank, so on as many of them, all others."""
    return isinstance(to, tuple) and len(to) == len(mine) and not set(to) & set(mine)


def more(rows: NDArray[Any], n: int) -> NDArray[Any]:
    """Append n zero rows: in place where the allocation has room, else in a copy with room for as many again."""
    have, whole = len(rows) + n, rows.base
    if not isinstance(whole, np.ndarray) or len(whole) < have:
        whole = np.zeros(2 * have, rows.dtype)
        whole.view(np.uint8)[: rows.nbytes] = rows.view(np.uint8)  # numpy copies records field by field
    return whole[:have]


def more_free(S: State, name: str, n: int) -> None:
    """Make room for n more transfers and their parts, or for n more actions, on the free list."""
    w, rows, free = S.s, more(getattr(S, f"{name}s"), n), f"{name}_free"
    old = len(rows) - n
    rows["next"][old:] = np.arange(old + 1, len(rows) + 1)
    rows["next"][-1] = w[free]
    w[free] = old
    w[f"{name}_spare"] += n
    S.put(**{f"{name}s": rows})


# timers are replay's; a table, for a pattern match takes a microsecond
ARMS: Mapping[type[Action], Callable[[Sim, Any], Refusal | None]] = {
    Load: Sim._load,
    Evict: Sim._evict,
    Limit: Sim._limit,
    Admit: Sim._admit,
    Drop: Sim._drop,
    Run: Sim._run,
    Move: Sim._move,
}


class SimView:
    """The simulator's state at the last boundary, read in place."""

    def __init__(self, sim: Sim, now_s: float) -> None:
        self._sim = sim
        self.now_s = now_s  # passes in `Sim.poll` alone

    def weights(self, inst: Inst) -> Weights:
        """See View."""
        if isinstance(inst.place, Host):
            memories = self._sim._memories
            return memories[inst.place.node].weights(inst.model) if memories else "in"
        i = self._sim._inst.get(inst)
        return "out" if i is None else WEIGHTS[self._sim._weights.item(i)]

    def insts(self, home: int | Host) -> tuple[Inst, ...]:
        """See View."""
        if isinstance(home, Host):
            memories = self._sim._memories
            held = memories[home.node].models if memories else self._sim._names
            return tuple(Inst(model, home) for model in held)
        sim = self._sim
        return tuple([sim._insts[i] for i in sim._loaded.get(home, ()) if sim._weights.item(i) != state.OUT])

    def free_bytes(self, home: int | Host) -> int:
        """See View."""
        g = self._sim.config.gpus + home.node if isinstance(home, Host) else home
        return kernel.peek_free(self._sim.S.at, g)

    def kv(self, model: str, gpu: int) -> KvState:
        """See View."""
        sim = self._sim
        limit = sim._limits.get((model, gpu))
        free = self.free_bytes(gpu)
        used = sum(int(kernel.peek_used(sim.S.at, i)) for i in sim._accounts(model, gpu))
        return KvState(used, limit, max(0, free if limit is None else min(free, limit - used)))

    def batch(self, batch: Batch) -> BatchState:
        """See View."""
        b = self._sim._batch.get(batch)
        if b is None:
            return BatchState(0, 0, 0, 0, 0, 0, 0, 0, 0.0)
        return BatchState._make(kernel.peek_batch(self._sim.S.at, b))

    def members(self, batch: Batch) -> tuple[int, ...]:
        """See View."""
        b = self._sim._batch.get(batch)
        return () if b is None else tuple(self._sim._members(b))

    def request(self, rid: int) -> RequestState:
        """See View."""
        sim = self._sim
        if not sim.came(rid):
            raise KeyError(f"no request {rid} yet")
        made, size, b, home, transit = kernel.peek_request(sim.S.at, rid)
        batch, place = sim._batches[b] if b >= 0 else None, sim._insts[home].place if home >= 0 else None
        return RequestState(batch, made, size, place, TRANSIT[transit])

    def lane(self, batch: Batch, phase: Phase) -> Run | None:
        """See View."""
        sim = self._sim
        b = sim._batch.get(batch)
        slot = int(phase == "decode")
        if b is None or not sim.S.lanes[2 * b + slot]["open"]:
            return None
        order = sim._orders.get((b, slot))
        return order if order is not None and order.phase == phase else None

    def oracle_tokens(self, rid: int) -> int:
        """See View."""
        if not self._sim._oracle or self._sim._jobs is None:
            raise PermissionError('"view.oracle_tokens" is not among what this system uses')
        if not self._sim.came(rid):
            raise KeyError(f"no request {rid} yet")
        return int(self._sim._jobs.output_tokens[rid])
