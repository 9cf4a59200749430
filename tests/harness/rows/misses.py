"""The misses of the bench's own runs by window and block: `python -m tests.harness.rows.misses` makes the table.

Four systems on light8 by the assignment of the release, and on heavy8 by Latin squares: 72 windows of 300 s at six
rates, the same windows for all. test_pooled.py draws windows of these, to see what intervals cover where start,
assignment and bursts are the simulator's. It takes a quarter of an hour of a core.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness.rows import record, tidy
from tests.bench import ok

FILE = Path(__file__).parent / "misses.parquet"
WINDOWS = 72
SYSTEMS = ("elastic", "static", "static:rate", "prism:osdi26")
RELEASED_BYTES = 72_241_349_919  # 67.28 GiB a GPU for weights and KV, as in Prism's release
SETS = {"light8": ("1", "released", "0.5,0.7,1,2,2.8,4"), "heavy8": ("2", "square", "0.35,0.7,1.4,2.8,4,5.6")}


def made(models: str, folder: Path) -> pa.Table:
    """Run a set; return (models, system, rate_scale, seed, block, missed, offered), a row a block of a window."""
    gpus, assign, scales = SETS[models]
    ok("compare", "--systems", ",".join(SYSTEMS), "--models", models, "--gpus", gpus, "--assign", assign, "--trace",
       "hyperbolic-like+span_s=300", "--rate-scale", scales, "--seeds", str(WINDOWS), "--budget", "0", "--no-plot",
       "--set", f"pool_bytes={RELEASED_BYTES}", "--set", "chunk_tokens=2048", "--set", "batch_cap=256", "--set",
       "mem_fraction=0.9", "--set", "admission=prompt", "-o", folder)  # fmt: skip
    (path,) = (path.parent for path in folder.rglob(record.SWEEP))
    table = tidy.stored(path / record.SWEEP)
    pooled = (pc.field("definition") == "both") & pc.field("model").is_null() & pc.field("missed").is_valid()
    rows = []
    for row in table.filter(pooled).to_pylist():
        for block, (missed, offered) in enumerate(zip(row["missed"], row["offered"], strict=True)):
            at = {"models": models, "system": row["label"], "rate_scale": row["rate_scale"], "seed": row["seed"]}
            rows.append(at | {"block": block, "missed": missed, "offered": offered})
    return pa.Table.from_pylist(rows)


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        table = pa.concat_tables(made(models, Path(folder) / models) for models in SETS)
    small = {"seed": pa.int16(), "block": pa.int8(), "missed": pa.int16(), "offered": pa.int16()}
    for name, kind in small.items():
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
    pq.write_table(table, FILE, compression="zstd", use_dictionary=["models", "system"])
    print(f"{FILE}: {table.num_rows:,} rows, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
