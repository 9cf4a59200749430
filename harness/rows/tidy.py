"""The table of scores of a sweep, in tidy form: a row for each run, model and measure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from harness.rows import record
from harness.rows.sealed import WAY_OUT, Damaged

WEIGHTS = ("loads", "evicts", "migrations")  # how often weights came, went, and changed their place

# The share of steps that this field of the spec bound.
CAPS: Mapping[str, str] = {"cap_bound": "batch_cap", "chunk_bound": "chunk_tokens", "prefill_bound": "prefill_tokens"}

HELD = "gpu_held"  # share of GPU time with weights on the GPU or on their way to it; of the simulator's runs only

WAKES = "wakes"  # counts servers that woke by themselves; only some runs of 0.3.0 have it

HITS = "hit_share"  # is the share of prompts' tokens found in the prefix cache; only runs with one have it

WORD = pa.dictionary(pa.int32(), pa.string())

RUN_SCHEMA = [
    ("run", WORD),
    ("label", WORD),
    ("system", WORD),
    ("preset", WORD),
    ("trace", WORD),
    ("models", WORD),
    ("gpu", WORD),
    ("gpus", pa.int32()),
    ("machine", WORD),  # its processes and links where they are not the default; else null
    ("engine", WORD),
    ("host", WORD),
    ("scaling", WORD),
    ("rate_scale", pa.float64()),
    ("seed", pa.int64()),
    ("slo", WORD),
    ("plan_origin", WORD),
    ("tier", WORD),
    ("fit", WORD),  # says how a synthetic trace fits its target: "within" or where it is off; null: not measured
    ("fidelity", WORD),
    ("departs", WORD),  # how its engine differs from its paper's; null: as published
    ("degrees", WORD),  # "own": the system chose its degrees of parallelism; null: they are the model set's
    ("invalid", WORD),  # why a run on real servers is not valid; null: it is, or it is of another kind
    ("skipped", WORD),  # reason; its rows have no value
    ("infeasible", WORD),  # reason; its attainment is 0
]

TABLE_SCHEMA = pa.schema(
    [
        *RUN_SCHEMA,
        ("definition", WORD),  # names a definition of attainment (definitions.py), or a measure with its unit
        ("over", WORD),  # pooled | model | mean (over models) | worst (model) | jain
        ("model", WORD),  # null unless over = model
        ("n", pa.int64()),  # offered requests under the value
        ("value", pa.float64()),  # null: not defined for this run, shown as "-"; infinite: a latency that never came
        # has a number for each block of the window, of pooled and models' attainment; tokens if a definition pools them
        ("missed", pa.list_(pa.float64())),
        ("offered", pa.list_(pa.float64())),
    ]
)

_TOLD = {"condition", "x", "run", "label", "system", "trace", "models", "gpu", "gpus", "rate_scale", "seed", "slo",
         "fidelity", "definition", "over", "n"}  # fmt: skip  # of each row; other columns may be null

STORED = pa.schema(  # describes a table on disk: panels come first
    [
        field.with_nullable(field.name not in _TOLD)
        for field in (pa.field("condition", WORD), pa.field("x", pa.float64()), *TABLE_SCHEMA)
    ]
)

ORDER = ("trace", "models", "gpu", "label", "gpus", "rate_scale", "seed", "run", "over", "definition", "model")


def stored(path: Path) -> pa.Table:
    """Read the table of scores of a sweep.

    Raises FileNotFoundError, and Damaged. Damaged also means that a rate is not above 0, or that a model or count is
    missing.
    """
    record.present(path, record.footer(path))
    table = record.table(path, STORED, absent=frozenset({"condition", "x"}))  # only those of studies have them
    rates = table["rate_scale"]
    if not pc.all(pc.and_(pc.is_finite(rates), pc.greater(rates, 0.0)), min_count=0).as_py():
        raise Damaged(f"{path}: column rate_scale has a value that is no number above 0; {WAY_OUT}")
    of_model = pc.equal(table["over"].cast(pa.string()), "model")
    if (row := pc.index(pc.and_(of_model, pc.is_null(table["model"])), value=True).as_py()) >= 0:
        raise Damaged(f"{path}: row {row}: model is null, and over is model; {WAY_OUT}")
    if (row := pc.index(pc.xor(*(pc.is_null(table[name]) for name in ("missed", "offered"))), value=True).as_py()) >= 0:
        raise Damaged(f"{path}: row {row}: missed or offered is null, and not both; {WAY_OUT}")
    return table
