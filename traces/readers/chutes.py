"""The trace of Chutes (chutes_trace.parquet, or a cut of it): one row a call of a marketplace for models.

The README.md of HarvardMadSys/chutes_workload 1f61bfb describes the columns. `started_at` counts from the trace's first
request, in seconds or as a duration. Input tokens (`it`) include the cached ones (`ct`). A user is a pair of `user_id`
and `rehash_round`, because ids change every three months.
"""

from __future__ import annotations

from traces.log import Lines, blank

FILES = ("chutes_trace*",)
KEYS = ({"started_at", "chute_id", "it", "ot"},)
FIELDS = {
    "arrival_s": "started_at",
    "model": "chute_id",
    "prompt_tokens": "it",
    "output_tokens": "ot",
    "session_id": "user",
}
ALSO = frozenset({"user_id", "rehash_round"})
OPTIONS = {"licence": "CC-BY-4.0"}


def expand(lines: Lines) -> Lines:
    """Add to each record its user, made of the two columns that identify one."""
    for line, record in lines:
        user = record.get("user_id")
        yield line, {**record, "user": None if blank(user) else f"{user} {record.get('rehash_round')}"}
