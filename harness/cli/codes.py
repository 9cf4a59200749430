"""Exit codes of `bench`, and the page docs/exit-codes.md, which `make docs` writes with this module."""

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


def page() -> str:
    """Return the exit codes as the Markdown document docs/exit-codes.md."""
    return "\n".join(
        [
            "# Exit codes",
            "",
            "Of every `bench` command. `make docs` writes this page from `harness/cli/codes.py`.",
            "",
            "| code | when |",
            "| --- | --- |",
            *(f"| {code.value} | {when} |" for code, when in MEANS.items()),
            "",
            "A user's mistake ends in one line on stderr that names the mistake and the remedy, without a traceback.",
            "Results go to stdout; progress, notes and errors go to stderr. If a reader closes the pipe early, as",
            "`head` does, the command stores its answer all the same and ends as it would have.",
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
