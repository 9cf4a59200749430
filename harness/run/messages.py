"""Messages between a caller and the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from harness.run.sources import Task


class Batch(NamedTuple):
    """Tasks for one worker, and what it needs to know."""

    tasks: tuple[Task, ...]
    out: str
    token: str  # names a file in `out`: a node that sees it shares the folder
    asked: Mapping[str, str]  # `facts` of the caller
    limit_s: float  # s, the limit of a policy's calls


class Answer(NamedTuple):
    """The outcome of a task: its folder's name, its failures and its error.

    `files` has the files of the task's run. It is None if the node wrote them into the caller's folder itself, or if
    the task failed.
    """

    folder: str
    why: Mapping[str, str]
    error: bytes = b""  # pickled; empty: none
    files: Mapping[str, bytes] | None = None


class Refused(NamedTuple):
    """The refusal of a node whose Python, sources or arithmetic differ from the caller's, with the difference."""

    node: str
    why: str
