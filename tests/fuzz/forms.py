"""TOML files of every form: specs, model sets, SLO classes, placements, cost tables, studies."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.run.spec import Spec
from tests.fuzz import pools
from tests.fuzz.case import Case
from tests.fuzz.options import COMPARE, SOUND

NEVER = frozenset({"nan", "inf", "-inf", '"\\u0000"', "[[]]", "[nan]"})  # right for no key at all

SPEC = """\
system = "static"
models = "llama-3.2-1b*8"
trace = "sample"
gpus = 2
slo = "absolute:ttft=1,tpot=1"
"""
SET = """\
source = "mine"
[[model]]
name = "a"
shape = "llama-3.2-1b"
tp = 1
shift_s = 0.0
released = { ttft_s = 1.0, tpot_s = 1.0 }
""" + "".join(f'[[model]]\nname = "b{k}"\nshape = "llama-3.2-1b"\n' for k in range(7))
CLASSES = """\
[class.chat]
ttft_s = 1.0
tpot_s = 0.1
[class.batch]
ttft_s = 10.0
tpot_s = 1.0
[models]
"llama-3.2-1b/1" = "chat"
"*" = "batch"
"""
PLACEMENT = "".join(f'"llama-3.2-1b/{k}" = [{k % 2}]\n' for k in range(1, 9))
TABLE = """\
kind = "h100"
name = "mine"
[spec.mem_bytes]
value = 85040352461
source = "mine"
[spec.flops]
value = 989000000000000.0
source = "mine"
[small]
floor_s = 1e-6
hbm_frac = 0.5
source = "mine"
formula = "f"
"""
RICH = """\
paper = "mine"
slo = "P95"
along = "gpus"
at = [1.0, 3.0]
sample = { rule = "bracket" }
definitions = ["both", "ttft"]
level = 0.9
requests = 10
warmup_s = 1.0
bounds = ["dedicated"]
layout = "fleet"
titles = ["a"]
notes = ["b"]
controls = false
by_model = true
vary = { slo_scale = [5.0, 10.0] }

[systems]
static = "static"
other = "chunked"

[quick]
seeds = 1
points = 3
window_s = 30.0
replayed_s = 30.0

[full]
seeds = 2

[spec]
models = "llama-3.2-1b*8"
trace = "arena-like"

[[condition]]
name = "one"
among = ["static", "other"]
systems = { other = "static:equal" }
full = [4.0]
extra = false
window_s = 20.0
source = "x"

[[claim]]
what = "ratio"
system = "static"
over = "other"
definition = "both"
on = { condition = "one" }
paper = [1.0, 2.0]
why = "x"
comparable = true
says = "y"
"""
STEPS = """\
systems = ["static", "chunked"]
at = [1.0]
slo = "absolute:ttft=1,tpot=1"
cumulative = true
layout = "steps"

[quick]
seeds = 1

[spec]
models = "llama-3.2-1b*8"
trace = "sample"

[[condition]]
name = "one"
spec = { gpus = 3 }
band = { gpus = 4 }
origin = "unknown"
source = "x"

