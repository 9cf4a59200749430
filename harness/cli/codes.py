"""Exit codes of `bench`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class Code(IntEnum):
    """Exit code of a command."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    MISSING = 75  # EX_TEMPFAIL of sysexits.h: try again
    INTERRUPTED = 130
    TERMINATED = 143


MEANS: Mapping[Code, str] = {
    Code.DONE: "done; runs that do not fit or cannot run are reported",
    Code.FAILED: "a check failed (check, claims --check), or a bug (traceback)",
    Code.REFUSED: "wrong input, or some runs failed: stderr says which",
    Code.MISSING: "--collect: runs are missing; stderr says which",
    Code.INTERRUPTED: "Ctrl-C; finished runs are kept",
    Code.TERMINATED: "SIGTERM; finished runs are kept, rerun to resume",
}
