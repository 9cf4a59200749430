"""A workload of Aegaeon's artifact (synth-MODELS-RATE-IN-OUT.csv): Poisson at equal rates, lengths of ShareGPT."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from traces import schema
from traces.convert import convert

FILES = ("synth-*.csv", "synth-*.csv.gz")
KEYS = ({"Request Time", "Model Name", "Input Length", "Output Length"},)
COLUMNS = {
    "arrival_s": "Request Time",
    "model": "Model Name",
    "prompt_tokens": "Input Length",
    "output_tokens": "Output Length",
}
MODELS = re.compile(r"synth-(\d+)-")


def read(path: Path, *, models: int | None = None, cut_tokens: int | None = None, **asked: Any) -> pa.Table:
    """Read a workload of `models` streams; without `models` their number is read from the file's name.

    A stream may have no request. The span is rounded up to whole minutes: files at 0.1 requests/s were made for 120 s,
    all others for 60 s. A request of more than `cut_tokens` loses the start of its prompt. The metadata's `cut` counts
    these requests.
    """
    known: dict[str, Any] = {"time_unit": "clock", "tier": "synthetic", "licence": "Apache-2.0"}
    rows = convert(path, COLUMNS, **known | {"length_origin": "sampled"} | asked)
    if models is None and (label := MODELS.match(path.name)):
        models = int(label[1])
    prompt, output = (rows[key].to_numpy().astype(np.int64) for key in ("prompt_tokens", "output_tokens"))
    cut = np.zeros(len(prompt), bool) if cut_tokens is None else prompt + output > cut_tokens
    if cut_tokens is not None:
        output = np.minimum(output, cut_tokens - 1)
        prompt = np.minimum(prompt, cut_tokens - output)
    columns = {key: rows[key] for key in rows.column_names} | {"prompt_tokens": prompt, "output_tokens": output}
    meta = schema.metadata(rows) | {"ordered": True, "cut": int(cut.sum())}
    if "span_s" not in asked:
        meta["span_s"] = 60.0 * math.ceil(rows["arrival_s"][-1].as_py() / 60.0)
    if models is not None:
        meta["streams"] = [f"synth_model_{k:02d}" for k in range(models)]
    return schema.table(columns, meta)
