"""The kernel's rows for a policy's instances and batches; a record is created when it is first needed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs import shapes
from harness.engines.machine import (
    Config,
    Machine,
    Served,
    block_bytes,
    footprint_bytes,
    granule_bytes,
    kept_pages,
    laid_out,
    priced_models,
)
from harness.engines.sim import kernel, state
from harness.engines.sim.start import Mode, initial
from harness.engines.sim.state import assign
from harness.policy.types import Batch, Cluster, Gpus, Host, Inst


class Names:
    """The maps from a policy's instances, KV accounts and batches to their rows in the kernel's records, and back."""

    def __init__(self, config: Config, cluster: Cluster, machine: Machine, mode: Mode) -> None:
        self._config, self._cluster, self._mode = config, cluster, mode
        self.S = initial(config, cluster, machine, mode)
        self.model = {m.name: k for k, m in enumerate(config.models)}
        models, others = priced_models(config), [*machine.others]
        self.cost_rows = {(m.name, m.tp): k for k, m in enumerate(models)}
        # the first row of the cost tables of each GPU's kind
        self.first_rows = [len(models) * (1 + others.index(kind)) if kind in others else 0 for kind in config.kinds]
        self.inst: dict[Inst, int] = {}
        self.insts: list[Inst] = []
        self.places: list[Gpus] = []  # the GPUs of each instance; empty for a host's
        self.batch: dict[Batch, int] = {}
        self.batches: list[Batch] = []
        self.limits: dict[tuple[str, int], int | None] = {}  # bytes of KV, by model and GPU
        self.weights: NDArray[Any] = np.zeros(0)  # the state of each instance's weights
        self.prompt_ids: list[int] = []  # ids of prompts' blocks, by model; empty without a prefix cache
        self._on_gpus: dict[str, list[int]] = {}  # rows by model
        self._hosted: dict[tuple[str, int], int] = {}  # rows by model and node, as a Host takes long to hash
        self._attended: list[int] = []  # accounts to which KV was moved to be attended there, in that order
        self._kinds, self._nodes = config.kinds, config.nodes
        self._footprints: dict[tuple[str, int], int] = {}  # bytes by model and degree

    # ------------------------------------------------------------ instances

    def inst_row(self, inst: Inst) -> int:
        """Return the row of an instance; create its record if it has none.

        Raises KeyError for an unknown model, and ValueError for an impossible place or tensor-parallel degree.
        """
        row = self.inst.get(inst)
        return self._new_inst(inst) if row is None else row

    def _new_inst(self, inst: Inst) -> int:
        c, S = self._config, self.S
        k = self.model[inst.model]
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
        home = -1 if host else self.inst_row(Inst(inst.model, Host(self._nodes[places[0]])))
        row = len(self.insts)
        I = S.grow("insts", 1)
        i = I[row]
        size = block_bytes(c, model)
        page = granule_bytes(c, model, True) if self._mode.elastic and not host else 0
        reserve = int(kept_pages(c) * page)
        taken = size * model.tp if host else size
        assign(
            i,
            model=k,
            gpu_count=len(places),
            host=home,
            is_host=host,
            cost=self.cost_rows[model.name, model.tp] + (0 if host else self.first_rows[places[0]]),
            block_bytes=taken,
            granule=page or taken,
            granule_blocks=max(1, page // size),
            open=-1,
            weight_bytes=shapes.weight_bytes(model.shape, model.tp),
            footprint=0 if host else self._footprint(model) + reserve,
            reserve=reserve,
            state=state.IN if host else state.OUT,
            limit=self.cap(inst.model, gpus),
            evict=-1,
            left_s=-math.inf,
            entries=-1,
            oldest=-1,
            youngest=-1,
            nodes=-1,
        )
        i["gpus"][: len(places)] = places
        if not host:
            kin = self._on_gpus.setdefault(inst.model, [])
            kin.append(row)
            i["kin"] = kin[0]
            I[kin[-2:][0]]["kin"] = row
        self.cache(row)
        self._plant(row)
        for g in gpus[1:]:
            kernel.tie(S.at, gpus[0], g)
        self.weights = S.insts.view(np.ndarray)["state"]
        self.inst[inst] = row
        self.insts.append(inst)
        self.places.append(gpus)
        return row

    def _plant(self, row: int) -> None:
        """Create the buddy allocator's tree for an account whose KV is contiguous.

        Do nothing for paged KV, for an account on a host, or if memory is unlimited.
        """
        S = self.S
        i = S.insts[row]
        if not self._mode.contiguous or i["is_host"] or self._mode.unlimited:
            return
        memory = min(self._cluster.gpus[g].mem_bytes for g in i["gpus"][: i["gpu_count"]].tolist())
        blocks: int = (memory - i["footprint"].item()) // i["block_bytes"].item()
        leaves = 1 << max(0, blocks - 1).bit_length()
        assign(i, leaves=leaves, nodes=len(S.nodes))
        S.grow("nodes", 2 * leaves)
        kernel.lay_out(S.at, row)

    def cache(self, row: int) -> None:
        """Create the prefix-cache entries of an account, one for each block id of its model.

        Do nothing if there is no prefix cache, or if the account is on a host.
        """
        S = self.S
        if self.prompt_ids and not S.insts[row]["is_host"]:
            S.insts["entries"][row] = len(S.entries)
            S.grow("entries", self.prompt_ids[S.insts[row]["model"]])

    def node(self, i: int) -> int:
        """Return the node of the instance in row `i`, which must be on GPUs."""
        return self._nodes[self.places[i][0]]

    def _footprint(self, model: Served) -> int:
        """Return the result of `footprint_bytes` for a model at its tensor-parallel degree.

        Results are cached, because `footprint_bytes` examines all models.
        """
        key = model.name, model.tp
        if key not in self._footprints:
            self._footprints[key] = footprint_bytes(self._config, model, self._mode.layout)
        return self._footprints[key]

    def cap(self, model: str, gpus: Gpus) -> int:
        """Return the lowest KV limit in bytes that a model has on any of these GPUs, or -1 if there is no limit."""
        limits = (self.limits.get((model, g)) for g in gpus)
        return min((x for x in limits if x is not None), default=-1)

    def accounts(self, model: str, gpu: int) -> list[int]:
        """Return the rows of a model's instances on a GPU."""
        return [i for i in self._on_gpus.get(model, ()) if gpu in self.places[i]]

    def account(self, model: str, place: Gpus | Host, attend: bool) -> int:
        """Return the row of a model's KV account at a place.

        With `attend`, the model's batches on other GPUs can attend to KV in that account from now on.
        """
        if not isinstance(place, Host):
            i = self.inst_row(Inst(model, place))
        elif (row := self._hosted.get((model, place.node))) is not None:
            return row
        else:
            i = self._hosted[model, place.node] = self.inst_row(Inst(model, place))
        if attend and i not in self._attended:
            self._attended.append(i)
            for b in range(len(self.batches)):
                self._reach(b, i)
        return i

    # ------------------------------------------------------------ batches

    def batch_row(self, batch: Batch) -> int:
        """Return the row of a batch; create its record if it has none.

        Raises the same errors as `inst_row`.
        """
        row = self.batch.get(batch)
        return self._new_batch(batch) if row is None else row

    def _new_batch(self, batch: Batch) -> int:
        i = self.inst_row(batch.inst)
        S, row, places = self.S, len(self.batches), self.places[i]
        b = S.grow("batches", 1)[row]
        near = len(S.remotes)
        assign(S.grow("remotes", 1)[near], inst=i, next=-1, demand=-1)
        assign(b, inst=i, tag=batch.tag, root=-1, clock_at=S.s["now"], ends=-1, due=-1, near=near)
        first, two = len(S.demands), laid_out(self._config, self._mode.layout) == "pair"
        lanes = assign(S.grow("lanes", 2)[-2:], lent=-1, op_s=-1, pieces=-1, next=-1, seqs=-1, chunk=-1, sms=-1)
        assign(lanes, slice_layers=-1, end=math.inf, process=[2 * i, 2 * i + two])
        assign(lanes, demand=[first, first + len(places)] if places else -1)
        D = S.grow("demands", 2 * len(places))
        for k in (first, first + len(places)):
            after = [*range(k + 1, k + len(places)), -1][: len(places)]
            assign(D[k : k + len(places)], gpu=places, next=after)
        self.batch[batch] = row
        self.batches.append(batch)
        for account in self._attended:
            self._reach(row, account)
        return row

    def _reach(self, b: int, i: int) -> None:
        """Let a batch attend to KV in account `i` from now on.

        Do nothing if the account belongs to another model, or if `attendable` is false for the GPUs of batch and
        account.
        """
        S, here, there = self.S, self.batches[b].inst, self.insts[i]
        mine, gpus = self.places[S.batches["inst"].item(b)], self.places[i]
        if here.model != there.model or not attendable(mine, gpus):
            return
        row, first = len(S.remotes), len(S.demands)
        assign(S.grow("demands", len(gpus))[first:], gpu=gpus)
        k = S.cost[S.insts["cost"].item(i)]
        out_s, back_s = (self._link_s(*pair) for pair in ((mine[0], gpus[0]), (gpus[0], mine[0])))
        link_s = k["query_bytes"] * out_s + k["result_bytes"] * back_s
        F = S.grow("remotes", 1)
        assign(F[row], link_s=link_s, inst=i, demand=first, next=-1)
        last = S.batches["near"].item(b)
        while (after := F["next"].item(last)) >= 0:
            last = after
        F["next"][last] = row
        kernel.tie(S.at, mine[0], gpus[0])

    def _link_s(self, g: int, h: int) -> float:
        """Return the seconds per byte from GPU `g` to GPU `h`, over their direct link or else through the host."""
        K, node = self.S.links["bytes_per_s"], self.S.gpus["node"]
        peers = float(K[4 * g + (2 if node[g] == node[h] else 3)])
        return 1 / peers if peers > 0 else 1 / float(K[4 * g + 1]) + 1 / float(K[4 * h])


def attendable(mine: Gpus, to: Gpus | Host | None) -> bool:
    """Tell whether a step on GPUs `mine` can attend to KV at the place `to`.

    Each rank attends to the KV of its counterpart, so `to` must have as many GPUs as `mine` and share no GPU with it.
    """
    return isinstance(to, tuple) and len(to) == len(mine) and not set(to) & set(mine)
