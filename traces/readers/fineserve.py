"""A replay log of FineServe (Dense_30to100B.csv): requests of a marketplace for the models of a size, as one stream.

Its timestamps are read as microseconds, although its README says milliseconds. In milliseconds the log would span 333
days, but it was collected in four months. In microseconds its mean gap is 1.36 s, near the 1.44 s of its own Gamma
windows. Rows without a timestamp (23 %, all at the end) and rows without output are left out and counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILES = ("Dense_30to100B.csv",)
COLUMNS = {"arrival_s": "timestamp", "prompt_tokens": "input_length", "output_tokens": "output_length"}


def options(path: Path) -> dict[str, Any]:
    """Return the conversion options for a file: its stream, named after the file, and the constants of the format."""
    return {
        "time_unit": "us",
        "model": path.stem,
        "name": f"fineserve-{path.stem.rpartition('_')[2].lower().replace('to', '-')}",  # 30-100b
        "licence": "none stated (for research, says its README)",
        "drop_bad": True,
    }
