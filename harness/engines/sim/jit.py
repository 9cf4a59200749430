"""Typed wrappers of numba's compiler; with NUMBA_DISABLE_JIT=1 the same code runs as plain Python."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from functools import reduce
from hashlib import sha256
from inspect import isgeneratorfunction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness import target
from harness.policy.types import UserError

# Types of file systems that nodes share.
SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "fuse.glusterfs", "glusterfs",
                    "afs", "cifs", "smb3", "9p", "virtiofs", "orangefs", "panfs", "wekafs", "fuse.juicefs",
                    "fuse.sshfs", "ocfs2", "gfs2"})  # fmt: skip
SOURCES = (
    "sim/kernel/*.py",
    "sim/state.py",
    "sim/records.py",
    "sim/world.py",
    "sim/jit.py",
    "costs/coef.py",
    "costs/layout.py",
)  # paths are relative to harness/engines
FORMER = f"kernel-{'[0-9a-f]' * 12}"  # the folder's name in releases that knew one target only


def fingerprint(folder: Path) -> str:
    """Return a hash of the source files of the compiled code.

    numba's cache detects changes of the compiled file itself, but not of the record layouts which that file imports.
    """
    files = [file for name in SOURCES for file in sorted(folder.glob(name))]
    return sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def cache_dir(folder: Path) -> Path:
    """Return the cache folder for machine code that is compiled from these sources for this target processor.

    If that folder does not exist yet, delete the folders of code compiled from earlier sources.
    """
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or home(folder))
    kind = f"kernel-{target.compiled() or 'host'}"
    name = f"{kind}-{fingerprint(folder)}"
    if base.name == name:  # inherited from the process that started this one
        return base
    if not (base / name).exists():
        for old in (*base.glob(f"{kind}-*"), *base.glob(FORMER)):
            shutil.rmtree(old, ignore_errors=True)
    return base / name


def home(folder: Path, mounts: str = "/proc/self/mountinfo") -> Path:
    """Return the default folder for compiled code: `__pycache__` in the sources' folder, or a folder of this user.

    The user's folder is in the node's temporary folder. It is used if the sources' folder is read-only or on a file
    system that nodes share. The files that numba writes are valid on one node only; nodes that share them would
    overwrite each other's files. Raises UserError if the user's folder belongs to another user or is open to others.
    """
    beside = folder / "__pycache__"
    there = beside if beside.exists() else folder
    if kind_of(there.resolve(), mounts) not in SHARED and os.access(there, os.W_OK):
        return beside
    local = Path(tempfile.gettempdir()) / f"llm-sharing-bench-{os.getuid()}"
    local.mkdir(mode=0o700, exist_ok=True)
    about = local.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077 or not stat.S_ISDIR(about.st_mode):
        raise UserError(f"{local} is open to others, and compiled code is run from it (NUMBA_CACHE_DIR names another)")
    return local


def kind_of(path: Path, mounts: str) -> str:
    """Return the type of the file system that contains a path, or "" if the file system is not listed.

    `mounts` is the path of Linux's list of mounted file systems.
    """
    kinds: dict[Path, str] = {}
    with contextlib.suppress(OSError):
        for line in Path(mounts).read_text("utf-8", "replace").splitlines():
            place, _, rest = line.partition(" - ")
            kinds[Path(place.split()[4].replace("\\040", " "))] = rest.split()[0]
    return next((kinds[above] for above in (path, *path.parents) if above in kinds), "")


CACHE = cache_dir(Path(__file__).parents[1])
os.environ["NUMBA_CACHE_DIR"] = str(CACHE)
# Optimising harder doubles the time to compile and makes nothing here faster (measured 2026-11-21).
os.environ.setdefault("NUMBA_OPT", "1")
os.environ.setdefault("NUMBA_LOOP_VECTORIZE", "0")

import numba  # noqa: E402
from numba.core import cgutils, types  # noqa: E402
from numba.extending import intrinsic  # noqa: E402
from numba.np import arrayobj  # noqa: E402
from numba.np.numpy_support import from_dtype  # noqa: E402

unliteral: Callable[[Any], Any] = types.unliteral
populate: Callable[..., None] = arrayobj.populate_array
F = TypeVar("F", bound=Callable[..., Any])
DISABLED = os.environ.get("NUMBA_DISABLE_JIT", "0") not in {"", "0"}
ROWS: dict[int, NDArray[Any]] = {}  # address -> records, for the Python way of `rows_at`


def jit(f: F) -> F:
    """Compile a function on its first call and cache the machine code on disk.

    fastmath is off, so that compiled code and plain Python give bit-identical results. A literal argument is treated as
    a variable, so that one compilation serves all its values. numba by itself would compile the function once for each
    value.

    Generators have no cache entry of their own: each caller's entry includes them. With their own entries, numba would
    raise KeyError when it compiles a caller of a cached generator.
    """
    compiled: Any = numba.njit(cache=not isgeneratorfunction(f), error_model="numpy")(f)
    if not DISABLED:
        template = compiled.get_call_template
        compiled.get_call_template = lambda args, kws: template(tuple(map(unliteral, args)), kws)
    made: F = compiled
    return made


def number_at(builder: Any, world: Any, offset: int) -> Any:
    """Emit code that reads the integer at byte `offset` of the world record, and return the code's value.

    The integer is an array's address or length. Python changes it only between calls of compiled code, when it enlarges
    the array. The read is marked as invariant, so that the compiler may read each integer once per call.
    """
    load = builder.load(builder.inttoptr(builder.add(world, cgutils.intp_t(offset)), cgutils.intp_t.as_pointer()))
    load.set_metadata("invariant.load", builder.module.add_metadata([]))
    return load


def rows_at(dtype: np.dtype[Any], field: int | None = None) -> Callable[..., Any]:
    """Return a function (world, i) that gives row i of the array whose address is at byte `field` of the world record.

    If `field` is None, return a function (world) that gives the world record itself.

    `world` is the record's address, so that functions of the kernel take only numbers as arguments. An array argument,
    alone or in a tuple, would cost 4 us per call and most of the compile time.
    """
    if DISABLED:
        if field is None:
            return lambda world: ROWS[int(world)][0]
        return lambda world, i: ROWS[int(ROWS[int(world)].view(np.int64)[field // 8])][i]
    record, size = from_dtype(dtype), dtype.itemsize

    @intrinsic
    def world_at(_typing: Any, _world: Any) -> Any:
        def code(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.intp), code

    @intrinsic
    def row_at(_typing: Any, _world: Any, _i: Any) -> Any:
        def code(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            assert field is not None
            base = number_at(builder, args[0], field)
            address = builder.add(base, builder.mul(args[1], cgutils.intp_t(size)))
            return builder.inttoptr(address, context.get_value_type(record))

        return record(types.intp, types.intp), code

    accessor: Callable[..., Any] = world_at if field is None else row_at
    return accessor


def array_at(dtype: np.dtype[Any], field: int, lengths: Sequence[int]) -> Callable[..., Any]:
    """Return a function (world) that gives an array.

    The world record stores the array's address at byte `field`, and the array's dimensions at the bytes `lengths`.
    """
    if DISABLED:
        return lambda world: ROWS[int(ROWS[int(world)].view(np.int64)[field // 8])]
    kind = types.Array(from_dtype(dtype), len(lengths), "C")

    @intrinsic
    def array(_typing: Any, _world: Any) -> Any:
        def code(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            made = context.make_array(kind)(context, builder)
            data = builder.inttoptr(number_at(builder, args[0], field), made.data.type)
            size, shape = cgutils.intp_t(dtype.itemsize), [number_at(builder, args[0], n) for n in lengths]
            strides = [reduce(builder.mul, shape[k:], size) for k in range(1, len(shape) + 1)]
            populate(made, data, shape, strides, size, None)
            return made._getvalue()  # noqa: SLF001 - nothing else in numba turns a structure into its value

        return kind(types.intp), code

    accessor: Callable[..., Any] = array
    return accessor