[[condition]]
name = "two"
spec = { process_bytes = 1000000 }
origin = "paper states"
source = "x"
"""


class Form(NamedTuple):
    """A kind of file: the option that takes it, and one that is sound."""

    argv: tuple[str, ...]  # {} is the file
    sound: str
    most: int  # odd values drawn of each key


DRY = (*COMPARE, "--dry-run")
FORMS: Mapping[str, Form] = {
    "set": Form((*DRY, "--models", "{}"), SET, 12),
    "classes": Form((*DRY, "--slo", "classes:{}"), CLASSES, 12),
    "placement": Form((*DRY, "--placement", "{}"), PLACEMENT, 8),
    "table": Form((*DRY, "--table", "{}"), TABLE, 8),
    "study": Form(("study", "{}", "--dry-run", "--no-plot", "-o", "res"), SOUND, 8),
    "study-rich": Form(("study", "{}", "--dry-run", "--no-plot", "-o", "res"), RICH, 10),
    "study-steps": Form(("study", "{}", "--dry-run", "--no-plot", "-o", "res"), STEPS, 6),
}

KEYS: Mapping[str, Sequence[str]] = {  # whole lines that are wrong, and what must be named
    "set": (
        'name = ""',
        'name = "\\u0000"',
        "shift_s = 1e300",
        "released = 1",
        "released = {}",
        "released = { ttft_s = 1 }",
        "released = { ttft_s = nan, tpot_s = 1 }",
        "released = [1, 2]",
        'stream = ["a"]',
        "stream = 1",
        'stream = ""',
        'stream = "nope"',
        "model = [1, 2]",
        "tp = 1000000000",
        "tp = 3",
        'name = "a\\nb"',
        "tp = 9223372036854775807",
    ),
    "classes": ("a = 1", "models = 1", "class = [1]", '"*" = ["a"]', "class = 1"),
    "placement": ('"nope" = [0]', '"llama-3.2-1b/1" = [0, 0]', '"llama-3.2-1b/1" = [9]', '"llama-3.2-1b/1" = []'),
    "table": ("kind = 'h200'", "[gem]", "[small]\nfloor_s = nan"),
    "study-rich": (
        'system = "nope"',
        'over = "nope"',
        'definition = "nope"',
        'on = { condition = "nope" }',
        'on = { trace = "nope" }',
        'on = { axis = "models" }',
        "on = { nope = 1 }",
        "why = 3",
        "paper = [2, 1]",
        "paper = nan",
        'what = "nope"',
        "level = 2.0",
        "level = -1.0",
        "level = nan",
        "requests = -1",
        'bounds = ["nope"]',
        'definitions = ["nope"]',
        "definitions = []",
        'definitions = ["both", "both"]',
        "at = [3.0, 1.0, 2.0]",
        "at = [1.5, 3.0]",
        "at = [0.0, 1.0]",
        "at = [-1.0, 3.0]",
        "at = [nan, 3.0]",
        'along = "nope"',
        "at = [1.0, 1e300]",
        "at = [1.0, 1000000000.0]",
        'among = ["nope"]',
        'systems = { nope = "static" }',
        'systems = { other = "nope" }',
        "vary = { nope = [1] }",
        "vary = { slo_scale = [] }",
        "vary = { slo_scale = [-1.0] }",
        "vary = { slo_scale = [nan] }",
        "window_s = -1.0",
        "warmup_s = -1.0",
        "warmup_s = 1e300",
        "seeds = 0",
        "seeds = 9223372036854775808",
        "replayed_s = -1.0",
        'slo = "nope"',
        "slo = 1",
        'slo = ""',
        "titles = [1]",
        "sample = { rule = 'nope' }",
        "sample = { points = -1 }",
        "sample = 1",
        'trace = "nope"',
        'models = "nope"',
        'static = "nope"',
        'static = ""',
        'seed = 3\nmodels = "light8"',
        'system = "qlm"\nmodels = "light8"',
        'rate_rps = -1.0\nmodels = "light8"',
        'layout = "nope"',
        'name = ""',
    ),
    "study": (
        "spec = { rate_scale = 1e300 }",
        "spec = { trace = 1 }",
        "spec = { gpus = 1e9 }",
        "at = [1.0, nan]",
        "at = []",
        "at = [0.0]",
        "at = [1e300]",
        "at = [1e6]",
        'systems = ["static", "static"]',
        "systems = []",
        "systems = [1]",
        'seeds = ["x"]',
        "rates_rps = 3",
        "axis = nan",
        "spec = { window_s = nan }",
        "spec = { nope = 1 }",
        "gpus = 9223372036854775808",
        "gpus = 10000000",
        "seeds = 10000000000",
    ),
    "study-steps": (
        'origin = "nope"',
        "band = { gpus = 3, nope = 1 }",
        "spec = {}",
        "band = { gpus = 0 }",
        'source = ""',
        "cumulative = 1",
    ),
}
# Values of a spec's field that cannot be right
SPECS: Mapping[str, Sequence[str]] = {
    "gpus": ("0", "10000000", "99999999999999999999999", "1.0"),
    "seed": ("-1", "99999999999999999999", "9223372036854775808"),
    "batch_cap": ("100000000", "0"),
    "node_gpus": ("9223372036854775808", "0"),
    "window_s": ("1e9", "0.0", "-1.0"),
    "warmup_s": ("1e7", "1e99", "-1.0"),
    "rate_scale": ("1e308", "1e6", "0.0"),
    "pcie_gbps": ("1e300",),
    "system": ('"nope"',),
    "engine": ('"nope"', '"sim+x=1"'),
    "models": ('"llama-3.1-8b*100000"',),
    "slo": ('"nope"', '"absolute:ttft=0,tpot=1"'),
    "chunk_tokens": ("9223372036854775808",),
    "served": ("1", "9223372036854775808"),
    "homes": ("{ a = [0] }", "{ 'llama-3.2-1b/1' = [9] }"),
    "slo_s": ("{ nobody = [1.0, 1.0] }",),
    "block_tokens": ("9223372036854775808",),
    "drain_s": ("-1.0",),
    "noise": ("1e300",),
}
LONG = "'''" + "x" * 100000 + "'''"


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield every form: files that are no TOML, a line too few or too many, odd values of every key."""
    specs, folder = 0, here / "spec"
    folder.mkdir()

    def spec(what: str, text: str, culprit: str = "", accept: bool = True) -> Case:
        nonlocal specs
        specs += 1
        (path := folder / f"{specs}.toml").write_text(text)
        return Case(f"forms/spec {what}", ("run", str(path), "--dry-run", "-o", "res"), culprit, accept)

    for key in Spec.__dataclass_fields__:
        plain = "".join(f"{line}\n" for line in SPEC.splitlines() if not line.startswith(f"{key} = "))
        for value in draw.sample(pools.ODD, 10):
            yield spec(f"{key} = {value[:40]}", f"{plain}{key} = {value}\n", "", value not in NEVER)
        for value in SPECS.get(key, ()):
            yield spec(f"{key} = {value[:40]} wrong", f"{plain}{key} = {value}\n", "", accept=False)
    yield spec("unknown key", f"{SPEC}nope = 1\n", "nope", accept=False)
    yield spec("unknown long key", f"{SPEC}{'k' * 5000} = 1\n", "", accept=False)
    yield spec("long value", f"{SPEC}host = {LONG}\n", "", accept=False)
    for what, content in pools.NO_TOML.items():
        (path := folder / f"{what}.toml").write_bytes(content)
        yield Case(f"forms/spec {what}", ("run", str(path), "--dry-run", "-o", "res"), path.name, accept=False)
    for form, (argv, sound, most) in FORMS.items():
        (place := here / form).mkdir()
        texts = [(what, text, "", True) for what, text in pools.mutated(sound)]
        odd = [(f"{key} = {value[:40]}", text, "", value not in NEVER) for key, value, text in pools.swapped(sound)]
        keys = len(odd) // len(pools.ODD)
        texts += draw.sample(odd, min(len(odd), keys * most))
        for line in KEYS.get(form, ()):
            texts.append((f"{line[:60]!r} wrong", _with(sound, line), "", False))
        for number, (what, text, culprit, accept) in enumerate(texts):
            (path := place / f"{number}.toml").write_text(text)
            yield Case(f"forms/{form} {what}", _named(argv, path), culprit, accept)
        for what, content in pools.NO_TOML.items():
            (path := place / f"{what}.toml").write_bytes(content)
            fine = (form, what) in {("table", "empty")}
            yield Case(f"forms/{form} {what}", _named(argv, path), "" if fine else path.name, accept=fine)
        (place / "folder.toml").mkdir()
        (place / "loop.toml").symlink_to(place / "loop.toml")
        (place / "zero.toml").symlink_to("/dev/zero")
        for what in ("folder", "loop", "zero", "none"):
            yield Case(f"forms/{form} {what}", _named(argv, place / f"{what}.toml"), f"{what}.toml", accept=False)


def _named(argv: Sequence[str], path: Path) -> tuple[str, ...]:
    return tuple(word.replace("{}", str(path)) for word in argv)


def _with(sound: str, line: str) -> str:
    """Return the sound file with this line in place of the first of the same key, else before the first table."""
    key = line.partition(" = ")[0]
    lines = sound.splitlines()
    at = next((k for k, row in enumerate(lines) if row.partition(" = ")[0] == key), None)
    if at is None:
        return f"{line}\n{sound}" if not line.startswith("[") else f"{sound}{line}\n"
    return "\n".join([*lines[:at], line, *lines[at + 1 :]]) + "\n"
