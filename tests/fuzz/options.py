"""Options of every command, one odd value each beside a sound command line."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import pools
from tests.fuzz.case import Case

MODELS = "llama-3.2-1b*8"
SETTING = ("--trace", "sample", "--models", MODELS, "--rate-scale", "1", "--seeds", "1")
SLO = ("--slo", "absolute:ttft=1,tpot=1")
COMPARE = ("compare", "--systems", "static", *SETTING, *SLO, "--workers", "1", "--no-plot", "-o", "res")
SENSITIVITY = ("sensitivity", "--systems", "static,chunked", *SETTING, *SLO, "--workers", "1", "--no-plot", "-o", "res")
STUDY = ("study", "{here}/mine.toml", "--no-plot", "-o", "res")
TUNE = ("tune", "--systems", "static", "--draws", "2", "--to", "tuned.toml", "-o", "res")
NAMED = ("arrival_s=t", "model=m", "prompt_tokens=p", "output_tokens=o")
COLUMNS = tuple(word for pair in NAMED for word in ("--column", pair))
CONVERT = ("trace", "convert", "{here}/log.csv", "-o", "out.parquet", *COLUMNS)

SOUND = """\
systems = ["static", "chunked"]
at = [1.0, 2.0]
slo = "absolute:ttft=1,tpot=1"

[quick]
seeds = 1

[spec]
models = "llama-3.2-1b*8"
gpus = 2

[[condition]]
name = "one"
spec = { trace = "sample" }

