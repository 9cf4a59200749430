"""The simulator's whole state as structured arrays: a row each for GPU, link, instance, batch, lane, request, transfer.

An instance row is also the KV account of its (model, place). Times are seconds, sizes bytes per GPU, -1 is "none".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs.coef import COST
from harness.engines.sim.jit import DISABLED, ROWS, array_at, rows_at

INF = math.inf
NOISE_TICKS = 64  # decode ticks that share one factor of step noise
ANY = 1 << 62  # more steps than a lane ever runs
HALF_NS = 0.5e-9  # stamps are whole nanoseconds: what ends within half a one belongs to the instant
# states of a request; one that has not arrived is none of an engine's business
FUTURE = -1
HELD, WAIT, RUN, PARK, AWAY, MOVE, DONE, DROPPED, FAILED = range(9)
# states of an instance's weights, which are there from IN on
OUT, QUEUED, LOADING, IN, DRAINING, LEAVING = range(6)
# kinds of a lane's step in flight
IDLE, STEP, SPAN = range(3)
# kinds of a lane in slot 0; slot 1 is always "decode"
MIXED, PREFILL = range(2)
# lists of a batch
WAITING, RUNNING, PARKED, ELSEWHERE = range(4)
# kinds of a transfer, and where it stands
LOAD, SWAP_OUT, SWAP_IN, SHIFT = range(4)
FREE, GRANT, LINK, TAIL = range(4)
# where weights come from
PCIE, SPREAD, DISK = range(3)
# events, in the order in which an instant tells them
E_DONE, E_FINISHED, E_PREFILLED, E_PREEMPTED, E_TURN, E_ARRIVED = range(6)
OK, GONE, NEVER = range(3)  # how a part of an action ended
# a lane's turn: none, waiting for its first step, or begun; and why it ended
NO_TURN, ORDERED, BEGUN = range(3)
TIME, STEPS, EMPTY, STUCK = range(4)
# what `advance` says
NOTHING, TOLD, GROW, OVER = range(4)
# caps on a step that keep members, or tokens of theirs, out of it: bits
BY_CAP, BY_CHUNK, BY_PREFILL = 1, 2, 4
# what waits for the next boundary of a request's lane
P_NONE, P_ADMIT, P_DROP, P_MOVE, P_DISCARD = range(5)


def _row(floats: str, ints: str, **arrays: int) -> np.dtype[Any]:
    fields: list[Any] = [(f, "f8") for f in floats.split()] + [(i, "i8") for i in ints.split()]
    return np.dtype(fields + [(a, "i8", (n,)) for a, n in arrays.items()], align=True)


WORLD = _row(
    "now end over watermark sigma piece trip",
    "G K I M B N R E X A L nG nK nI nM nB nN nR nE nX nA nL gpus "
    "nxt opened n shead stail seq hear tokens unlimited alone swap elastic bt cap chunk prefill seed blocked "
    "grants dirty ev_i ev_n left lookahead cost grid gemm head share seqs dec_rate pre_rate route models points shares "
    "batches "
    "xfree xn afree an xhead xtail thead formed due links rivals logs spans steps preempts loads evicts migrations "
    "moves by_cap by_chunk by_prefill",  # by_*: steps that this cap bound
    walk=4,  # the next member to visit in each list of a batch
)
GPU = _row(
    "end busy_s busy_t hbm_s flop_s kv_s kv_t level",
    "head lane touched n cap used kv waiting sms pool node active barred",
)
LINK_ = _row("bw end busy_s began stop", "cur head tail whead wtail weights")  # queues of KV and of weights
INST = _row(
    "left_s",  # when it was last told to leave
    "model n state foot weights cost members busy limit blocks held bbytes granule gblocks frag reserve kept holders "
    "gone evict host is_host kin",  # kin: the next of the model's places on GPUs, in a ring
    at=8,  # its GPUs
)
MODEL = _row("out_s since", "places")  # seconds without weights before `since`; places that have them
BATCH = _row(
    "c_t c_load c_kv c_stall c_solo c_wall busy_s",
    "inst tag D P root ctx skip kvblock stalled pend parts swapped left steps seq_steps prefilled parked_ctx",
    h=64,  # running members by (length - D) mod block tokens
    ends=8,  # head and tail of the four lists
    count=4,  # their lengths
)
LANE = _row(
    "a b work wa ta rate end t0 comp hbm cap goal quota began until",
    "open kind seqs chunk sms busy was k dec pieces dirty dnext next frozen resized turn most took mine tnext ran "
    "own bound",  # bits: the caps that are the engine's own; those that bind the step in flight
)
XFER = _row("fixed due bytes", "kind stage inst rid act parts src first blocks next link xfer")
EVENT = _row("ran", "kind a b c")
ACTION = _row("", "left failed never heard next")
LOG = _row("a b ta wa rate", "rid batch d0 d1 j0 j1")  # a segment of ticks (rid -1), a stay, or a lone token (batch -1)
REQUEST = _row(
    "arr think first done admit held load kv move turn solo slow m_t m_load m_kv m_stall m_solo m_wall",
    "seq l jd tick model prompt cached out heir made state batch blocks pre piece prev next pnext hc hn hp home "
    "pend pend_arg pend_batch pend_seq npre first_inst last_inst joins",
)  # 8-byte numbers only: a second kind of integer would compile most verbs twice


def _offset(name: str) -> int:
    assert WORLD.fields is not None
    return WORLD.fields[name][1]


TABLES: Mapping[str, np.dtype[Any]] = {
    "G": GPU,  # GPUs, then hosts; also the pool of GPUs whose first is this one
    "K": LINK_,  # 4 a GPU (from host, to host, to peers, to other nodes), then 4 a host (the first: disk)
    "I": INST,
    "M": MODEL,
    "B": BATCH,
    "N": LANE,  # rows 2b (mixed or prefill) and 2b + 1 (decode)
    "R": REQUEST,
    "E": EVENT,
    "X": XFER,  # transfers, and their parts on links
    "A": ACTION,  # loads, evictions and moves that are under way, or whose end is not read yet
    "L": LOG,  # where token times are asked for
}
gpu_at, link_at, inst_at, model_at, batch_at, lane_at, req_at, event_at, xfer_at, action_at, log_at = (
    rows_at(dtype, _offset(name)) for name, dtype in TABLES.items()
)
world = rows_at(WORLD)


class Tables(NamedTuple):
    """Coefficients (coef.py), and the standing routes."""

    cost: NDArray[Any]
    grid: NDArray[np.int64]
    gemm: NDArray[np.float64]
    head: NDArray[np.float64]
    share: NDArray[np.float64]
    seqs: NDArray[np.float64]
    dec_rate: NDArray[np.float64]
    pre_rate: NDArray[np.float64]
    route: NDArray[np.int64]  # (models,) batch of a standing route, or -1


NUMBERS: Mapping[str, tuple[np.dtype[Any], str]] = {
    "cost": (COST, "models"),
    "grid": (np.dtype("i8"), "points"),
    "gemm": (np.dtype("f8"), "models points"),
    "head": (np.dtype("f8"), "models points"),
    "share": (np.dtype("f8"), "shares"),
    "seqs": (np.dtype("f8"), "batches"),
    "dec_rate": (np.dtype("f8"), "models shares batches"),
    "pre_rate": (np.dtype("f8"), "models shares"),
    "route": (np.dtype("i8"), "models"),
}  # of `Tables`
cost_at, grid_at, gemm_at, head_at, share_at, seqs_at, dec_rate_at, pre_rate_at, route_at = (
    array_at(dtype, _offset(name), [_offset(n) for n in lengths.split()]) for name, (dtype, lengths) in NUMBERS.items()
)


class State:
    """The arrays, and one record (`s`) with the scalars, and the arrays' addresses and lengths.

    The kernel takes the record's address (`at`).
    """

    def __init__(self, **arrays: NDArray[Any]) -> None:
        self._world = seen(np.zeros(1, WORLD))
        self.s: Any = self._world[0]
        self.at = int(self._world.ctypes.data)
        # fields that are read at every event: an array's `item` is four times as fast as a record's
        plain = self._world.view(np.ndarray)
        self.now, self.left, self.nxt, self.ev_i, self.ev_n, self.xn, self.an = (
            plain[f] for f in ("now", "left", "nxt", "ev_i", "ev_n", "xn", "an")
        )
        if DISABLED:
            ROWS[self.at] = self._world
        for name, dtype in TABLES.items():
            self.put(**{name: arrays.get(name, np.zeros(0, dtype))})

    def put(self, **arrays: NDArray[Any]) -> None:
        """Replace arrays."""
        for name, array in arrays.items():
            old = self.__dict__.get(name)
            if DISABLED and old is not None:
                ROWS.pop(old.ctypes.data, None)
            rows = seen(array)
            setattr(self, name, rows)
            self.s[name], self.s["n" + name] = rows.ctypes.data, len(rows)
            if DISABLED:
                ROWS[rows.ctypes.data] = rows

    def price(self, tables: Tables) -> None:
        """Take cost tables."""
        for name, (dtype, lengths) in NUMBERS.items():
            array = seen(np.ascontiguousarray(getattr(tables, name), dtype))
            setattr(self, name, array)
            self.s[name] = array.ctypes.data
            for n, length in zip(lengths.split(), array.shape, strict=True):
                self.s[n] = length
            if DISABLED:
                ROWS[array.ctypes.data] = array

    def __getattr__(self, name: str) -> NDArray[Any]:
        raise AttributeError(name)  # only to tell the type checker that tables are attributes


def seen(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows as the kernel wants them: plain where it is compiled, records where it runs as Python."""
    return rows.view(np.recarray) if DISABLED and rows.dtype.names else rows
