"""A guard process, which ends the servers of a process when that process is gone.

However a run ends, SIGKILL included, its servers must not outlive it. The kernel can signal a child when its parent
dies. But it does so when the *thread* that started the child ends, and the signal does not reach the children of a
server. So each process that starts servers has one guard, and writes to the guard's standard input which sessions to
watch:

    +PID    watch the session that PID leads        -PID    watch it no more        end    stop them all and exit

The guard also stops them all when its parent dies or closes the pipe. It imports nothing of ours: `process.py` runs it
by its path.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

KILL_S = 10.0  # most seconds of a wait for a process, which can outlive SIGKILL in the driver of a device


def family(leader: psutil.Process, others: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the living processes of a server: those of its session, its descendants in any session, and `others`.

    `others` are processes of the server that were found earlier. A descendant in another session can no longer be found
    once the processes between it and the server are gone. So the caller has to remember that descendant.
    """
    members = set(others)
    with suppress(psutil.NoSuchProcess):
        members |= {leader, *leader.children(recursive=True)}
    for pid in psutil.pids():
        with suppress(psutil.NoSuchProcess, OSError):
            if os.getsid(pid) == leader.pid:
                members.add(psutil.Process(pid))
    return [member for member in members if _lives(member)]


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each of the processes that is still alive."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill(leader: psutil.Process, others: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Kill a server, its processes in `others`, and all processes that they start meanwhile.

    Return the processes that are still alive after KILL_S seconds.
    """
    deadline = time.monotonic() + KILL_S
    while (living := family(leader, others)) and time.monotonic() < deadline:
        signal_all(living, signal.SIGKILL)
        psutil.wait_procs(living, timeout=0.1)
    return living


def main(parent: int) -> None:
    """Watch the servers of the process `parent`, and kill them when it dies, closes the pipe or sends `end`."""
    gone = select.poll()
    gone.register(0, select.POLLIN)
    with suppress(ProcessLookupError):
        gone.register(os.pidfd_open(parent), select.POLLIN)
    watched, lines, data = dict[int, psutil.Process](), b"", b" "
    while data and (0 in dict(gone.poll(0 if os.getppid() != parent else None))):
        data = os.read(0, 65536)
        *whole, lines = (lines + data).split(b"\n")
        for line in whole:
            if line == b"end":
                data = b""
            elif line.startswith(b"+"):
                with suppress(psutil.NoSuchProcess):
                    watched[int(line[1:])] = psutil.Process(int(line[1:]))
            else:
                watched.pop(int(line[1:]), None)
    for leader in watched.values():
        kill(leader)


if __name__ == "__main__":
    main(int(sys.argv[1]))