[[condition]]
name = "two"
spec = { trace = "sample", gpus = 3 }
"""
LOG = "t,m,p,o\n" + "".join(f"{k}.5,m{k % 2},{10 + k},{5 + k}\n" for k in range(20))


class Option(NamedTuple):
    """An option, the values that it must refuse and name, and those of which it may take some."""

    name: str
    wrong: Sequence[str]
    odd: Sequence[str] = ()
    culprit: str = ""  # what a refusal names; "": the option's own words
    dry: bool = True


FLOAT, COUNT = pools.NO_NUMBERS, pools.COUNTS
LISTS = ("", " ", ",", ",,", " , ")
SETTINGS = (
    Option(
        "--trace",
        [v for v in pools.NO_NAMES if v != "-"],
        (
            "sample+span_s=3",
            "sample+x=1",
            "arena-like+span_s=1e300",
            "arena-like+span_s=nan",
            "arena-like+models=0",
            "arena-like+models=1e9",
            "arena-like+models=99999999999",
            "hyperbolic-like+drift_s=1e-6",
            "arena-like+rate_rps=1e9",
            "aegaeon-like+rate_rps=1e9",
            "aegaeon-like+rate_rps=-1",
            "closed+clients=1000000000",
            "closed+clients=0",
            "closed+clients=4+clients=5",
            "closed+clients=2+think_s=1e300",
            "closed+clients=2+think_s=nan",
            "closed+clients=²",
            "aegaeon-synth/16-0.1-1.0-1.0+max_tokens=²",
            "aegaeon-synth/²-0.1-1.0-1.0",
            "aegaeon-synth/16-0.1-9.0-1.0",
            "aegaeon-synth/",
            "aegaeon-synth/0-0.1-1.0-1.0",
            "arena-like+seed=1",
            "arena-like+lengths=nope",
            "arena-like+max_tokens=1",
            "arena-like+max_tokens=-1",
            "arena-like+models=²",
            "azure-conv+models=0",
            "azure-conv+models=²",
            "azure-conv+models=1e9",
            "azure-conv+deal=1",
            "azure-conv+models=8+deal=-1",
            "mooncake-conversation+models=8+max_tokens=1",
        ),
        " ",
    ),
    Option(
        "--models",
        [
            "",
            ",",
            "nope",
            "nope,llama-3.2-1b",
            *(
                f"llama-3.2-1b*{n}"
                for n in ("0", "-1", "", "x", "²", "1.5", "1e3", "100000", "1000000000", "9" * 30, "9" * 5000)
            ),
            "aegaeon+models=0",
            "aegaeon+models=²",
            "aegaeon+models=1e9",
            "aegaeon+models=" + "9" * 5000,
            "light8+models=3x",
            "*8",
            "llama-3.2-1b**2",
            "llama-3.2-1b,,llama-3.2-1b",
            "llama-3.2-1b+tp=2",
            "none.toml",
            "/dev/zero.toml",
            "é",
            "\udcff",
            "a\nb",
            "a" * 5000,
        ],
        (),
        " ",
    ),
    Option("--served", [*COUNT, "1", "0", "-1"], pools.HUGE),
    Option(
        "--gpus",
        [*FLOAT, "0", "-1", "1.5", "9" * 23, "10000000", "9" * 5000, "true", "8,4", "1000001"],
        ("9223372036854775807",),
        "gpus",
    ),
    Option(
        "--gpu", ["", " ", "nope", "hosts", "h10", "../h100", "a" * 300, "h100,l40s", "\udcff", "é", "a\nb"], (), "GPU"
    ),
    Option(
        "--engine",
        [
            "",
            " ",
            "nope",
            "sim+x=1",
            "sim+",
            "sim:x",
            "./none.py",
            "none.py",
            "a\nb",
            "\udcff",
            "sim+=1",
            "attach+urls=nope",
            "attach+urls=http://[::1",
            "attach+urls=file:///etc/passwd",
            "attach+urls=http://127.0.0.1:99999",
            "attach+urls=1",
            "attach+url=http://x",
        ],
        (
            "attach",
            "attach+urls=",
            "attach+urls=http://127.0.0.1:1",
            "attach+urls=http://127.0.0.1:1+key_env=NOPE_NOPE",
            "torch",
        ),
        " ",
    ),
    Option("--host", ["", " ", "nope", "../x", "vlm-graph", "\udcff", "a\nb", "a" * 300], (), "host"),
    Option(
        "--table", ["", " ", "nope", "nope.toml", "/", "/dev/zero", "\udcff.toml"], ("/dev/null", "a" * 300), "table"
    ),
    Option("--plan", ["", "nope", "WINDOW"], (), "plan"),
    Option("--assign", ["", "nope"], (), "assign"),
    Option(
        "--placement",
        [" ", "nope", "nope.toml", "./none.py", "/", "static+x=1", "static:nope", "a\nb", "\udcff"],
        ("", "static", "prism", "unshared", "dedicated"),
        " ",
    ),
    Option(
        "--set",
        [
            "",
            "x",
            "=",
            "=1",
            "x=1",
            "gpus=1",
            "trace=arena-like",
            "models=light8",
            "gpu=a100-80g",
            "engine=sim",
            "host=vllm-eager",
            "table=x.toml",
            "plan=window",
            "assign=shuffled",
            "placement=static",
            "served=100",
            "prefix_cache=true",
            "scaling=none",
            "slo=abc",
            "slo=5xP95",
            "rate_scale=2",
            'system="x"',
            "system=qlm",
            "preset=x",
            "fields={a=1}",
            "fields.a=1",
            "fields=",
            "seed=3",
            "workload=base",
            "trace_sha256=x",
            "measured_on=x",
            "slo_s={a=[1,1]}",
            "token_times=1",
            "homes={a=[0]}",
            "chunk_tokens=3\nseed=2",
            "gpus=3\nseed=2",
            "chunk_tokens=",
            "chunk_tokens=nan",
            "chunk_tokens=1.5",
            "chunk_tokens=x",
            "batch_cap=0",
            "batch_cap=-1",
            "batch_cap=100000000",
            "batch_cap=9" + "9" * 20,
            "window_s=1e9",
            "window_s=0",
            "window_s=nan",
            "window_s=inf",
            "warmup_s=1e7",
            "warmup_s=1e99",
            "warmup_s=-1",
            "drain_s=-1",
            "drain_s=nan",
            "node_gpus=0",
            "node_gpus=9" + "9" * 20,
            "mem_fraction=2",
            "mem_fraction=0",
            "mem_fraction=nan",
            "mem_fraction=x",
            "pool_bytes=1e30",
            "pool_bytes=0",
            "process_bytes=-1",
            "process_bytes=1" + "0" * 18,
            "noise=-1",
            "noise=nan",
            "noise=1e300",
            "decision_s=-1",
            "control_s=nan",
            "block_tokens=0",
            "block_tokens=1" + "0" * 20,
            "watermark=2",
            "prefill_tokens=0",
            "chunk_tokens=1" + "0" * 20,
            "scaled={pci=2}",
            "scaled=1",
            "scaled={pcie=0}",
            "sharing=nope",
            "pcie_gbps=0",
            "pcie_gbps=nan",
            "pcie_gbps=1e300",
            "attach=x",
            "key_env=x",
            "keep_s=1",
            "\udcff=1",
            "a\nb=1",
        ],
        (
            "mem_fraction=.84",
            "mem_fraction=0.84",
            "drain_s=1e9",
            "decision_s=1e9",
            "noise=9",
            "chunk_tokens=1_024",
            "seed=9" + "9" * 20,
            "control_s=1e6",
        ),
        " ",
    ),
    Option(
        "--rate-scale",
        [*(v for v in FLOAT if v != "1,5"), "0", "-1", ",", "1,", "1,nan", "1,,2", "1e6", "1e308", "1e12"],
        ("1e-6", "1e-300", "1_0"),
        "rate",
    ),
    Option("--scaling", ["", "nope", "clients"], ("none", "time", "replicate"), "scaling"),
    Option(
        "--slo",
        [
            *(
                "",
                " ",
                "nope",
                "P96",
                "xP95",
                "0xP95",
                "-1xP95",
                "nanxP95",
                "5x",
                "5/xP95",
                "absolute",
                "absolute:",
                "absolute:ttft=1",
                "absolute:ttft=1,tpot=0",
                "absolute:ttft=-1,tpot=1",
                "absolute:ttft=nan,tpot=1",
                "absolute:ttft=1,tpot=1,e2e=1",
                "absolute:tpot=1,ttft=1",
                "absolute:ttft=1e400,tpot=1",
                "absolute:ttft=1e999,tpot=1e999",
                "5/0xP95",
                "1e400xP95",
                "P95@",
                "P95@nope",
                "P95@h100+l40s",
                "released@h100",
                "a\nb",
                "absolute:ttft=²,tpot=1",
                "released",
                "released+x",
            )
        ],
        ("5/2xP95", "solo", "P95@l40s"),
        "SLO",
    ),
    Option("--slo", ["classes:", "classes:none.toml", "classes:/", "classes:/dev/zero", "classes:\udcff"], (), ":"),
    Option("--slo-scale", [*FLOAT, "0", "-1", "-0"], ("1e300", "1e-300"), "scale"),
    Option("--definition", ["", "nope", "Both"], (), "definition"),
    Option("--seeds", [*COUNT, "0", "-1", "9" * 20], (), "seeds"),
)
COMPARED = (
    Option(
        "--systems",
        [
            *LISTS,
            "nope",
            "static,nope",
            "static,static",
            "static:nope",
            "static:",
            "static+",
            "static+x=1",
            "chunked+tau=nan",
            "chunked+tau=inf",
            "chunked+tau=0",
            "chunked+tau=1e300",
            "chunked+tau=x",
            "chunked+tau=",
            "chunked+tau=true",
            "chunked+tau=256+tau=512",
            "all,static:nope",
            "./none.py",
            "/dev/null.py",
            "/",
            "static ,static",
            "\udcff",
            "a\nb",
            "a" * 5000,
            "static+fields={}",
        ],
        (),
        " ",
    ),
    *SETTINGS,
    Option("--workers", [*COUNT, "0", "-1"], ("9" * 20,), "workers"),
    Option("--policy-limit-s", [*(v for v in FLOAT), "0", "-1"], ("1e-3", "0.001", "1e300"), "policy-limit-s"),
    Option("--attach", ["x", "http://127.0.0.1:1"], (), "--attach"),
    Option("--key-env", ["X"], (), "--key-env"),
    Option("-o", ["/proc/x/y", "/dev/null/x", "a" * 300, "/sys/x"], (), " ", dry=False),
)
STUDIES = (
    Option(
        "--only", [*LISTS, ";", "; ;", "nope", "one;nope", "one,two", "a\nb", "\udcff"], ("one;one", " one ; two "), " "
    ),
    Option("--seeds", [*COUNT, "0", "-1"], ("9" * 20,), "seeds"),
    Option(
        "--systems",
        [*LISTS, "nope", "static,static", "static:nope", "static+x=1", "./none.py", "a\nb"],
        ("chunked",),
        " ",
    ),
    Option("--traces", [*LISTS, "nope", "none.parquet", "sample,nope", "\udcff"], ("sample", "sample,sample"), " "),
    Option(
        "--models",
        [*LISTS, "nope", "none.toml", "llama-3.2-1b*0", "llama-3.2-1b*100000"],
        ("light8", "light8,light8"),
        " ",
    ),
    Option("--engine", ["", "nope", "attach", "sim+x=1", "./none.py", "a\nb"], (), " "),
    Option("--gpus", [*COUNT, "0", "-1", "9" * 20], ("4",), "gpus"),
    Option("--table", ["", "nope.toml", "/dev/zero"], (), "--table"),
    Option("--workers", [*COUNT, "0"], (), "workers"),
    Option("--policy-limit-s", [*FLOAT, "0", "-1"], (), "policy-limit-s"),
)
TUNES = (
    Option("--systems", [*LISTS, "nope", "static,static", "static:equal", "./none.py", "static+x=1"], (), " "),
    Option("--draws", [*COUNT, "0", "1", "-1"], (), "draws"),
    Option("--to", ["/proc/x.toml", "/", "", "a" * 300 + ".toml", "/dev/null/x.toml", "\udcff/x.toml"], (), " "),
    Option("--workers", [*COUNT, "0"], (), "workers"),
    Option("--policy-limit-s", [*FLOAT, "0", "-1"], (), "policy-limit-s"),
)
CONVERTS = (
    Option(
        "--column",
        [
            "",
            "x",
            "=",
            "x=t",
            "model=nope",
            "arrival_s=m",
            "prompt_tokens=m",
            "prompt_tokens=",
            "turn=m",
            "kind=",
            "request_id=",
            "prefix_hashes=p",
            "arrival_s=",
            "arrival_s=007",
            "arrival_s=true",
            "arrival_s=1e3",
            "arrival_s=2024-01-01",
            "arrival_s=nan",
            "arrival_s=[1]",
            'arrival_s={a="b"}',
            "prompt_tokens=t",
        ],
        ("request_id=t", "kind=m", "tenant=m"),
        " ",
    ),
    Option("--time-unit", ["", "h", "clock", "datetime"], ("ms",), " "),
    Option("--model", ["x"], (), "model"),
    Option("--name", [], ("", "x" * 5000, "é", "a\nb", "\udcff")),
    Option("--tier", ["", "nope"], (), "tier"),
    Option("--licence", [], ("", "x" * 5000, "\udcff")),
    Option("--span-s", [*FLOAT, "0", "-1", "3"], ("1e300",), " "),
    Option("--rate-rps", [*FLOAT, "0", "-1", "3"], (), " "),
    Option("--max-tokens", [*COUNT, "0", "1", "-1", "2"], ("9" * 20,), " "),
    Option("--block-tokens", [*COUNT, "0", "16"], (), " "),
    Option("--from", ["", "nope", "burstgpt"], (), "from"),
    Option(
        "-o",
        ["x.csv", "", "nodir/x.parquet", "/proc/x.parquet", "a" * 300 + ".parquet", "/dev/null/x.parquet"],
        (),
        " ",
    ),
)
MAKES = (
    Option("--models", [*COUNT, "0", "-1", "9" * 20, "1000000"], (), "models"),
    Option("--span", [*FLOAT, "0", "-1", "1e300", "1e9"], ("1e-300",), "span"),
    Option("--seed", [*COUNT, "-1", "9" * 20], ("9223372036854775807",), "seed"),
    Option("-o", ["x.csv", "nodir/x.parquet", "/proc/x.parquet", "a" * 300 + ".parquet"], (), " "),
)
VALIDATES = (
    Option("--engine", ["", "nope", "sim", "attach"], (), " "),
    Option("--counts", ["0", "-1", "", "x", "nan", "1.5", "²", "inf", "2,,4"], (), "--counts"),
    Option("--loads", ["0", "-1", "", "x", "nan", "inf"], (), "--loads"),
    Option("--table", ["nope.toml"], (), "--table"),
    Option("--seeds", [*COUNT, "0"], (), "seeds"),
    Option("--window-s", [*FLOAT, "0", "-1"], (), "window-s"),
    Option("--again", [*COUNT, "-1"], (), "again"),
    Option("--systems", ["static"], (), "--systems"),
    Option("--models", ["nope"], (), "--models"),
    Option("--slo", ["nope"], (), "--slo"),
    Option("--shape", ["nope.toml", "/dev/zero", ""], (), " "),
    Option("--runs", ["x"], (), "--runs"),
)
SIZE = ("size", "--trace", "sample", "--models", "llama-3.2-1b*8", "--systems", "static", "--gpus", "1-1",
        "--slo", "absolute:ttft=1,tpot=1", "--windows", "1", "--no-plot", "--grow", "1", "-o", "res")  # fmt: skip
SIZES = (
    Option("--gpus", ["", "0", "0-3", "3-1", "x", "1-", "-1", "1-9999", "1.5", "²", "9" * 20], (), "gpus"),
    Option("--gpu", [*LISTS, "nope", "h100*2", "h100+l40s", "H100"], (), " "),
    Option("--target", [*FLOAT, "50", "100", "0", "-1", "1e300"], (), "target"),
    Option(
        "--price", ["", "h100", "h100=", "=2", "h100=x", "h100=0", "h100=-1", "h100=nan", "h100=inf", "nope=2"], (), " "
    ),
    Option("--spare", [*COUNT, "-1"], (), "spare"),
    Option("--node", [*COUNT, "0", "-1"], (), "node"),
    Option("--grow", ["x", "0", "-1", "nan", "inf", "1e9"], ("",), " "),
    Option("--windows", [*COUNT, "0", "-1", "51"], (), "windows"),
    Option("--spread", ["2", "x", "2:zipf=1"], (), "spread"),
    Option("--shard", ["", "0/1", "2/1", "1/", "1/²", "x"], ("1/1",), "shard"),
    Option("--systems", [*LISTS, "nope"], (), " "),
    Option("--slo", ["", "nope", "absolute:ttft=0,tpot=0", "P95@nope"], (), " "),
)
SETS: Mapping[str, tuple[tuple[str, ...], Sequence[Option]]] = {
    "compare": ((*COMPARE, "--dry-run"), COMPARED),
    "sensitivity": (
        (*SENSITIVITY, "--dry-run"),
        (
            Option("--constants", [*LISTS, "nope", "pcie,nope", "PCIE", "a\nb"], ("pcie,pcie", "swap"), " "),
            Option("--systems", [*LISTS, "nope", "static", "static,nope"], (), " "),
            *(option for option in SETTINGS if option.name in {"--rate-scale", "--slo", "--slo-scale", "--seeds"}),
        ),
    ),
    "study": ((*STUDY, "--dry-run"), STUDIES),
    "tune": (TUNE, TUNES),
    "convert": (CONVERT, CONVERTS),
    "make": (("trace", "make", "aegaeon-like"), MAKES),
    "validate": (("validate", "{here}/empty"), VALIDATES),
    "size": (SIZE, SIZES),
}


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield each odd value of each option, then pairs of odd values that were drawn."""
    files(here)
    for command, (base, options) in SETS.items():
        words = filled(base, here)
        for option in options:
            argv = words if option.dry else tuple(word for word in words if word != "--dry-run")
            culprit = (option.culprit or option.name.lstrip("-")).strip()
            for value in option.wrong:
                named = "UTF-8" if "\udcff" in value else culprit
                yield Case(
                    f"options/{command} {option.name} {value[:40]!r}", (*argv, option.name, value), named, accept=False
                )
            for value in option.odd:
                yield Case(f"options/{command} {option.name} {value[:40]!r} odd", (*argv, option.name, value))
        for number in range(PAIRS.get(command, 0)):
            some = draw.sample([option for option in options if option.dry], 2)
            given = [word for option in some for word in (option.name, draw.choice([*option.wrong, *option.odd]))]
            yield Case(f"options/{command} pair {number}", (*words, *given))


PAIRS = {"compare": 40, "study": 20, "convert": 20}


def files(here: Path) -> None:
    """Write the files that the command lines name."""
    (here / "mine.toml").write_text(SOUND)
    (here / "log.csv").write_text(LOG)
    (here / "empty").mkdir()


def filled(words: Sequence[str], here: Path) -> tuple[str, ...]:
    """Return a command line with the folder of its files in it."""
    return tuple(word.replace("{here}", str(here)) for word in words)
