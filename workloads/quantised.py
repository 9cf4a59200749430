"""Number formats of weights, read from a checkpoint's `quantization_config` or `hf_quant_config.json`.

A format is a number of bytes per parameter, scales included. Embeddings, head, router and norms stay in 16 bits, and so
do the modules that the config names (`ignore`, `modules_to_not_convert`, `ignored_layers`, `exclude_modules`). If only
a part of a group of modules is quantised, the group's `Format` has the mean bytes per parameter. A config names modules
in one of these ways, depending on the software that reads it:

    re:PATTERN   a regular expression (compressed-tensors); one that might take long to match is refused
    a.*.b        a shell pattern for the name of a module or of one that contains it (modelopt, transformers' mxfp4)
    a.b          the name of a module or of one that contains it, or the last part of either (transformers, vLLM)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from harness.policy.fields import meant
from harness.policy.parameters import alike, attention, parameters
from harness.policy.types import Format, Formats, Shape, UserError

PLAIN = Format("bf16", 2.0)
# Bytes of a parameter: values, and scales by the sizes of their blocks (microscaling, OCP MX 1.0: 8 bits for 32 values;
# NVFP4: 8 bits for 16; DeepSeek's FP8: 32 bits for 128 x 128; integers: 16 bits for 128, and their zero points).
FORMATS: Mapping[str, Format] = {
    "bf16": PLAIN,
    "fp8": Format("fp8", 1.0),
    "fp8_block": Format("fp8_block", 1 + 4 / 128**2),
    "int8": Format("int8", 1.0),
    "int4": Format("int4", 0.5 + (2 + 0.5) / 128),
    "mxfp4": Format("mxfp4", 0.5 + 1 / 32),
    "nvfp4": Format("nvfp4", 0.5 + 1 / 16),
}
KV_FORMATS = ("bf16", "fp8")
LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "mxfp4", "modelopt", "bitsandbytes")
ALGORITHMS = {"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "FP8_PB_WO": "fp8_block", "FP8_BLOCK": "fp8_block",
              "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4", "MXFP4": "mxfp4", "": "bf16"}  # fmt: skip
MOST_CHARS, MOST_REPEATS, MOST_CHOICES = 1000, 3, 8  # limits of a regular expression, but for its last .*
HEAD = "lm_head"  # vLLM quantises it only if the config says so; else it has 16 bits
NF4 = Format("int4", 0.5 + 1 / 64 + 1 / 256)  # bitsandbytes: 8 bits for 64 values, 32 for 256 of those


def of_checkpoint(shape: Shape, keys: Mapping[str, Any], beside: Mapping[str, Any], where: str) -> Shape:
    """Return the shape with the formats that its config states. UserError for an unknown method of quantisation.

    `keys` is the config. `beside` has the keys of `hf_quant_config.json`; if it has any, it is used instead of `keys`.
    """
    stated = keys.get("quantization_config") or keys.get("compression_config")
    if beside:
        stated, where = beside.get("quantization", beside), where.replace("config.json", "hf_quant_config.json")
        stated = {"quant_method": "modelopt", **stated} if isinstance(stated, dict) else stated
    if not stated:
        return shape
    if not isinstance(stated, dict):
        raise UserError(f"{where}: quantization_config is {json.dumps(stated)[:40]}, not a table of keys")
    stored, kept = _stored(stated, where)
    kv = "fp8" if _kv8(stated) else "bf16"
    return shape._replace(kv_format=kv) if stored == PLAIN else _with(shape, stored, kept, kv)


def loaded(shape: Shape, where: str, dtype: str | None, kv_dtype: str | None) -> Shape:
    """Return a shape as a server loads it: a 16-bit checkpoint quantised to `dtype`, its KV cache in `kv_dtype`."""
    for key, value, known in (("dtype", dtype, tuple(FORMATS)), ("kv_dtype", kv_dtype, KV_FORMATS)):
        if value is not None and value not in known:
            raise UserError(f'{where}: no {key} "{value}"{meant(value, known)} ({", ".join(known)})')
    if kv_dtype is not None:
        shape = shape._replace(kv_format=kv_dtype)
    if dtype is not None and shape.formats is not None:
        raise UserError(f"{where}: dtype={dtype} is for checkpoints of 16 bits, and this one is quantised")
    if dtype in (None, "bf16"):
        return shape
    return _with(shape, FORMATS[dtype], lambda name: name == HEAD, shape.kv_format)


def _with(shape: Shape, stored: Format, kept: Callable[[str], bool], kv: str) -> Shape:
    """Return a shape whose modules are stored in the format `stored`, or in 16 bits if `kept` is true for them."""
    groups = {
        group: _mean([(count, PLAIN if kept(name) else stored) for name, count in names], stored)
        for group, names in modules(shape).items()
    }
    return shape._replace(formats=Formats(**groups, embedding=PLAIN), kv_format=kv)


def modules(shape: Shape) -> dict[str, list[tuple[str, int]]]:
    """List the names of the modules of each group of `Formats`, each with its number of parameters.

    The experts of a layer are listed as one expert with the parameters of all.
    """
    count, mats = parameters(shape), ("gate_proj", "up_proj", "down_proj") if shape.gated else ("up_proj", "down_proj")
    sparse = shape.experts.layers if shape.experts else 0
    dense = shape.layers - sparse  # the first layers are taken to be dense

    def ffn(part: str, layers: Iterable[int], params: int) -> list[tuple[str, int]]:
        at = [f"model.layers.{i}.mlp{part}.{matrix}" for i in layers for matrix in mats]
        return [(name, params // len(at)) for name in at] if params else []

    return {
        "attention": [
            (f"model.layers.{i}.self_attn.{name}", n)
            for i, part in enumerate(part for part in alike(shape) for _ in range(part.layers))
            for name, n in attention(part)
        ],
        "ffn": ffn("", range(dense), count.ffn),
        "experts": ffn(".experts.0", range(dense, shape.layers), count.experts),
        "shared": ffn(".shared_experts", range(dense, shape.layers), count.shared),
        "head": [("lm_head", count.head)] if count.head else [],
    }


def _mean(parts: Sequence[tuple[int, Format]], stored: Format) -> Format:
    whole = sum(n for n, _ in parts)
    if not whole:
        return PLAIN
    by = {format_: sum(n for n, f in parts if f == format_) for format_ in {f for _, f in parts}}
    if len(by) == 1:
        return next(iter(by))
    most = stored if 2 * by.get(stored, 0) >= whole else PLAIN
    return Format(most.name, sum(n * f.weight_bytes for f, n in by.items()) / whole)


# ------------------------------------------------------------------ configs


def _stored(stated: Mapping[str, Any], where: str) -> tuple[Format, Callable[[str], bool]]:
    """Return the format of a quantisation config, and a function that tells which modules stay in 16 bits."""

    def wrong(what: str) -> UserError:
        return UserError(f"{where}: quantization_config: {what}")

    method = stated.get("quant_method")
    method = "modelopt" if method is None and "quant_algo" in stated else method
    kept = _matcher(_listed(stated, wrong), wrong)
    bits, group = stated.get("bits", stated.get("w_bit", 4)), stated.get("group_size", stated.get("q_group_size", 128))

    def body(name: str) -> bool:
        return name == HEAD or kept(name)

    match method:
        case "fp8":
            return FORMATS["fp8_block" if stated.get("weight_block_size") else "fp8"], body
        case "fbgemm_fp8":
            return FORMATS["fp8"], body
        case "mxfp4":
            return FORMATS["mxfp4"], body
        case "gptq" | "awq" | "gptq_marlin" | "awq_marlin":
            skipped = _skipped(stated, wrong)
            whole = stated.get("lm_head") is True
            return _integer(bits, group, wrong), lambda name: skipped(name) or (kept if whole else body)(name)
        case "bitsandbytes":
            four = stated.get("load_in_4bit") or stated.get("_load_in_4bit")
            return (NF4 if four else FORMATS["int8"]), body
        case "modelopt" | "modelopt_fp4":
            return _modelopt(stated, wrong), body
        case "compressed-tensors":
            return _compressed(stated, wrong), kept
        case _:
            known = ", ".join(METHODS)
            raise wrong(f"quant_method {json.dumps(method)}{meant(str(method), METHODS)} is not known ({known})")


def _listed(stated: Mapping[str, Any], wrong: Callable[[str], UserError]) -> list[str]:
    """Return the names and patterns of modules that a config lists as left in 16 bits."""
    names = list[str]()
    for key in LISTS:
        listed = stated.get(key) or []
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise wrong(f"{key} is {json.dumps(listed)[:40]}, not a list of names")
        names += listed
    return names


def _skipped(stated: Mapping[str, Any], wrong: Callable[[str], UserError]) -> Callable[[str], bool]:
    """Return a function that tells whether a GPTQ config's rules leave a module in 16 bits."""
    rules = stated.get("dynamic") or {}
    if any(not str(rule).startswith("-:") for rule in rules):
        raise wrong("dynamic: no model of bits that differ between modules")
    return _matcher([f"re:.*{rule[2:]}" for rule in rules], wrong)


