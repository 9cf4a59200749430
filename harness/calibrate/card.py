"""Fit a card's cost table to measurements of `make gpu`: `bench calibrate results/h200`.

A quantity is a section of a cost table: the parameters of one kernel or effect, its correction factors and its errors.
Each fit starts from the quantity in the committed table of the card's GPU kind. First, a few of its parameters are
scaled to the measured rows. Then the correction factors take up the remaining error (`grid.rescaled`). The new table
stores the errors on the fitted rows, and separately the errors on the held-out rows.

These rows are held out: GEMMs and prefill attention of the 3B model, decode attention at batches of 16, small kernels
at 256 tokens, and partitions of about 48 SMs. If a quantity has too few rows, the new table leaves it out. The
committed quantity then applies. Measured copy rates are only printed. They belong to the specification of a GPU kind,
which a cost table does not replace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from harness.calibrate import grid, profiles, rounds
from harness.calibrate.rows import F8, HOST, RAW, Measurement, Rows, columns, of, read, seconds
from harness.calibrate.tables import Quantity, Table, error
from harness.engines.costs import kernels, quantities
from harness.policy.types import Shape, UserError
from probe import report

LEAST = 8  # rows; fewer cannot determine four numbers
HELD_SMS = (41, 56)  # partitions that are held out
# The probe's models, for the kernels that are measured as a whole layer (public configurations).
SHAPES = {
    "1B": Shape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, True, True, 8192),
    "8B": Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, True, False, 8192),
}


def table(folder: Path, kind: str | None = None) -> Table:
    """Fit a cost table to a folder of results of `make gpu`.

    `kind` is the GPU kind; give it if the card's name does not begin with the name of a kind. Raises UserError if the
    folder has too few measurements, or if the GPU kind has no committed table to start from.
    """
    rows = list({row.key: row for row in read(folder / RAW)}.values())  # the last of equal measurements
    if not rows:
        raise UserError(f"{folder} holds no {RAW} with measurements; make gpu writes them")
    host = _host(folder)
    spec = quantities.gpu(kind or _kind(str(host["short"])))
    base = quantities.quantities(spec.kind)
    origin = f"make gpu on {host['name']}, CUDA {host.get('cuda')}, driver {host.get('driver')}, " + ", ".join(
        f"{k} {v}" for k, v in host.get("packages", {}).items()
    )
    out: Quantity = {"kind": spec.kind}
    notes: list[str] = []

    def add(
        op: str, some: Rows, names: Sequence[str], predicted: Callable[[Quantity, Rows], F8], at: Sequence[str]
    ) -> None:
        """Fit one quantity again, to the rows `some`.

        If there are too few rows, add a note that the committed quantity applies, and fit nothing. `names` are the
        parameters to scale. `at` names the feature of the rows for each axis of the correction factors.
        """
        if (fitted := int((~some.out).sum())) < LEAST:
            notes.append(f"{op}: {fitted} measured rows, the committed table holds")
            return
        was: Quantity = dict(base[op])
        q = was["gqa"] if op == "decode" else was
        before = error(predicted(q, some), some.seconds)
        new = grid.rescaled(q, names, some, predicted, [_feature(some.fitted, name) for name in at])
        new |= {"source": f"{origin}; scaled from: {was['source']}", "formula": was["formula"]}
        if op == "decode":  # one query head a KV head was not measured
            mha = {k: v for k, v in was["mha"].items() if k not in quantities.ERRORS}
            errors = {k: new[k] for k in quantities.ERRORS if k in new}
            gqa = {k: v for k, v in new.items() if k not in {"source", "formula"}}
            new = {"source": new["source"], "formula": new["formula"], **errors, "gqa": gqa, "mha": mha}
        out[op] = new
        now = quantities.error({"fit": before}).removeprefix("fit ")
        notes.append(f"{op}: {quantities.error(new)}; the committed table on these rows: {now}")

    for op, names, at in (
        ("gemm", "launch_s fill_s hbm_frac tiles", ("m", "n", "k")),
        ("prefill", "floor_s tile_s flops_frac longest", ("tokens", "n x heads", "heads a KV head")),
        ("decode", "floor_s kv_head_s hbm_frac tail_s", ("ctx", "B x kv")),
    ):
        add(op, whole_rows(rows, spec, PROBED[op]), names.split(), partial(_whole_s, op, spec), at)
    add("small", small_rows(rows), ("floor_s", "hbm_frac"), lambda q, r: _small(q, spec, r), ())
    if "gemm" in out:
        rate = 2 * 8192.0**3 / float(kernels.gemm_s(out["gemm"], spec, 8192, 8192, 8192))
        out["gemm"]["best_flops_frac"] = quantities.sig(rate / spec.flops)
    on_parts, speeds = share_rows(rows, {**base, **out}, spec)
    add("share", on_parts, ("arith_power", "saturation", "power"), lambda q, r: speeds(q)[r.at["i"]], ())
    if (lanes := rounds.table(report.read(folder), spec.hbm, origin, base["co_run"])) is not None:
        out["co_run"], note = lanes
        notes.append(note)
    if len(out) == 1:
        raise UserError(f"{folder}: too few measurements for any quantity; call make gpu again, it resumes")
    notes += _copies(rows, spec)
    return Table(f"{spec.kind}-measured", out, lambda _: notes)


# ------------------------------------------------------------------------------------------------ measured rows


def whole_rows(rows: Sequence[Measurement], spec: quantities.GpuSpec, what: str) -> Rows:
    """Return the measured rows of one kernel on all SMs: `gemm`, `attention` (decode) or `prefill_attention`.

    For `attention`, rows at a batch of 16 are held out. For the other kernels, the rows of the 3B model are held out.
    """
    some = [row for row in _plain(rows, what) if row.facts["sms"] >= spec.sms]
    x, y = _features(what, some), seconds(some)
    model = np.array([str(row.at["of"]).split(".")[0] for row in some], dtype=str)
    held = {"B 16": x["B"] == 16} if what == "attention" else {"3B": model == "3B"}
    if what == "gemm":
        m, n, k = (x[name] for name in "mnk")
        y, _ = profiles.within(spec.kind, y, 2 * (m * k + n * k + m * n), 2 * m * n * k)
    return Rows(x, y, held)


def small_rows(rows: Sequence[Measurement]) -> Rows:
    """Return the measured rows of a layer's small kernels, which are neither GEMM nor attention.

    Rows at 256 tokens are held out. The column `of` has the index of each row's model in SHAPES.
    """
    some = [row for row in of(rows, "small") if row.at["of"] in SHAPES]
    m, model = columns(some, "m")["m"], np.array([list(SHAPES).index(row.at["of"]) for row in some], np.int64)
    return Rows({"m": m, "of": model}, seconds(some), {"m 256": m == 256})


def share_rows(
    rows: Sequence[Measurement], q: Quantity, spec: quantities.GpuSpec
) -> tuple[Rows, Callable[[Quantity], F8]]:
    """Return measured speeds of kernels on SM partitions, and a function that predicts these speeds.

    Each speed is a fraction of the same kernel's speed on all SMs. The function takes the numbers of the quantity
    `share`. Partitions of about 48 SMs are held out.
    """
    speed, sms, parts = [], [], []
    for op, what in PROBED.items():
        some = _plain(rows, what)
        whole = {_without_ask(row): row.seconds for row in some if row.facts["sms"] >= spec.sms}
        on = [row for row in some if row.facts["sms"] < spec.sms and _without_ask(row) in whole]
        if not on:
            continue
        here = np.array([row.facts["sms"] for row in on], np.float64)
        parts.append((q[op], KERNELS[op], _features(what, on), here / spec.sms))
        speed.append(np.array([whole[_without_ask(row)] for row in on]) / seconds(on))
        sms.append(here)

    def predicted(share: Quantity) -> F8:
        return np.concatenate(
            [s(k, spec, **x) / s(k, spec, **x, part=kernels.part_of(share, part)) for k, s, x, part in parts]
        )

    y, n = (np.concatenate(c) if c else np.empty(0) for c in (speed, sms))
    return Rows({"i": np.arange(len(y))}, y, {"about 48 SMs": (n >= HELD_SMS[0]) & (n <= HELD_SMS[1])}), predicted


PROBED = {"gemm": "gemm", "decode": "attention", "prefill": "prefill_attention"}  # a kernel's measurements
KERNELS: dict[str, Callable[..., F8]] = {
    "gemm": kernels.gemm_s,
    "decode": kernels.decode_s,
    "prefill": kernels.prefill_s,
}
PLAIN: dict[str, dict[str, Any]] = {  # as an engine would run them, without the variants that a probe tries
    "gemm": {"target": 0},
    "attention": {"splits": 0, "stages": 7, "page": 0},
    "prefill_attention": {"backend": "flash"},
}
FEATURES = {
    "gemm": ("m", "n", "k"),
    "attention": ("B", "ctx", "heads", "kv", "d"),
    "prefill_attention": ("tokens", "heads", "kv", "d"),
}


def _plain(rows: Sequence[Measurement], what: str) -> list[Measurement]:
    return list(of(rows, what, **PLAIN[what]))


def _features(what: str, rows: Sequence[Measurement]) -> dict[str, F8]:
    x = columns(rows, *FEATURES[what])
    return x if what != "prefill_attention" else {"n": np.ones(len(rows)), **x}


def _feature(rows: Rows, name: str) -> F8:
    """Return the rows' values along an axis of correction factors: a feature, a product of features, or a ratio."""
    if name == "heads a KV head":
        return cast("F8", rows.at["heads"] / rows.at["kv"])
    names = name.split(" x ")
    return cast("F8", np.prod([rows.at[of] for of in names], axis=0))


