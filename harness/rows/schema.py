"""The columns of a run's rows."""

from __future__ import annotations

import pyarrow as pa

from harness.rows.waits import WAITS

CODES = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("model", CODES, nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),  # asked for
        pa.field("made_tokens", pa.int32(), nullable=False),
        pa.field("arrival_ns", pa.int64(), nullable=False),  # intended; negative in warm-up
        pa.field("admit_ns", pa.int64()),
        pa.field("first_ns", pa.int64()),
        pa.field("done_ns", pa.int64()),  # is when the final state was reached: the last token where `done`
        pa.field("first_tokens", pa.int32(), nullable=False),  # tokens of the first chunk; 0: none came
        pa.field("state", CODES, nullable=False),
        *(pa.field(f"{wait}_ns", pa.int64(), nullable=False) for wait in WAITS),
        *(pa.field(f"ttft_{wait}_ns", pa.int64()) for wait in WAITS),  # counts up to the first token
        *(pa.field(f"gap_{wait}_ns", pa.int64()) for wait in WAITS),  # counts within its longest gap between two tokens
        pa.field("alone_prefill_ns", pa.int64()),  # its steps alone on an idle GPU, under the run's batching limits
        pa.field("alone_decode_ns", pa.int64()),
        pa.field("preemptions", pa.int32(), nullable=False),
        pa.field("gpus", CODES, nullable=False),  # "0"; "0+1" a TP group; "0>1" moved; "" never ran
        pa.field("fidelity", CODES, nullable=False),
        pa.field("token_ns", pa.list_(pa.field("element", pa.int64(), nullable=False))),  # from the intended arrival
    ]
)
