"""The compiler behind two typed names; NUMBA_DISABLE_JIT=1 makes the same code plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
DISABLED = bool(numba.config.DISABLE_JIT)
ROWS: dict[int, NDArray[Any]] = {}  # address -> records, for the Python way of `rows_at`


def jit(f: F) -> F:
    """Compile on first call and cache on disk; no fastmath, so both ways give the same bits."""
    compiled: F = numba.njit(cache=True, error_model="numpy")(f)
    return compiled


def rows_at(dtype: np.dtype[Any], field: str) -> Callable[[Any, int], Any]:
    """A function (world, i) -> row i of the array whose address the world keeps in `field`.

    So one record is all that a verb takes: with arrays as arguments the compiler spent most of its time on them.
    """
    if DISABLED:
        return lambda world, i: ROWS[int(world[field])][i]
    record, size = from_dtype(dtype), dtype.itemsize

    @intrinsic
    def at(typing: Any, world: Any, i: Any) -> Any:
        offset = world.offset(field)

        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            here = cgutils.gep(builder, builder.bitcast(args[0], ir.IntType(8).as_pointer()), offset)
            base = builder.load(builder.bitcast(here, cgutils.intp_t.as_pointer()))
            index = context.cast(builder, args[1], sig.args[1], types.intp)
            address = builder.add(base, builder.mul(index, cgutils.intp_t(size)))
            return builder.inttoptr(address, context.get_value_type(record))

        return record(world, i), code

    accessor: Callable[[Any, int], Any] = at
    return accessor
