"""BurstGPT (BurstGPT_*.csv, of 6 or 8 columns): requests for ChatGPT and GPT-4; failed ones are left out.

Timestamps are whole seconds. A request that failed has no response tokens. Session ID and Elapsed time, which the third
release adds, are not read.
"""

FILES = ("BurstGPT_*.csv",)
KEYS = ({"Timestamp", "Model", "Request tokens", "Response tokens"},)
COLUMNS = {
    "arrival_s": "Timestamp",
    "model": "Model",
    "prompt_tokens": "Request tokens",
    "output_tokens": "Response tokens",
}
OPTIONS = {"licence": "CC-BY-4.0", "drop_bad": True, "time_unit": "s"}
