"""Files and folders that are complete or absent, on a disk to which other processes and machines write as well.

New content is written to a temporary folder (`.<name>.<machine>-<process>-<random>.part`) beside its destination. One
rename then moves it there. Two writers never use the same temporary name, so they need no lock: `flock` is missing on
some shared file systems and local on others. If two writers have equal bytes, both succeed, and the last rename
remains.

    machine   hash of host, boot and PID namespace: two pods on one host are two machines
    dead      on this machine: not in its process table; on another: nothing in the folder changed for the time in `AGE`

The environment variable named in `AGE` sets that time in seconds. Ages are differences of times that the file system
assigned, so this machine's clock is not read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TypeVar

from harness.policy.types import UserError

T = TypeVar("T")

AGE, DAY_S = "BENCH_PART_AGE_S", 86_400.0  # the variable that sets the age, and its default in seconds
LATE = "BENCH_LATE_S"  # how long another machine's file may take to be seen here (NFS: acdirmax)
LATE_S = 60.0
STEP_S, STEPS = 0.02, 10  # a reader's pauses while another writer replaces what it reads
IN_PLACE = {errno.ENOTEMPTY, errno.EEXIST}  # what a rename onto a folder says, by file system


@cache
def machine() -> str:
    """Return a hash of host, boot and PID namespace. If two processes get the same hash, they share process ids."""
    facts = [platform.node(), _boot(), _namespace()]
    return sha256("\0".join(facts).encode()).hexdigest()[:12]


def _boot() -> str:
    """Return the id of this boot or, if the system has none, the address of the network card."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{uuid.getnode():x}"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


# ------------------------------------------------------------------ write


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. If the block succeeds, the new file replaces `path` in one rename.

    If the block fails, the temporary file or folder is removed. Raises UserError if another machine removed it earlier,
    because its writer seemed dead. Raises OSError if the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _nest(path) as nest:  # holds the new and, for a moment, the old
        _swept(path.parent, path.name, nest.stat().st_mtime)
        try:
            yield nest / "new"
            _into_place(nest, path)
        except FileNotFoundError:
            if nest.is_dir():
                raise
            raise UserError(
                f"{path}: its temporary folder was removed by a machine whose clock differs by more than {AGE} "
                f"(set the clocks and run it again)"
            ) from None
        sync(path.parent)


@contextlib.contextmanager
def _nest(path: Path) -> Iterator[Path]:
    """Yield a new temporary folder beside `path`; remove it even if a signal raises while it is made or removed."""
    nest = path.parent / f".{path.name}.{machine()}-{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        nest.mkdir()
        yield nest
    finally:
        try:
            _remove(nest)
        finally:  # a signal may have ended the first call; a second signal raises nothing
            _remove(nest)


def _remove(nest: Path) -> None:
    """Remove a folder that no other process writes to. Unlike `shutil.rmtree`, it can be repeated after a signal."""
    for path in [*sorted(nest.rglob("*"), reverse=True), nest]:
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def _into_place(nest: Path, path: Path) -> None:
    """Rename the new file or folder in `nest` to `path`, where it replaces an old one.

    An old folder cannot be replaced in one step, so it is moved away first. For a moment `path` is absent; a reader
    then finds that the run is yet to be executed.
    """
    for old in count():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir():
                path.rename(nest / f"old{old}")
        try:
            (nest / "new").replace(path)
        except OSError as error:
            if error.errno not in IN_PLACE or path.is_file():
                raise
        else:
            return  # else another writer was quicker: ours takes its place too


def sync(folder: Path) -> None:
    """Write a folder's entries to the disk, if its file system supports this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(handle)


# ------------------------------------------------------------------ what killed writers left


def clean(folder: Path, name: str = "*") -> None:
    """Remove temporary folders of dead writers from a folder: those of files whose names match the pattern `name`.

    Raises UserError if the environment variable for the age is not a number of seconds.
    """
    if any(folder.glob(f".{name}.*.part")):
        with contextlib.suppress(OSError), _nest(folder / "clean") as nest:  # suppressed: a folder that is read alone
            _swept(folder, name, nest.stat().st_mtime)


def _swept(folder: Path, name: str, now_s: float) -> None:
    """Remove the temporary folders of dead writers. `now_s` is the present time by the clock of the file system."""
    age_s = seconds(AGE, DAY_S)
    for left in folder.glob(f".{name}.*.part"):
        with contextlib.suppress(OSError):
            of, _, rest = left.name.rpartition(".part")[0].rpartition(".")[2].partition("-")
            pid = rest.partition("-")[0]
            if _gone(int(pid)) if of == machine() and pid.isdigit() else now_s - _changed_s(left) > age_s:
                shutil.rmtree(left)


def _gone(pid: int) -> bool:
    """Tell whether this machine has no process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _changed_s(folder: Path) -> float:
    """Return the time of the last change in a temporary folder, in seconds by the file system's clock."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


def seconds(variable: str, usual: float) -> float:
    """Read a number of seconds from an environment variable, or `usual` if unset. UserError if it is no number."""
    text = os.environ.get(variable)
    try:
        value = usual if text is None else float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise UserError(f'{variable} is "{text}", not a number of seconds')
    return value


# ------------------------------------------------------------------ read


def patient(path: Path, use: Callable[[Path], T]) -> T:
    """Return `use(path)`; while a writer replaces an old folder at this path, try again for a moment.

    Raises the errors of `use`, and FileNotFoundError if the path is absent.
    """
    for _ in range(STEPS):
        try:
            return use(path)
        except FileNotFoundError:
            folder = path.parent
            if next(folder.parent.glob(f".{folder.name}.*.part"), None) is None:
                break
        time.sleep(STEP_S)
    return use(path)


def seen(path: Path) -> bool:
    """Wait until a file written by another machine is visible here; tell whether it came within the limit.

    The limit is `LATE_S` seconds, unless the environment variable named in `LATE` sets another.

    If a file system caches each machine's view of a folder, a rename becomes visible late. Listing the folder makes the
    file system ask its server.
    """
    until = time.monotonic() + seconds(LATE, LATE_S)
    pause_s = STEP_S
    while not path.exists():
        if time.monotonic() >= until:
            return False
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(folder)  # noqa: PTH208 - for what it makes the file system do
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    return True