def _without_ask(row: Measurement) -> str:
    return json.dumps({k: v for k, v in row.at.items() if k != "ask"}, sort_keys=True)


def _whole_s(op: str, spec: quantities.GpuSpec, q: Quantity, rows: Rows) -> F8:
    return KERNELS[op]({"gqa": q, "mha": q} if op == "decode" else q, spec, **rows.at)


def _small(q: Quantity, spec: quantities.GpuSpec, rows: Rows) -> F8:
    shapes, pairs = list(SHAPES.values()), zip(rows.at["m"], rows.at["of"], strict=True)
    return np.array([float(kernels.small_s(q, spec, shapes[of], 1, np.array(m))) for m, of in pairs])


def _copies(rows: Sequence[Measurement], spec: quantities.GpuSpec) -> list[str]:
    """List the measured copy rates, each next to the rate in the specification of the GPU kind."""
    return [
        f"{what}: {row.facts['bytes'] / row.seconds / 1e9:.1f} GB/s measured, {known / 1e9:.1f} in the table of"
        f" {spec.kind}"
        for what, known in (("h2d", spec.h2d), ("d2h", spec.d2h))
        for row in list(of(rows, what, chunk=64 << 20, beside=""))[:1]
    ]


def _host(folder: Path) -> dict[str, Any]:
    path = folder / HOST
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8"))["calls"][-1])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"{path} does not tell which GPU this is ({type(error).__name__}); make gpu writes it"
        ) from error


def _kind(short: str) -> str:
    """Return the GPU kind whose name begins a card's name: h100 for h100-80gb-hbm3.

    Raises UserError if there is no such kind.
    """
    words = short.split("-")
    for n in range(len(words), 0, -1):
        name = "-".join(words[:n])
        with suppress(UserError):
            quantities.ladder(name)  # raises where no kind has this name
            return name
    known = ", ".join(quantities.gpu_kinds())
    raise UserError(f"no committed table for {short!r} to start from; --gpu names one of {known}")