def _integer(bits: Any, group: Any, wrong: Callable[[str], UserError], zeros: bool = True) -> Format:
    if bits not in (2, 3, 4, 8) or not isinstance(group, int):
        raise wrong(f"bits {json.dumps(bits)} in groups of {json.dumps(group)} are not understood")
    scales = (2 + zeros * bits / 8) / group if group > 0 else 0.0
    return Format("int8" if bits == 8 else "int4", bits / 8 + scales)


def _modelopt(stated: Mapping[str, Any], wrong: Callable[[str], UserError]) -> Format:
    algorithm = str(stated.get("quant_algo") or "").upper()
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ"):
        return _integer(4, stated.get("group_size", 128), wrong)
    if algorithm not in ALGORITHMS:
        raise wrong(f"quant_algo {algorithm} is not known (FP8, FP8_PB_WO, NVFP4, W4A16_AWQ, MXFP4)")
    return FORMATS[ALGORITHMS[algorithm]]


def _compressed(stated: Mapping[str, Any], wrong: Callable[[str], UserError]) -> Format:
    groups = [g for g in (stated.get("config_groups") or {}).values() if isinstance(g, dict)]
    weights = [g["weights"] for g in groups if isinstance(g.get("weights"), dict)]
    if not weights:
        raise wrong("config_groups states no weights")
    formats = {_group(w, wrong) for w in weights}
    if len(formats) > 1:
        raise wrong(f"config_groups: no model of {len(formats)} formats in one checkpoint")
    return next(iter(formats))


