"""A cost table from the measurements of `make gpu`: `bench calibrate --from results/h200`.

Each quantity starts from the committed one of its GPU kind. A few of its numbers are scaled to the measured rows, and
the rest of the error goes into its factors (by ridge regression: far from any row they stay as they were). Its errors
are those on these rows, held-out ones apart: the 3B's GEMMs and prompts, batches of 16, partitions of about 48 SMs. A
probe that did not run leaves its quantity out, and then the committed one holds. Copy rates belong to a kind's
specification, which a table does not replace: they are printed, not written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs import fit, kernels, quantities, rounds
from harness.engines.costs.fit import Rows
from harness.policy.types import Shape, UserError
from harness.rows.record import write_bytes
from probe import report
from probe.conduct import HOST, RAW

F8 = NDArray[np.float64]
Line = dict[str, Any]
Kernel = Callable[..., F8]
Quantity = dict[str, Any]

LEAST = 8  # rows, fewer say nothing about four numbers
PRIOR = 0.02  # of ln(scale): what the rows do not tell stays at 1
STEPS = (1e-3, 1e-2, 3e-2, 1e-1, 1e-2)  # of the derivative: large ones see past plateaus of whole waves
CAP = 0.95  # of peak, as everywhere in `fit`
HELD_SMS = (41, 56)  # partitions that are held out
# The probe's models, for the kernels that only a whole layer tells (public configurations).
SHAPES = {
    "1B": Shape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, True, True, 8192),
    "8B": Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, True, False, 8192),
}


class Calibrated(NamedTuple):
    """A table, and notes on it."""

    name: str  # h200-measured
    table: Quantity
    notes: list[str]


def calibrate(folder: Path, kind: str | None = None) -> Calibrated:
    """Calibrate a table from a folder of results; `kind` names the GPU where the card's name does not tell it.

    Raises UserError where nothing was measured there, or the GPU kind has no committed table to start from.
    """
    book = report.read(folder)
    if not book.samples:
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
        op: str, rows: Rows, names: Sequence[str], seconds: Callable[[Quantity, Rows], F8], at: Sequence[str]
    ) -> None:
        """Refit one quantity if it has enough rows; `at` names the features that its factors' axes count."""
        if (fitted := int((~rows.out).sum())) < LEAST:
            notes.append(f"{op}: {fitted} measured rows, the committed table holds")
            return
        was: Quantity = dict(base[op])
        q = was["gqa"] if op == "decode" else was
        before = fit.error(seconds(q, rows), rows.y)
        new = _refit(q, names, rows, seconds, at)
        new |= {"source": f"{origin}; scaled from: {was['source']}", "formula": was["formula"]}
        if op == "decode":  # one query head a KV head was not measured
            mha = {k: v for k, v in was["mha"].items() if k not in quantities.ERRORS}
            errors = {k: new[k] for k in quantities.ERRORS if k in new}
            gqa = {k: v for k, v in new.items() if k not in {"source", "formula"}}
            new = {"source": new["source"], "formula": new["formula"], **errors, "gqa": gqa, "mha": mha}
        out[op] = new
        now = quantities.error({"fit": before}).removeprefix("fit ")
        notes.append(f"{op}: {quantities.error(new)}; the committed table on these rows: {now}")

    add("gemm", whole_rows(book, spec, "gemm"), ("launch_s", "fill_s", "hbm_frac", "tiles"),
        lambda q, r: kernels.gemm_s(q, spec, **r.x), ("m", "n", "k"))  # fmt: skip
    add("prefill", whole_rows(book, spec, "prefill_attention"), ("floor_s", "tile_s", "flops_frac", "longest"),
        lambda q, r: kernels.prefill_s(q, spec, **r.x), ("tokens", "n x heads", "heads a KV head"))  # fmt: skip
    add("decode", whole_rows(book, spec, "attention"), ("floor_s", "kv_head_s", "hbm_frac", "tail_s"),
        lambda q, r: kernels.decode_s({"gqa": q, "mha": q}, spec, **r.x), ("ctx", "B x kv"))  # fmt: skip
    add("small", small_rows(book), ("floor_s", "hbm_frac"), lambda q, r: _small(q, spec, r), ())
    if "gemm" in out:
        rate = 2 * 8192.0**3 / float(kernels.gemm_s(out["gemm"], spec, 8192, 8192, 8192))
        out["gemm"]["best_flops_frac"] = quantities.sig(rate / spec.flops)
    partial, speeds = share_rows(book, {**base, **out}, spec)
    add("share", partial, ("arith_power", "saturation", "power"), lambda q, r: speeds(q)[r.x["i"]], ())
    if (lanes := rounds.table(book, spec.hbm, origin, base["co_run"])) is not None:
        out["co_run"], note = lanes
        notes.append(note)
    if len(out) == 1:
        raise UserError(f"{folder}: too few measurements for any quantity; call make gpu again, it resumes")
    return Calibrated(f"{spec.kind}-measured", out, notes + _copies(book, spec))


