"""Tables of no known format: usual names and units, bad rows, and what is no log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.policy.types import UserError
from tests.cases import cases
from tests.there import there
from tests.traces.readers.test_logs import T0, as_json
from traces import readers, schema, usual
from traces.convert import convert
from traces.load import of_table, trace


def test_usual_names_and_units_need_no_word(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "Created At,model_name,Input Tokens,completion_tokens,user\n"
        "2026-04-27T18:00:00Z,a,63.0,5,alice\n2026-04-27T18:00:02.5Z,b,7,1,bob\n"
    )
    loaded = trace(str(path))
    assert (loaded.arrival_s.tolist(), loaded.prompt_tokens.tolist()) == ([0.0, 2.5], [63, 7])
    assert there(loaded.notice).startswith("log.csv read as a table, times guessed to be dates")


@cases(
    ("name", "stamps", "unit"),
    [
        ("t", [0.5, 2.0, 9.0], "s"),
        ("t", [T0, T0 + 5], "s"),
        ("t", [T0 * 1000, T0 * 1000 + 5000], "ms"),
        ("t", [T0 * 10**6, T0 * 10**6 + 5], "us"),
        ("t", [T0 * 10**9, T0 * 10**9 + 5], "ns"),
        ("started_ms", [1, 50, 90], "ms"),
        ("startTimeUnixNano", ["5", "90"], "ns"),
        ("t", [0, 400_000, 800_000], "us"),
        ("t", ["", "2026-04-27 18:00:00"], "datetime"),
        ("t", ["12:00:01.5"], "clock"),
        ("t", ["nope"], "s"),
    ],
)
def test_the_unit_of_stamps_is_guessed(name: str, stamps: list[Any], unit: str) -> None:
    assert usual.unit(name, pa.array(stamps)) == unit


def test_a_status_of_failure_is_none_of_a_served_request() -> None:
    served = [None, "", 0, "200 OK", "stop", "no error", "not cancelled"]
    unserved = ["404", "node failure", "not found", "Cancelled"]
    assert [status for status in [*served, *unserved] if usual.served(status)] == served


def test_bad_rows_are_named_or_left_out_by_reason(tmp_path: Path) -> None:
    rows = ["0.5,1,1,a", ",1,1,a", "x,1,1,a", "1,,1,a", "2,1,0,a", "3,1.5,1,a", "4,1,1,", "5,1,-2,a", "6,2,2,b"]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["time,prompt_tokens,output_tokens,model", *rows]) + "\n")
    with pytest.raises(UserError, match=r'log.csv:3: column "time" is ""'):
        convert(path)
    table = convert(path, drop_bad=True)
    assert table["src_row"].to_pylist() == [2, 10]
    assert schema.metadata(table)["dropped"] == {
        "without time": 1,
        "whose time cannot be read": 1,
        "without prompt tokens": 1,
        "whose prompt tokens cannot be read": 1,
        "without output tokens": 1,
        "whose output tokens cannot be read": 1,
        "without model": 1,
    }


def test_nested_names_reach_into_objects(tmp_path: Path) -> None:
    rows = [{"at": k, "usage": {"prompt_tokens": 3, "completion_tokens": 1}, "req": {"model": "m"}} for k in (0.5, 1)]
    path = as_json(tmp_path / "nested.json", rows)
    assert of_table(convert(path, {"arrival_s": "at", "model": "req.model"}), "x").prompt_tokens.tolist() == [3, 3]
    with pytest.raises(UserError, match=r"nested\.json: no usual name for arrival_s "):
        convert(path)


REFUSED = {
    "vLLM's text": ("INFO 04-27 18:00:00 [logger.py:43] Received request cmpl-1: prompt: 'hi', params: S", "otlp-tr"),
    "a custom dump": ("PGDMP\x01\x0e", r"psql -c '\\copy"),
    "a plain dump": ("--\n-- PostgreSQL database dump\n--\n", r"psql -c '\\copy"),
    "a dump by COPY": ('COPY "LiteLLM_SpendLogs" (time) FROM stdin;\n1\n\\.\n', r"psql -c '\\copy"),
    "a dump by INSERT": ("INSERT INTO public.logs (n) VALUES (1);\n", r"psql -c '\\copy"),
    "JSON cut off": ('[{"startTime": 1}, {"start', "refused.log:1: not JSON"),
    "a number": ("[1, 2]", "refused.log:1: not a JSON object"),
    "nothing": ("", "no rows"),
    "an empty list": ("[]", "no rows"),
    "a header alone": ("time,model\n", "no rows"),
}


@cases(("text", "why"), REFUSED)
def test_what_is_no_log_is_refused_in_a_line(tmp_path: Path, text: str, why: str) -> None:
    (path := tmp_path / "refused.log").write_text(text)
    with pytest.raises(UserError, match=why) as caught:
        readers.converted(path)
    assert "\n" not in str(caught.value)
