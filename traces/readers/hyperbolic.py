"""Counts digitised from Prism's Hyperbolic figure (hyperbolic_10min_7models_counts.csv): 7 streams in 600 s.

The columns are bin_start_s, bin_end_s and a count for each model; the counts add up to 1,698 requests. The authors
publish neither arrival times nor lengths. Arrival times are drawn inside their bin and lengths from 8 to 512, as the
authors do. An eighth stream of 4 requests is added, because sets have 8 models. The figure's panels are titled model_1
to model_7 and name no models. It is inferred that the k-th stream belongs to a set's k-th model.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.policy.types import UserError
from traces import schema

FILES = ("hyperbolic_*_counts.csv",)
SPAN_S = 600.0
ADDED = 4  # requests of the stream that is ours


def read(path: Path, *, jitter_seed: int = 0) -> pa.Table:
    """Draw the requests of each bin uniformly inside it; UserError names the row of a bad bin."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            names, *rows = list(csv.reader(file)) or [[]]
        bins = np.array(rows, np.float64).reshape(len(rows), len(names))
    except ValueError:
        raise UserError(f"{path}: not a table of counts (bin_start_s, bin_end_s, then a column a model)") from None
    counts = bins[:, 2:].astype(np.int64)
    bad = (counts != bins[:, 2:]) | (counts < 0) | ~(bins[:, 1] > bins[:, 0])[:, None]
    if names[:2] != ["bin_start_s", "bin_end_s"] or bad.any():
        raise UserError(f"{path}:{int(bad.any(1).argmax()) + 2}: not a bin with whole counts of requests")
    draw = np.random.Generator(np.random.Philox(key=jitter_seed))
    row, model = (np.repeat(index, counts.ravel()) for index in np.divmod(np.arange(counts.size), counts.shape[1]))
    when = bins[row, 0] + draw.uniform(0, 1, len(row)) * (bins[row, 1] - bins[row, 0])
    when = np.append(when, draw.uniform(0, SPAN_S, ADDED))
    model = np.append(model, np.full(ADDED, counts.shape[1]))
    order = np.argsort(when, kind="stable")
    lengths = draw.integers(8, 512, (2, len(when)), endpoint=True)
    streams = pa.array([*names[2:], f"model_{counts.shape[1] + 1}"])
    names = pa.DictionaryArray.from_arrays(pa.array(model[order], pa.int32()), streams)
    src_row = np.append(row + 2, np.zeros(ADDED, np.int64))[order]  # 0: of the added stream
    meta = {
        "name": "hyperbolic",
        "tier": "composed",
        "licence": "Apache-2.0",
        "length_origin": "uniform",
        "source": path.name,
        "source_sha256": schema.file_sha256(path),
        "span_s": SPAN_S,
        "timestamp_resolution_s": float((bins[:, 1] - bins[:, 0]).max()),
        "jitter_seed": jitter_seed,
        "ordered": True,
        "added_requests": ADDED,
    }
    return schema.requests(when[order], names, lengths[0], lengths[1], meta, src_row=src_row)
