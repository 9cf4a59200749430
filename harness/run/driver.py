"""The process that connects to a cluster: it takes batches from a pipe, and sends the workers' answers back.

This is a process of its own, because Ray ends its client's process when the head node is gone. Its output goes to a
file.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from harness.run import boot, sources
from harness.run.messages import Answer, Batch, Refused

STEP_S = 0.1  # between two looks at the pipe
RETRIES = 5  # tries of a batch whose worker or node died


class Place(NamedTuple):
    """The address of a cluster, and the sources and environment variables that its workers get."""

    address: str  # "": a running one of this machine
    sources: str  # folder of our packages and of the user's files, which travels
    variables: Mapping[str, str]


class Client:
    """A connection to Ray."""

    def __init__(self, place: Place) -> None:
        ray: Any = importlib.import_module("ray")
        self._ray = ray
        runtime = {"working_dir": place.sources, "env_vars": dict(place.variables)}
        ray.init(place.address or "auto", runtime_env=runtime, log_to_driver=False, logging_level="ERROR")
        importlib.import_module("ray.cloudpickle").register_pickle_by_value(boot)
        self._work = ray.remote(boot.work)

    def slots(self) -> int:
        """Return the number of tasks that the cluster can execute at once."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, batch: Batch, memory_bytes: int) -> Any:
        """Send a batch; return a handle."""
        options = {"num_cpus": 1, "memory": memory_bytes, "max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
        version = batch.asked["sources of the bench"]
        return self._work.options(**options).remote(pickle.dumps(batch), sources.PACKAGES, version)

    def ready(self, handles: list[Any]) -> list[Any]:
        """Wait at most `STEP_S` for the first of the handles that is done; return all handles that are done."""
        done, _ = self._ray.wait(handles, num_returns=1, timeout=STEP_S)
        return list(done)

    def result(self, handle: Any) -> list[Answer] | Refused:
        """Return a batch's answers. Raises Ray's own error if the batch was lost for good."""
        answers: list[Answer] | Refused = pickle.loads(self._ray.get(handle))
        return answers


def main(pipe: Connection, place: Place, log: str) -> None:
    """Handle the messages of the pipe until it closes.

    It sends back ("slots", n), (id, answers), or ("lost", a sentence with the error).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_follow, daemon=True).start()
    with Path(log).open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        client = Client(place)
        pipe.send(("slots", client.slots()))
        _serve(pipe, client)
    except EOFError:
        return
    except Exception as error:
        with suppress(OSError):
            pipe.send(("lost", sentence(error)))
        raise


def _serve(pipe: Connection, client: Client) -> None:
    handles: dict[Any, int] = {}
    while True:
        while pipe.poll(0 if handles else None):
            message = pipe.recv()
            if message is None:
                return
            number, batch, memory_bytes = message
            handles[client.submit(batch, memory_bytes)] = number
        for handle in client.ready(list(handles)):
            pipe.send((handles.pop(handle), client.result(handle)))


def _follow() -> None:
    """End this process once its parent is gone; the work that it sent to the cluster ends with it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


VERSIONS = re.compile(r"(Ray|Python): *([\w.+]+)")


def sentence(error: BaseException) -> str:
    """Return an error of the cluster as one line; for a mismatch of versions, with the cluster's and ours."""
    text = str(error)
    if "ersion mismatch" in text and len(versions := VERSIONS.findall(text)) == 4:
        theirs, ours = (
            " and ".join(f"{name} {number}" for name, number in some) for some in (versions[:2], versions[2:])
        )
        return f"the cluster has {theirs}, this environment {ours}: install the cluster's"
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{type(error).__name__}: {first.strip()}"
