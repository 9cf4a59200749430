"""Limits of a process that runs a stranger's policy: processor time, memory, files, network, other processes.

The kernel enforces the limits of resources. If it lets a user create a network namespace, it also cuts off the network.
An audit hook of Python, which cannot be removed again, refuses the rest: writes outside of the process's own folders,
connections and new processes. Machine code could bypass the hook, so `bench check` refuses a policy that tries to use
any.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY_BYTES = 12 << 30  # bytes of addresses: libraries reserve more than they use
FILE_BYTES, FILES = 1 << 28, 256
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OF_FILES = ("remove", "rename", "mkdir", "rmdir", "symlink", "link", "truncate", "chmod", "chown", "utime")
CHANGES = frozenset(f"os.{name}" for name in OF_FILES)
NETWORK = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"})
STARTS = frozenset({"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
NOWHERE = frozenset({os.devnull, "/dev/shm"})


def limit(cpu_s: int) -> str:
    """Set resource limits for this process and its children; return in words how its network access is blocked."""
    most = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in most.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    return "a namespace without network" if _unshared() else "an audit hook alone (no namespace may be made here)"


def _unshared() -> bool:
    """Move this process to a namespace without a network; tell whether the kernel allowed that."""
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0)


def watch(*folders: Path) -> Callable[[], None]:
    """Refuse file changes outside of `folders` and all connections from now on.

    Return a function; once it is called, new processes are refused too. Refused calls raise PermissionError for the
    rest of this process's life.
    """
    roots = tuple(os.path.realpath(folder) for folder in folders)
    closed = False

    def allowed(path: object) -> bool:
        if isinstance(path, int):  # it is open already
            return True
        real = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        return real in NOWHERE or any(f"{real}/".startswith(f"{root}/") for root in (*roots, "/dev/shm"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            refused = bool(flags & WRITES) and not allowed(path)
        elif event in CHANGES:
            refused = not all(allowed(path) for path in args[:2] if isinstance(path, str | bytes))
        else:
            refused = event in NETWORK or (closed and event in STARTS)
        if refused:
            raise PermissionError(f"the suite refuses {event} {args[0] if args else ''}".strip())

    def close() -> None:
        nonlocal closed
        closed = True

    sys.addaudithook(hook)
    return close
