"""A mistake in a file is one line: the file, its place in it and the way out. Forms of studies have their own tests.

What every form has in common (types, ranges, unknown keys, files that are none) is in test_toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.calibrate.tables import dumps
from harness.engines.costs import quantities
from harness.policy.types import UserError
from harness.run import spec
from harness.run.placement import homes
from harness.run.setup import Setup
from harness.run.spec import Spec
from tests.cases import cases
from tests.harness.engines.costs import whole_table
from workloads import slo
from workloads.models import model_set

SPEC = {
    "": "system is missing",
    "systm = 'x'": 'unknown key "systm"; did you mean system?',
    "system = 3": "system is 3, not a string",
    "system = 'x'\npreset = 3": "preset is 3, not a string",
    "system = 'x'\nrate_scale = 0": "rate_scale is 0, not above 0",
    "system = 'x'\nrate_scale = inf": "rate_scale is inf, not a finite number",
    "system = 'x'\nrate_scale = 2\nscaling = 'none'": 'rate_scale is 2: scaling "none" takes the trace as it is, at 1',
    "system = 'x'\ngpus = 0": "gpus is 0, not in [1, 4096]",
    "system = 'x'\ngpus = 1.5": "gpus is 1.5, not a whole number",
    "system = 'x'\nserved = 1": "served is 1, not at least 2",
    "system = 'x'\nseed = -1": "seed is -1, not at least 0",
    "system = 'x'\nwindow_s = 0": "window_s is 0, not in (0, 1e+09]",
    "system = 'x'\nwarmup_s = -1": "warmup_s is -1, not in [0, 1e+09]",
    "system = 'x'\nmem_fraction = 1.5": "mem_fraction is 1.5, not in (0, 1]",
    "system = 'x'\nwatermark = -0.1": "watermark is -0.1, not in [0, 1]",
    "system = 'x'\nnoise = -0.1": "noise is -0.1, not in [0, 10]",
    "system = 'x'\nscaling = 'rotat'": (
        'scaling is "rotat"; did you mean rotate? (none, rotate, replicate, time, clients)'
    ),
    "system = 'x'\nplan = 'truth'": 'plan is "truth" (held-out, window, trace, prefix)',
    "system = 'x'\nsharing = 'turn'": 'sharing is "turn"; did you mean turns? (own, fluid, turns)',
    "system = 'x'\ntoken_times = 1": "token_times is 1, not true or false",
    "system = 'x'\nkey_env = 'K'": (
        'key_env is a field of the engine: engine = "attach+key_env=VALUE", or --engine the same'
    ),
    "system = 'x'\nfields = 3": "fields is 3, not a table ([fields])",
    "system = 'x'\n[fields]\na = [1]": "fields.a is [1], not a string, a whole number, a number or true or false",
    "system = 'x'\n[slo_s]\nm = 3": "slo_s.m is 3, not a list of 2 numbers",
    "system = 'x'\n[slo_s]\nm = [1, 0]": "item 2 of slo_s.m is 0, not above 0",
    "system = 'x'\n[slo_s]\n'm/1' = [1, '2']": 'item 2 of slo_s."m/1" is "2", not a number',
    "system = 'x'\n[homes]\nm = []": "homes.m is [], not a list of 1 or more",
    "system = 'x'\n[homes]\nm = [-1]": "item 1 of homes.m is -1, not at least 0",
    "system = 'x'\n[scaled]\npcie = 0": "scaled.pcie is 0, not above 0",
    "system = 'x'\n[scaled]\npci = 2": (
        'scaled has no constant "pci"; did you mean pcie? '
        "(pcie, nvlink, net, disk, swap, co_run, passes, decode_fill, prompt_tokens, prompts, step, process, reserve)"
    ),
}

ONE = '[[model]]\nname = "a"\nshape = "phi-2"\n'
SET = {
    "": "[[model]] is missing",
    "model = []": "model is [], not a list of 1 or more",
    "model = 3": "model is 3, not a list of tables ([[model]])",
    '[[model]]\nname = "a"\n': "model 1: shape is missing",
    f'{ONE}[[model]]\nname = "b"\nshape = "lama-3.1-8b"\n': (
        'model 2: no model "lama-3.1-8b"; did you mean llama-3.1-8b? (bench list models)'
    ),
    f"{ONE}tp = 0\n": "model 1: tp is 0, not at least 1",
    f'{ONE}steam = "s"\n': 'model 1: unknown key "steam"; did you mean stream?',
    f'{ONE}shift_s = "x"\n': 'model 1: shift_s is "x", not a number',
    f"{ONE}released = {{ ttft_s = 1 }}\n": "model 1: released.tpot_s is missing",
    f"{ONE}released = {{ ttft_s = 1, tpot_s = 0 }}\n": "model 1: released.tpot_s is 0, not above 0",
    ONE * 2: 'name "a" is used twice',
    f'{ONE}stream = "s"\n{ONE}stream = "s"\n'.replace('"a"', '"b"', 1): 'stream "s" is used twice with shift_s = 0',
    "[[model]": "Expected ']]' at the end of an array declaration (at line 1, column 8)",
}

CLASSES = {
    "[klass.a]": 'unknown key "klass"; did you mean class?',
    "class = 3": "class is 3, not a table ([class])",
    "[class.chat]\nttft_s = 1": "class.chat.tpot_s is missing",
    "[class.chat]\nttft_s = 0\ntpot_s = 1": "class.chat.ttft_s is 0, not above 0",
    "[class.chat]\nttft_s = 1\ntpot_s = 1\ne2e_s = 9": 'class.chat: unknown key "e2e_s" (ttft_s, tpot_s)',
    '[class.chat]\nttft_s = 1\ntpot_s = 1\n[models]\n"*" = "chatt"': (
        'models."*" is "chatt", not a class; did you mean chat?'
    ),
}

PLACEMENT = {
    '"m/1" = 0': '"m/1" is 0, not a list of whole numbers',
    '"m/1" = []': '"m/1" is [], not a list of 1 or more',
    '"m/1" = [-1]': 'item 1 of "m/1" is -1, not at least 0',
    "a = [": "Invalid value (at end of document)",
}

SMALL = "[small]\nsource = 'm'\nformula = 'f'\n"
GEMM = "[gemm]\nsource = 'm'\nformula = 'f'\nlaunch_s = 1\nfill_s = 1\nhbm_frac = 1\nbest_flops_frac = 1\n"
TABLE = {
    "kind = 'h200'": 'kind is "h200", this run is on h100',
    "[gem]\nx = 1": 'unknown key "gem"; did you mean gemm?',
    "small = 3": "small is 3, not a table ([small])",
    f"{SMALL}floor_s = 1": "small.hbm_frac is missing",
    f"{SMALL}floor_s = -1\nhbm_frac = 1": "small.floor_s is -1, not at least 0",
    f"{SMALL}floor_s = 1\nhbm_frac = inf": "small.hbm_frac is inf, not a finite number",
    f"{GEMM}tiles = []": "gemm.tiles is [], not a list of 1 or more",
    f"{GEMM}tiles = [[1, 2]]": "item 1 of gemm.tiles is [1, 2], not a list of 3 numbers",
    f"{GEMM}tiles = [[1, 2, 3]]\naxes = [[1, 2]]\nfactors = [1]": (
        "gemm: factors must hold one number for each point of axes"
    ),
    "gemm": "Expected '=' after a key in a key/value pair (at end of document)",
}


def whole(**changed: Any) -> str:
    return dumps(whole_table.file(**changed))


def without(section: str, key: str) -> str:
    fields = dict(whole_table.file()[section])
    del fields[key]
    return whole(**{section: fields})


def steps(**changed: Any) -> str:
    return whole(steps={whole_table.MODEL: whole_table.STEPS | changed})


WHOLE = {
    whole(kind="h100"): 'kind is "h100", which is a GPU kind; it carries its own [spec]',
    whole(kind=3): "kind is 3, not a string",
    whole(
        gem={}
    ): 'unknown key "gem" (kind, name, spec, host, steps, co_run, ladder, settings, networks, pages, piece_bytes)',
    whole(settings={"seed": 1}): (
        'settings: unknown key "seed" (block_tokens, batch_cap, chunk_tokens, prefill_tokens, pool_bytes, sharing)'
    ),
    without("spec", "disk"): "[spec.disk] is missing",
    without("host", "sigma"): "host.sigma is missing",
    without("host", "source"): "host.source is missing",
    whole(co_run=whole_table.beside(1.5, 1.0)): "co_run.prefill.share is 1.5, not in (0, 1]",
    whole(co_run={"prefill": {"share": 1.0, **whole_table.SAID}}): "co_run.prefill.factor is missing",
    without("co_run", "decode"): "[co_run.decode] is missing",
    whole(steps={}): "steps is {}, not a table of 1 or more",
    steps(ctx_s=-1.0): "steps.llama-tiny.ctx_s is -1.0, not at least 0",
    steps(tokens=[2, 8, 512]): "steps.llama-tiny: tokens must rise from 1",
    steps(tokens=[1, 1, 512]): "steps.llama-tiny: tokens must rise from 1",
    steps(tokens=[1, 1.5, 512]): "item 2 of steps.llama-tiny.tokens is 1.5, not a whole number",
    steps(tokens=[1]): "steps.llama-tiny.tokens is [1], not a list of 2 or more",
    steps(seconds=[0.1, 0.2]): "steps.llama-tiny: seconds must hold a number for each of its tokens",
    steps(seconds=[0.1, 0.3, 0.2]): "steps.llama-tiny: seconds must be above 0, and never fall",
    steps(seconds=[0.0, 0.1, 0.2]): "steps.llama-tiny: seconds must be above 0, and never fall",
    whole(ladder={"cold": {"fixed_s": 1.0, "link": "wire", "source": "x"}}): (
        'ladder.cold.link is "wire" (pcie, disk, spread)'
    ),
}

Read = Callable[[Path], object]
FORMS: Mapping[str, tuple[Read, Mapping[str, str]]] = {  # the reader of each form, and what it says of mistakes
    "spec": (spec.read, SPEC),
    "model set": (lambda path: model_set(str(path)), SET),
    "SLO classes": (lambda path: slo.parse(f"classes:{path}"), CLASSES),
    "placement": (lambda path: homes(Setup(Spec("static", models="light8", placement=str(path)))), PLACEMENT),
    "cost table": (lambda path: quantities.quantities("h100", str(path)), TABLE),
    "cost table of a machine": (lambda path: quantities.gpu("desk", str(path)), WHOLE),
}


@cases(("kind", "text", "says"), [(kind, *pair) for kind, (_, says) in FORMS.items() for pair in says.items()])
def test_a_mistake_names_its_file_and_key(kind: str, text: str, says: str, tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text(text)
    quantities.forget()
    with pytest.raises(UserError) as caught:
        FORMS[kind][0](path)
    assert str(caught.value).removeprefix("cost table ") == f"{path}: {says}"


@cases("kind", [*FORMS])
def test_a_file_that_is_not_there_is_one_line(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.toml: No such file or directory"):
        FORMS[kind][0](tmp_path / "mine.toml")
