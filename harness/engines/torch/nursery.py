"""The process that starts the others: it has torch loaded, so that a worker is there within milliseconds.

    python -m harness.engines.torch.nursery FILE          forks what is asked for over the socket FILE
    python -m harness.engines.torch.nursery FILE worker   is a worker itself: a cold start, with all that it loads

It leads a session of its own, so that Ctrl-C reaches the run alone. It ends with its socket, and the kernel ends all
that it started with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from harness.engines.torch.wire import take_files

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Start what is asked for until the engine is gone."""
    import torch

    from harness.engines.torch import links, worker

    torch.set_num_threads(1)
    here, engine = os.getpid(), Connection(int(sys.argv[1]))
    if sys.argv[2:] == ["worker"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _ended_with(worker.Worker(engine).serve)
        return
    with torch.inference_mode():  # what torch sets up at its first use
        torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not kept
    engine.send("ready")
    while True:
        try:
            what = engine.recv()
            (file,) = take_files(engine, 1)
        except (EOFError, ConnectionResetError):
            return
        if what == "cold":
            command = [sys.executable, "-m", "harness.engines.torch.nursery", str(file), "worker"]
            pid = subprocess.Popen(command, pass_fds=[file]).pid
        elif not (pid := os.fork()):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == here:
                engine.close()
                link = Connection(file)
                _ended_with(lambda: links.serve(link) if what == "links" else worker.Worker(link).serve())  # noqa: B023
            os._exit(0)
        os.close(file)
        engine.send(pid)


def _ended_with(serve: Callable[[], None]) -> None:
    """Serve until the engine is gone; what else goes wrong is said, and ends the process."""
    try:
        serve()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).strip() or repr(error)).splitlines()[0]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"  # noqa: PTH119 - of a path that may be none
        print(f"torch: process {os.getpid()}: {type(error).__name__}: {text} ({place})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
