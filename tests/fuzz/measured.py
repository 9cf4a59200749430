"""CSVs of measured runs for `bench validate` that are wrong: a value of a row at a time, and the file's form."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tests.fuzz.case import Case

GOOD = {  # by form: header and a row
    "closed": (
        "backend,backend_version,model_path,system,isl,osl,concurrency,tp_size,silicon_ttft_ms,silicon_tpot_ms",
        "vllm,0.12.0,llama-3.1-8b,h100_sxm,512,32,4.0,1,50,8",
    ),
    "poisson": (
        "gpu,tp,mbt,mem,stage,real_e2e_mean,real_ttft_mean,stage_rates_s,system_tokens,question_tokens,output_tokens,max_num_seqs,model",
        "h100,1,2048,0.9,0,500,20,2x20;4x30,100,100,51,128,llama-3.1-8b",
    ),
    "offline": (
        "Hardware,Num of Hardware,Framework,Model,Input Output Length,Batch Size,Latency",
        "Nvidia H100 GPU,1,vLLM,mistral-7b,64,8,1.5",
    ),
    "pools": (
        "model,tp,kv_blocks,block_tokens,gpu,engine,gpu_memory_utilization,max_num_batched_tokens",
        "llama-2-7b,1,7463,16,h100-80g,vllm 0.15.1,0.9,2048",
    ),
}
WORDS = set("model model_path Model gpu system Hardware backend backend_version engine Framework".split())
BAD = ("", "nan", "inf", "-1", "0", "1e300", "99999999999999999999", "²", "x", "\0")  # refused, whatever the number
ODD = ("1e9", "1e-300", "0.5", "1e6", " 1", "٣", "1_0", "2", "3", "9" * 5000, "true", "1e99999")
NOT_WORDS = ("", "nope", "x" * 5000, "\0", "²", "H100", "../../x", "[]")
STAGES = (
    ";".join(["5x600"] * 2001),
    ";".join(["0.001x1"] * 2001),
    "1e300x1",
    "1.2.3x4",
    "9x" + "9" * 400,
    "1x1000000000",
    "1000000000x1",
    "0.0000001x1",
    "²x5",
    "5x²",
    "2x20;",
    "x",
    "2x0",
)
MUST_FAIL = {  # values that no machine or load has
    "mem": ("1e9", "2"),
    "gpu_memory_utilization": ("1e9", "2", "1e300"),
    "stage": ("2", "1e9", "-2", "٣", "9" * 5000),
    "real_e2e_mean": ("1e-300", "1", "1e9"),
    "silicon_tpot_ms": ("1e9", "1e-300"),
    "Latency": ("1e9",),
    "isl": ("1e9", "1e6"),
    "osl": ("1e9", "1e6"),
    "question_tokens": ("1e9", "1e6"),
    "Input Output Length": ("1e9", "1e6"),
    "concurrency": ("1e9",),
    "Batch Size": ("1e9",),
}


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield a file for each bad value, below `here`."""
    numbers = count()

    def case(what: str, text: str | bytes, culprit: str = "", accept: bool = True) -> Case:
        path = here / f"{next(numbers):04d}.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return Case(f"measured/{what}", ("validate", str(path), "--no-plot"), culprit or path.name, accept)

    for form, (header, row) in GOOD.items():
        names, values = header.split(","), row.split(",")

        def with_value(at: int, value: str, header: str = header, values: list[str] = values) -> str:
            return "\n".join([header, ",".join([*values[:at], value, *values[at + 1 :]]), ""])

        for at, name in enumerate(names):
            bad = (STAGES if name == "stage_rates_s" else ()) + (NOT_WORDS if name in WORDS else BAD)
            for value in bad:
                ok = value not in BAD or name in WORDS or (name == "stage" and value in {"-1", "0"})
                yield case(f"{form} {name} {value[:20]!r}", with_value(at, value), "" if ok else name, accept=ok)
            for value in () if name in WORDS else (*MUST_FAIL.get(name, ()), *draw.sample(ODD, 2)):
                ok = value not in MUST_FAIL.get(name, ())
                yield case(f"{form} {name} {value[:20]!r}", with_value(at, value), "" if ok else name, accept=ok)
            yield case(f"{form} {name} twice", f"{header},{name}\n{row},{values[at]}\n", name, accept=False)
            less = [[*part[:at], *part[at + 1 :]] for part in (names, values)]
            yield case(f"{form} {name} gone", "\n".join(map(",".join, less)) + "\n", accept=False)
        for what, text, accept in (
            ("without rows", f"{header}\n", False),
            ("short", f"{header}\n{row.rpartition(',')[0]}\n", False),
            ("long", f"{header}\n{row},1\n", False),
            ("blank lines", f"{header}\n\n\n{row}\n\n", True),
            ("an open quote", f'{header}\n"{row}\n', False),
            ("a long field", f"{header}\n{'x' * 200_000}{row}\n", False),
            ("with a mark", f"\ufeff{header}\n{row}\n", True),
            ("UTF-16", f"{header}\n{row}\n".encode("utf-16"), False),
            ("Latin-1", f"{header}\n{row}é\n".encode("latin-1"), False),
            ("CR", f"{header}\r{row}\r", True),
            ("one row of ten thousand columns", f"{header}{',x' * 10_000}\n{row}{',1' * 10_000}\n", False),
            ("twice", f"{header}\n{row}\n{row}\n", True),
            ("its header twice", f"{header}\n{header}\n{row}\n", True),
            ("semicolons", f"{header}\n{row}\n".replace(",", ";"), False),
        ):
            yield case(f"{form} {what}", text, accept=accept)
    for what, data in (("empty", b""), ("zeros", bytes(4096)), ("Parquet", b"PAR1 torn PAR1"), ("a line", b"x")):
        yield case(what, data, accept=False)
    folder = here / "folder.csv"
    folder.mkdir()
    yield Case("measured/an empty folder", ("validate", str(folder), "--no-plot"), "folder.csv", accept=False)
    loop = here / "loop.csv"
    loop.symlink_to(loop.name)
    yield Case("measured/a loop", ("validate", str(loop), "--no-plot"), "loop.csv", accept=False)
    for given in (
        "--counts 0",
        "--counts 2",
        "--table nope.toml",
        "--window-s nan",
        "--seeds 2",
        "--models x",
        "--systems x",
        "--loads 5",
        "--again 1",
        "--slo x",
        "--runs x",
    ):
        argv = tuple(given.split())
        header, row = GOOD["closed"]
        made = case("an option of --engine", f"{header}\n{row}\n")
        yield made._replace(name=f"measured/{given}", argv=(*made.argv, *argv), culprit=argv[0], accept=False)
