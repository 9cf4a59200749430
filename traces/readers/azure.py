"""A log of Azure's LLM services, 2023 (AzureLLMInferenceTrace_{conv,code}.csv): a single stream of about an hour.

AzurePublicDataset b469a11; its service is unnamed, and of prompts only lengths are known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from traces.convert import convert

FILES = ("AzureLLMInferenceTrace_*.csv", "azure_llm_*.csv")
KEYS = ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"},)
COLUMNS = {"arrival_s": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}


def read(path: Path, **asked: Any) -> pa.Table:
    """Read its stamps as dates; the stream is named as the file is."""
    stream = path.stem.rpartition("_")[2]
    known: dict[str, Any] = {
        "time_unit": "datetime",
        "model": stream,
        "name": f"azure-{stream}",
        "licence": "CC-BY-4.0",
    }
    return convert(path, COLUMNS, **known | asked)
