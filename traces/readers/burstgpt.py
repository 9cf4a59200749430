"""BurstGPT (BurstGPT_*.csv, of 6 or 8 columns): requests for ChatGPT and GPT-4; failed ones are left out.

Stamps are whole seconds. A request that failed has no response tokens. Session ID and Elapsed time, which the third
release adds, are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces.convert import convert

FILES = ("BurstGPT_*.csv",)
KEYS = ({"Timestamp", "Model", "Request tokens", "Response tokens"},)
COLUMNS = {
    "arrival_s": "Timestamp",
    "model": "Model",
    "prompt_tokens": "Request tokens",
    "output_tokens": "Response tokens",
}


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as seconds from the first day's midnight."""
    known: dict[str, Any] = {"licence": "CC-BY-4.0", "drop_bad": True, "time_unit": "s"}
    return convert(path, COLUMNS, **known | asked)
