"""The records of a workload's requests, created at the start of a run or, for a long workload, piece by piece."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import spilled
from harness.engines.machine import Config, block_bytes, priced_models, reserved_blocks
from harness.engines.sim import records, state
from harness.engines.sim.names import Names
from harness.engines.sim.start import Mode
from harness.engines.sim.state import assign
from harness.policy.types import Jobs, Prefix, Request

ROWS = (  # fields that hold a row of another record: -1 until a request has one
    "batch", "node", "home", "prev", "next", "next_piece", "heap_child", "heap_next", "heap_prev", "pending_batch",
    "first_inst", "last_inst", "extents",
)  # fmt: skip


class Requests:
    """The requests of a workload in the kernel's records."""

    def __init__(self, names: Names, config: Config, mode: Mode, api_in_s: float, jobs: Jobs) -> None:
        """Create the records of all requests, or of the first piece of a long workload.

        Raises ValueError for an invalid closed loop, or if a prefix id does not cover a whole number of KV blocks.
        """
        self._names, self._config, self._mode, self._api_in_s, self.jobs = names, config, mode, api_in_s, jobs
        self.S = S = names.S
        n = len(jobs)
        S.set(left=n, to_come=n)
        S.put(requests=spilled.like(n, records.REQUEST))
        if mode.elastic and not mode.unlimited and jobs.prefix is None:
            self._page()
        if n > spilled.MOST_HELD and jobs.after is None and jobs.prefix is None:
            self._fill(0, spilled.PIECE)
            return
        self._fill(0, n)
        if jobs.after is not None and jobs.think_s is not None:
            S.set(opened=self._close_loop(jobs.after, jobs.think_s))
        if jobs.prefix is not None and not mode.contiguous:  # contiguous KV has no blocks to share
            self._reuse(jobs.prefix)

    def _fill(self, begin: int, end: int) -> None:
        """Create the records of requests [begin, end); all requests before `begin` must have records already."""
        jobs, S = self.jobs.part(begin, end), self.S
        R = S.requests[begin:end]
        assign(R, arrival=jobs.arrival_s + self._api_in_s, first=math.nan, done=math.nan, admit=math.nan)
        assign(R, model=jobs.model, prompt=jobs.prompt_tokens, output=jobs.output_tokens)
        assign(R, state=state.FUTURE, heir=-1, found=-1, **dict.fromkeys(ROWS, -1))
        if self._mode.reserves:
            assign(R, chunk=reserved_blocks(self._config, self._mode.kv, jobs))
        S.set(opened=end, to_come=len(self.jobs) - end)
        self.states: NDArray[Any] = S.requests[:end].view(np.ndarray)["state"]

    def refill(self) -> None:
        """Create the records of a long workload's next piece.

        The records of earlier pieces leave main memory until they are read again.
        """
        begin = int(self.S.s["opened"])
        spilled.release(self.S.requests, *self.jobs.columns)
        self._fill(begin, min(begin + spilled.PIECE, len(self.jobs)))

    def _page(self) -> None:
        """Create a row in `pages` and a row in `extents` for each KV block that can exist at a time.

        The number of rows is the smaller of two: the blocks that fit on the GPUs, and twice the blocks of all requests.
        The factor 2 is for KV moves, during which a request has blocks at both ends.
        """
        c, S, jobs = self._config, self.S, self.jobs
        fit = int((S.gpus["cap"][: c.gpus] // min(block_bytes(c, m) for m in priced_models(c))).sum())
        tokens = int(jobs.prompt_tokens.sum(dtype=np.int64) + jobs.output_tokens.sum(dtype=np.int64))
        most = min(fit, 2 * (tokens // c.block_tokens + 2 * len(jobs)))
        S.set(paged=1)
        S.put(pages=np.zeros(most, records.PAGE), extents=np.zeros(most, records.EXTENT))

    def _reuse(self, prefix: Prefix) -> None:
        """Create a prefix cache in each account on GPUs, with an entry for each block id of the account's model.

        Raises ValueError if a block id does not cover a whole number of KV blocks.
        """
        S, tokens, names = self.S, self._config.block_tokens, self._names
        if prefix.block_tokens % tokens:
            raise ValueError(
                f"block_tokens, {tokens}, is no divisor of the {prefix.block_tokens} that an id stands for"
            )
        ids = np.diff(prefix.offsets)
        assign(S.requests, ids=ids, chain=prefix.offsets[:-1])
        chains, owner = np.zeros(len(prefix.ids), records.CHAIN), np.repeat(self.jobs.model, ids)
        for k in range(len(names.model)):
            unique, chains["entry"][owner == k] = np.unique(prefix.ids[owner == k], return_inverse=True)
            names.prompt_ids.append(len(unique))
        S.set(reuse=1, id_blocks=prefix.block_tokens // tokens)
        S.put(chains=chains, entries=np.zeros(len(S.requests), records.ENTRY))
        for row in range(len(names.insts)):
            names.cache(row)

    def _close_loop(self, after: NDArray[np.int32], think_s: NDArray[np.float64]) -> int:
        """Record each request's successor in a closed loop.

        Return the number of requests that have their own arrival times; these requests must come first. Raises
        ValueError for an invalid closed loop.
        """
        later = np.flatnonzero(after >= 0)
        opened = len(after) - len(later)
        before = after[later]
        if len(np.unique(before)) < len(before) or (before >= later).any() or (later < opened).any():
            raise ValueError("each request of a closed loop comes after one of its own, and behind those that are open")
        R = self.S.requests
        R["heir"][before], R["think"][later] = later, think_s[later]
        return opened

    def came(self, rid: int) -> bool:
        """Tell whether `rid` is a request of the workload that has arrived."""
        return 0 <= rid < len(self.states) and self.states.item(rid) != state.FUTURE

    def request(self, r: int) -> Request:
        """Return the facts about a request that a policy gets when the request arrives."""
        jobs = self.jobs
        arrival_s = jobs.arrival_s.item(r)
        if arrival_s == math.inf:  # a client of a closed loop sent it
            arrival_s = self.S.requests["arrival"].item(r) - self._api_in_s
        return Request(
            r,
            jobs.models[jobs.model.item(r)],
            arrival_s,
            jobs.prompt_tokens.item(r),
            jobs.ttft_slo_s.item(r),
            jobs.tpot_slo_s.item(r),
        )