def write(folder: Path, kind: str | None = None, out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the table, `<folder>/<kind>-measured.toml` by default; return its path, and notes on it."""
    got = calibrate(folder, kind)
    path = out or folder / f"{got.name}.toml"
    write_bytes(path, fit.dumps(got.table).encode())
    quantities.forget()
    quantities.quantities(got.table["kind"], str(path))  # it reads as any user's table
    return path, got.notes


# ------------------------------------------------------------------------------------------------ measured rows


def whole_rows(book: report.Book, spec: quantities.GpuSpec, what: str) -> Rows:
    """Return the samples of GEMMs, `attention` (decode) or `prefill_attention` on all SMs.

    Held out are batches of 16 of `attention`, and the 3B's samples of the others.
    """
    lines = [line for line in _plain(book, what) if line["sms"] >= spec.sms]
    x, y = _features(what, lines), _seconds(lines)
    model = np.array([str(line["params"]["of"]).split(".")[0] for line in lines], dtype=str)
    held = {"B 16": x["B"] == 16} if what == "attention" else {"3B": model == "3B"}
    if what == "gemm":  # no better than 95 % of peak, as in every fit
        m, n, k = (x[name] for name in "mnk")
        y, _ = fit._clamp(spec.kind, y, 2 * (m * k + n * k + m * n), 2 * m * n * k)
    return Rows(x, y, held)


def small_rows(book: report.Book) -> Rows:
    """Return the samples of a layer's kernels that are neither GEMM nor attention; those of 256 tokens are held out.

    `of` is the index of the model in SHAPES.
    """
    lines = [line for line in book.all("small") if line["params"]["of"] in SHAPES]
    m, of = _column(lines, "m"), np.array([list(SHAPES).index(line["params"]["of"]) for line in lines], dtype=np.int64)
    return Rows({"m": m, "of": of}, _seconds(lines), {"m 256": m == 256})


def share_rows(book: report.Book, q: Quantity, spec: quantities.GpuSpec) -> tuple[Rows, Callable[[Quantity], F8]]:
    """Return the speeds of kernels on a partition, of those on all SMs, and the same by a share's numbers.

    Held out: partitions of about 48 SMs.
    """
    probed: tuple[tuple[str, Kernel, str], ...] = (
        ("gemm", kernels.gemm_s, "gemm"),
        ("decode", kernels.decode_s, "attention"),
        ("prefill", kernels.prefill_s, "prefill_attention"),
    )
    speed, sms, parts = [], [], []
    for op, seconds, what in probed:
        lines = _plain(book, what)
        whole = {_without_ask(line): line["p50"] for line in lines if line["sms"] >= spec.sms}
        on = [line for line in lines if line["sms"] < spec.sms and _without_ask(line) in whole]
        if not on:
            continue
        here = np.array([line["sms"] for line in on], dtype=np.float64)
        parts.append((q[op], seconds, _features(what, on), here / spec.sms))
        speed.append(np.array([whole[_without_ask(line)] for line in on]) / _seconds(on))
        sms.append(here)

    def predicted(share: Quantity) -> F8:
        return np.concatenate(
            [s(k, spec, **x) / s(k, spec, **x, part=kernels.part_of(share, part)) for k, s, x, part in parts]
        )

    y, n = (np.concatenate(c) if c else np.empty(0) for c in (speed, sms))
    return Rows({"i": np.arange(len(y))}, y, {"about 48 SMs": (n >= HELD_SMS[0]) & (n <= HELD_SMS[1])}), predicted


def _plain(book: report.Book, what: str) -> list[Line]:
    """Return the samples as an engine would run them, without the variants that a probe tries."""
    usual: dict[str, dict[str, Any]] = {
        "gemm": {"target": 0},
        "attention": {"splits": 0, "stages": 7, "page": 0},
        "prefill_attention": {"backend": "flash"},
    }
    return book.all(what, **usual[what])


def _features(what: str, lines: Sequence[Line]) -> dict[str, F8]:
    names = {
        "gemm": ("m", "n", "k"),
        "attention": ("B", "ctx", "heads", "kv", "d"),
        "prefill_attention": ("tokens", "heads", "kv", "d"),
    }[what]
    x = {name: _column(lines, name) for name in names}
    return x if what != "prefill_attention" else {"n": np.ones(len(lines)), **x}


def _without_ask(line: Line) -> str:
    return json.dumps({k: v for k, v in line["params"].items() if k != "ask"}, sort_keys=True)


def _column(lines: Sequence[Line], name: str) -> F8:
    return np.array([line["params"][name] for line in lines], dtype=np.float64)


def _seconds(lines: Sequence[Line]) -> F8:
    return np.array([line["p50"] for line in lines], dtype=np.float64)


# ------------------------------------------------------------------------------------------------------ fitting


def _scaled(q: Quantity, names: Sequence[str], x: F8) -> Quantity:
    """Multiply some numbers of a quantity by x; fractions of a peak stay below it."""
    out = dict(q)
    for name, by in zip(names, x, strict=True):
        if name == "tiles":
            out[name] = [[tm, tn, min(CAP, rate * by)] for tm, tn, rate in q[name]]
        elif isinstance(q[name], list):
            out[name] = [min(CAP, value * by) for value in q[name]]
        else:
            out[name] = min(CAP, q[name] * by) if name == "hbm_frac" else q[name] * by
    return out


def _refit(
    q: Quantity, names: Sequence[str], rows: Rows, seconds: Callable[[Quantity, Rows], F8], at: Sequence[str]
) -> Quantity:
    """Scale `names` to the rows that are not held out, then the factors; with errors."""
    few = rows.pick(~rows.out)
    x = fit._minimise(
        lambda x: np.concatenate([seconds(_scaled(q, names, x), few), x**PRIOR]),
        np.concatenate([few.y, np.ones(len(names))]),
        [[1.0] * len(names)],
        STEPS,
    )
    new: Quantity = fit._rounded(_scaled({k: v for k, v in q.items() if k not in quantities.ERRORS}, names, x))
    if q.get("factors") and at:
        feature = {
            **few.x,
            "n x heads": few.x.get("n", 1.0) * few.x.get("heads", 1.0),
            "heads a KV head": few.x.get("heads", 1.0) / few.x.get("kv", 1.0),
            "B x kv": few.x.get("B", 1.0) * few.x.get("kv", 1.0),
        }
        more = fit._factors(q["axes"], [feature[name] for name in at], np.log(few.y / seconds(new, few)))
        new["factors"] = [round(a * b, 3) for a, b in zip(q["factors"], more, strict=True)]
    predicted = seconds(new, rows)
    return new | (fit._errors(predicted, rows) if rows.out.any() else {"fit": fit.error(predicted, rows.y)})


def _small(q: Quantity, spec: quantities.GpuSpec, rows: Rows) -> F8:
    shapes = list(SHAPES.values())
    return np.array(
        [
            float(kernels.small_s(q, spec, shapes[of], 1, np.array(m)))
            for m, of in zip(rows.x["m"], rows.x["of"], strict=True)
        ]
    )


def _copies(book: report.Book, spec: quantities.GpuSpec) -> list[str]:
    """List measured copy rates beside those of the kind's specification."""
    out = []
    for what, known in (("h2d", spec.h2d), ("d2h", spec.d2h)):
        if line := book.line(what, chunk=64 << 20, beside=""):
            out.append(
                f"{what}: {report.rate(line) / 1e9:.1f} GB/s measured, {known / 1e9:.1f} in the table of {spec.kind}"
            )
    return out


def _host(folder: Path) -> Line:
    path = folder / HOST
    try:
        return cast("Line", json.loads(path.read_text(encoding="utf-8"))["calls"][-1])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"{path} does not tell which GPU this is ({type(error).__name__}); make gpu writes it"
        ) from error


def _kind(short: str) -> str:
    """Return the kind that a card's name begins with: h100 for h100-80gb-hbm3. Raises UserError if none does."""
    words = short.split("-")
    for n in range(len(words), 0, -1):
        name = "-".join(words[:n])
        if name in quantities._aliases():
            return name
    known = ", ".join(quantities.gpu_kinds())
    raise UserError(f"no committed table for {short!r} to start from; --gpu names one of {known}")
