"""A log of Azure's LLM services, 2023 (AzureLLMInferenceTrace_{conv,code}.csv): a single stream of about an hour.

The source is AzurePublicDataset b469a11. It does not name the service, and of prompts it has only the lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILES = ("AzureLLMInferenceTrace_*.csv", "azure_llm_*.csv")
KEYS = ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"},)
COLUMNS = {"arrival_s": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}


def options(path: Path) -> dict[str, Any]:
    """Return the conversion options for a file: its stream, named after the file, and the constants of the format."""
    stream = path.stem.rpartition("_")[2]
    return {"time_unit": "datetime", "model": stream, "name": f"azure-{stream}", "licence": "CC-BY-4.0"}
