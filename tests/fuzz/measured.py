"""CSVs of measured runs for `bench validate` that are wrong: a value of a row at a time, and the file's form."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.judge import Case
from tests.fuzz.odd import words, written

_FORMS = """
closed backend,backend_version,model_path,system,isl,osl,concurrency,tp_size,silicon_ttft_ms,silicon_tpot_ms
vllm,0.12.0,llama-3.1-8b,h100_sxm,512,32,4.0,1,50,8
poisson gpu,tp,mbt,mem,stage,real_e2e_mean,real_ttft_mean,stage_rates_s,system_tokens,question_tokens,output_tokens,\
max_num_seqs,model
h100,1,2048,0.9,0,500,20,2x20;4x30,100,100,51,128,llama-3.1-8b
offline Hardware,Num of Hardware,Framework,Model,Input Output Length,Batch Size,Latency
Nvidia H100 GPU,1,vLLM,mistral-7b,64,8,1.5
pools model,tp,kv_blocks,block_tokens,gpu,engine,gpu_memory_utilization,max_num_batched_tokens
llama-2-7b,1,7463,16,h100-80g,vllm 0.15.1,0.9,2048"""
_LINES = _FORMS.strip().splitlines()
GOOD = {  # a form has a header and a row
    head.split(" ", 1)[0]: (head.split(" ", 1)[1], row) for head, row in zip(_LINES[::2], _LINES[1::2], strict=True)
}
WORDS = set("model model_path Model gpu system Hardware backend backend_version engine Framework".split())
BAD = ["", "nan", "inf", "-1", "0", "1e300", "9" * 20, "²", "x", "\0"]  # refused, whatever the number
ODD = [*words("1e9 1e-300 0.5 1e6 ' 1' ٣ 1_0 2 3 9^5000 true 1e99999")]
NOT_WORDS = ["", "nope", "x" * 5000, "\0", "²", "H100", "../../x", "[]"]
STAGES = [";".join(["5x600"] * 2001), ";".join(["0.001x1"] * 2001), "9x" + "9" * 400]
STAGES += words("1e300x1 1.2.3x4 1x1000000000 1000000000x1 0.0000001x1 ²x5 5x² '2x20;' x 2x0")
MUST_FAIL = {  # values that no machine or load has
    "mem": "1e9 2",
    "gpu_memory_utilization": "1e9 2 1e300",
    "stage": "2 1e9 -2 ٣ 9^5000",
    "real_e2e_mean": "1e-300 1 1e9",
    "silicon_tpot_ms": "1e9 1e-300",
    "Latency": "1e9",
    **dict.fromkeys(("isl", "osl", "question_tokens", "Input Output Length"), "1e9 1e6"),
    **dict.fromkeys(("concurrency", "Batch Size"), "1e9"),
}
OPTIONS = """--counts 0; --counts 2; --table nope.toml; --window-s nan; --seeds 2; --models x; --systems x; --loads 5;
--again 1; --slo x; --runs x"""


def _case(what: str, content: str | bytes, *, culprit: str = "mine.csv", accept: bool = True) -> Case:
    argv = ("validate", "{here}/mine.csv", "--no-plot")
    return Case(f"measured/{what}", argv, culprit, accept, put=written("mine.csv", content))


def _of_form(form: str, header: str, row: str) -> list[Case]:
    names, cells, every = header.split(","), row.split(","), list[Case]()
    for at, name in enumerate(names):
        lies = words(MUST_FAIL.get(name, ""))
        refused = [*lies, *(() if name in WORDS else BAD)]
        odd = NOT_WORDS if name in WORDS else [*ODD, *(STAGES if name == "stage_rates_s" else ())]
        for value in dict.fromkeys([*refused, *odd]):
            fine = value not in refused or (name == "stage" and value in {"-1", "0"})
            text = "\n".join([header, ",".join([*cells[:at], value, *cells[at + 1 :]]), ""])
            case = _case(f"{form} {name} {value[:20]!r} {len(value)}", text, culprit="mine.csv" if fine else name)
            every.append(case._replace(skips=not fine))  # the row is left out, and its column named
        every.append(_case(f"{form} {name} twice", f"{header},{name}\n{row},{cells[at]}\n", culprit=name, accept=False))
        less = [",".join([*part[:at], *part[at + 1 :]]) for part in (names, cells)]
        every.append(_case(f"{form} {name} gone", "\n".join([*less, ""]), accept=False))
    wrong: dict[str, str | bytes] = {
        "without rows": f"{header}\n",
        "a long field": f"{header}\n{'x' * 200_000}{row}\n",
        "UTF-16": f"{header}\n{row}\n".encode("utf-16"),
        "Latin-1": f"{header}\n{row}é\n".encode("latin-1"),
        "ten thousand columns": f"{header}{',x' * 10_000}\n{row}{',1' * 10_000}\n",
        "semicolons": f"{header}\n{row}\n".replace(",", ";"),
    }
    skipped = {
        "short": f"{header}\n{row.rpartition(',')[0]}\n",
        "long": f"{header}\n{row},1\n",
        "an open quote": f'{header}\n"{row}\n',
    }
    sane = {
        "blank lines": f"{header}\n\n\n{row}\n\n",
        "with a mark": f"\ufeff{header}\n{row}\n",
        "CR": f"{header}\r{row}\r",
        "twice": f"{header}\n{row}\n{row}\n",
        "its header twice": f"{header}\n{header}\n{row}\n",
    }
    every += [_case(f"{form} {what}", content, accept=False) for what, content in wrong.items()]
    every += [
        _case(f"{form} {what}", content, culprit="mine.csv:2")._replace(skips=True) for what, content in skipped.items()
    ]
    return every + [_case(f"{form} {what}", content) for what, content in sane.items()]


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw a file with one bad value, or of a bad form."""
    every = [case for form, (header, row) in GOOD.items() for case in _of_form(form, header, row)]
    for what, data in (("empty", b""), ("zeros", bytes(4096)), ("Parquet", b"PAR1 torn PAR1"), ("a line", b"x")):
        every.append(_case(what, data, accept=False))
    for put in (lambda here: (here / "mine.csv").mkdir(), lambda here: (here / "mine.csv").symlink_to("mine.csv")):
        every.append(_case(f"a path {len(every)}", b"", accept=False)._replace(put=put))
    for given in OPTIONS.replace("\n", " ").split("; "):
        sound = _case(given, "\n".join([*GOOD["closed"], ""]), culprit=given.split()[0], accept=False)
        every.append(sound._replace(argv=(*sound.argv, *given.split())))
    return st.sampled_from(every)