def _group(weights: Mapping[str, Any], wrong: Callable[[str], UserError]) -> Format:
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if kind == "float" and bits == 8:
        return FORMATS["fp8_block" if weights.get("block_structure") or weights.get("strategy") == "block" else "fp8"]
    if kind == "float" and bits == 4:
        return FORMATS["mxfp4" if group == 32 else "nvfp4"]
    if kind == "int":
        return _integer(bits, group or -1, wrong, zeros=not weights.get("symmetric", True))
    raise wrong(f"weights of num_bits {json.dumps(bits)}, type {json.dumps(kind)} are not understood")


def _kv8(stated: Mapping[str, Any]) -> bool:
    scheme = stated.get("kv_cache_scheme")
    algorithm = str(stated.get("kv_cache_quant_algo") or "").upper()
    return algorithm == "FP8" or (isinstance(scheme, dict) and scheme.get("num_bits") == 8)


def _matcher(patterns: Sequence[str], wrong: Callable[[str], UserError]) -> Callable[[str], bool]:
    """Return a function that tells whether a pattern matches the name of a module, or of one that contains the module.

    `wrong` makes the error for a pattern that cannot be used.
    """
    exact, tests = set[str](), list[Callable[[str], bool]]()
    for pattern in patterns:
        if pattern.startswith("re:"):
            tests.append(_expression(pattern[3:], wrong))
        elif "*" in pattern:
            inner = _inner(pattern)
            tests.append(lambda name, p=inner: any(fnmatchcase(_inner(n), p) for n in _holders(name)))  # type: ignore[misc]
        else:
            exact.add(_inner(pattern))

    def unquantised(name: str) -> bool:
        holders = [_inner(n) for n in _holders(name)]
        return any(n in exact or n.rpartition(".")[2] in exact for n in holders) or any(test(name) for test in tests)

    return unquantised


def _expression(text: str, wrong: Callable[[str], UserError]) -> Callable[[str], bool]:
    """Return a function that tells whether a regular expression matches a module's name.

    The expression comes from a checkpoint, so one that might take long to match is refused.
    """
    plain = re.sub(r"\\.|\(\?:", "", text.removesuffix(".*"))
    repeats, choices = (len(re.findall(characters, plain)) for characters in (r"[*+{]", r"[?|]"))
    if len(text) > MOST_CHARS or repeats > MOST_REPEATS or choices > MOST_CHOICES or re.search(r"\)[*+{]", plain):
        raise wrong(f"{json.dumps(text)[:60]}: a pattern with many or nested repeats might match for long")
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise wrong(f"{json.dumps(text)[:60]}: no regular expression ({error})") from None
    return lambda name: any(pattern.match(prefix + name) for prefix in ("", "language_model."))


def _inner(name: str) -> str:
    """Return a module's name in the form in which names are compared.

    This form lacks the prefix of a multimodal model's layers, and has one word for shared experts.
    """
    at = name.find("layers.")
    short = name[at:] if at >= 0 else name.removeprefix("language_model.").removeprefix("model.")
    return short.replace("shared_expert.", "shared_experts.")


def _holders(name: str) -> list[str]:
    """Return a module's name, and the names of the modules that contain it."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
