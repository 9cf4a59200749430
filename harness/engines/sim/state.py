"""The simulator's whole state: arrays of the records that `world.py` and `records.py` define, and constant codes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs.coef import COST, Tables
from harness.engines.costs.layout import fields
from harness.engines.sim import records
from harness.engines.sim.jit import DISABLED, ROWS, array_at, rows_at
from harness.engines.sim.world import WORLD

INF = math.inf
NOISE_TICKS = 64  # decode ticks that share one factor of step noise
ANY = 1 << 62  # more steps than a lane ever runs
HALF_NS = 0.5e-9  # stamps are whole nanoseconds: what ends within half a one belongs to the instant
# states of a request: FUTURE until it arrives
FUTURE = -1
HELD, WAIT, RUN, PARK, AWAY, MOVE, DONE, DROPPED, FAILED = range(9)
# states of an instance's weights, which are there from IN on
OUT, QUEUED, LOADING, IN, DRAINING, LEAVING = range(6)
# kinds of a lane's step in flight
IDLE, STEP, SPAN = range(3)
# kinds of a lane in slot 0; slot 1 is always "decode"
PREFILL, MIXED = 1, 0
# lists of a batch
WAITING, RUNNING, PARKED, ELSEWHERE = range(4)
# kinds of a transfer, and its stages
LOAD, SWAP_OUT, SWAP_IN, SHIFT = range(4)
FREE, GRANT, LINK, TAIL = range(4)
# sources of weights
PCIE, SPREAD, DISK = range(3)
# events, in the order in which an instant tells them
E_DONE, E_FINISHED, E_PREFILLED, E_PREEMPTED, E_TURN, E_ARRIVED = range(6)
OK, GONE, NEVER = range(3)  # how a part of an action ended
# a lane's turn: none, waiting for its first step, or begun; and why it ended
NO_TURN, ORDERED, BEGUN = range(3)
TIME, STEPS, EMPTY, STUCK = range(4)
# what `advance` returns
NOTHING, TOLD, GROW, OVER = range(4)
# bits of the caps that keep members, or some of their tokens, out of a step
BY_CAP, BY_PREFILL, BY_CHUNK = 1, 4, 2
# what waits for the next boundary of a request's lane
P_NONE, P_ADMIT, P_DROP, P_MOVE, P_DISCARD = range(5)


def _offset(name: str) -> int:
    assert WORLD.fields is not None
    return WORLD.fields[name][1]


TABLES: Mapping[str, np.dtype[Any]] = {  # arrays of records: the world's page says of which
    field.name: getattr(records, field.meaning) for field in fields(WORLD) if hasattr(records, field.meaning)
}
(
    gpu_at, link_at, inst_at, model_at, batch_at, lane_at, demand_at, req_at, event_at, xfer_at, action_at, log_at,
    chain_at, entry_at, remote_at, node_at, page_at, extent_at,
) = (rows_at(dtype, _offset(name)) for name, dtype in TABLES.items())  # fmt: skip
world = rows_at(WORLD)


NUMBERS: Mapping[str, tuple[np.dtype[Any], str]] = {
    "cost": (COST, "n_rows"),
    "grid": (np.dtype("i8"), "n_points"),
    "gemm": (np.dtype("f8"), "n_rows n_points"),
    "head": (np.dtype("f8"), "n_rows n_points"),
    "share": (np.dtype("f8"), "n_shares"),
    "seqs": (np.dtype("f8"), "n_batch_sizes"),
    "dec_rate": (np.dtype("f8"), "n_rows n_shares n_batch_sizes"),
    "pre_rate": (np.dtype("f8"), "n_rows n_shares"),
    "kernels": (np.dtype("f8"), "n_rows n_points n_kernels"),
    "route": (np.dtype("i8"), "n_models"),
}  # the cost tables of steps, and the batch that takes each model's arrivals by a standing Admit (-1: none)
cost_at, grid_at, gemm_at, head_at, share_at, seqs_at, dec_rate_at, pre_rate_at, kernels_at, route_at = (
    array_at(dtype, _offset(name), [_offset(n) for n in lengths.split()]) for name, (dtype, lengths) in NUMBERS.items()
)


class State:
    """The simulator's arrays, and its world record `s`.

    The world record stores the run's scalars, and the addresses and lengths of the arrays. Functions of the kernel take
    this record's address (`at`) as their first argument.
    """

    def __init__(self, **arrays: NDArray[Any]) -> None:
        self._world = seen(np.zeros(1, WORLD))
        self.s: Any = self._world[0]
        self.at = int(self._world.ctypes.data)
        # fields that are read at every event, each at [0]: a memory view is eight times as fast as a record
        names = ("left", "events_read", "events_told", "transfer_spare", "action_spare")
        plain: Any = self._world.view(np.ndarray)
        self.left, self.events_read, self.events_told, self.transfer_spare, self.action_spare = (
            plain[name].data for name in names
        )
        self.now, self.quiet_s = plain["now"].data, plain["quiet_s"].data
        if DISABLED:
            ROWS[self.at] = self._world
        for name, dtype in TABLES.items():
            self.put(**{name: arrays.get(name, np.zeros(0, dtype))})

    def put(self, **arrays: NDArray[Any]) -> None:
        """Replace the given arrays, and store their addresses and lengths in the world record."""
        for name, array in arrays.items():
            old = self.__dict__.get(name)
            if DISABLED and old is not None:
                ROWS.pop(old.ctypes.data, None)
            rows = seen(array)
            setattr(self, name, rows)
            self.s[name] = rows.ctypes.data
            if f"n_{name}" in (WORLD.names or ()):
                self.s[f"n_{name}"] = len(rows)
            if DISABLED:
                ROWS[rows.ctypes.data] = rows

    def set(self, **scalars: Any) -> None:
        """Set scalars of the run in the world record."""
        assign(self.s, **scalars)

    def grow(self, name: str, n: int) -> NDArray[Any]:
        """Append n zero rows to an array, and return the array.

        The array grows in place if its allocation has room. Otherwise it moves to a new allocation with room for twice
        its rows.
        """
        rows = self.__dict__[name].view(np.ndarray)
        have, whole = len(rows) + n, rows.base
        if not isinstance(whole, np.ndarray) or len(whole) < have:
            whole = np.zeros(2 * have, rows.dtype)
            whole.view(np.uint8)[: rows.nbytes] = rows.view(np.uint8)  # numpy copies records field by field
        self.put(**{name: whole[:have]})
        return self.__dict__[name]  # type: ignore[no-any-return]

    def more_free(self, name: str, n: int) -> None:
        """Add n rows to the list of free rows of "transfer" or "action".

        A transfer takes one row, and each of its parts takes another.
        """
        rows = self.grow(f"{name}s", n)
        old = len(rows) - n
        assign(rows[old:], next=[*range(old + 1, len(rows)), self.s[f"{name}_free"]])
        self.set(**{f"{name}_free": old, f"{name}_spare": self.s[f"{name}_spare"] + n})

    def price(self, tables: Tables, route: NDArray[np.int64]) -> None:
        """Replace the arrays named in NUMBERS: the cost tables, and the batch that receives each model's arrivals.

        Store their addresses and lengths in the world record.
        """
        for name, numbers in {**tables._asdict(), "route": route}.items():
            dtype, lengths = NUMBERS[name]
            array = seen(np.ascontiguousarray(numbers, dtype))
            setattr(self, name, array)
            self.s[name] = array.ctypes.data
            for n, length in zip(lengths.split(), array.shape, strict=True):
                self.s[n] = length
            if DISABLED:
                ROWS[array.ctypes.data] = array

    if TYPE_CHECKING:  # tables are attributes; at run time this would make each of their reads a call

        def __getattr__(self, name: str) -> NDArray[Any]: ...


def seen(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows in the form that the kernel needs.

    They are a record array if the kernel runs as plain Python, else they are unchanged.
    """
    return rows.view(np.recarray) if DISABLED and rows.dtype.names else rows


def assign(rows: Any, **columns: Any) -> Any:
    """Set the given columns of rows, or fields of one row, and return the rows."""
    for name, values in columns.items():
        rows[name] = values
    return rows
