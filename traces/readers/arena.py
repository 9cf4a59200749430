"""The public cut of Arena-Chat (the columns of its real_trace.pkl as CSV): 27 streams in 600 s.

VTC's authors lost the original trace and re-sampled it. Prism ships the re-sampled file too.
"""

FILES = ("*real_trace.csv",)
COLUMNS = {
    "request_id": "req_id",
    "arrival_s": "req_time",
    "model": "adapter_dir",
    "prompt_tokens": "prompt_len",
    "output_tokens": "output_len",
}
OPTIONS = {"name": "arena-chat", "time_unit": "s", "licence": "Apache-2.0", "span_s": 600.0}
