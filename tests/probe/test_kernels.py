"""The Triton kernels without a GPU: compiled for Hopper and looked at, and interpreted against torch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")  # imports what the interpreter replaces

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from probe import kernels, llama, rig  # noqa: E402

SMS, SHARED, REGISTERS = 132, 113 * 1024, 255  # two programs' shared memory on an SM of 227 KiB; registers of a thread
NAMES = [name for name, kernel in vars(kernels).items() if isinstance(kernel, triton.runtime.jit.JITFunction)]


# -------------------------------------------------------------------------------------------- compiled for sm_90


@dataclass(frozen=True)
class Case:
    """One variant as a probe launches it."""

    kernel: str
    types: str  # name:type, with a * after what is a multiple of 16
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


def decode(dims: str, block: int, splits: int, stages: int, dtype: str = "bf16") -> Case:
    m = llama.DIMS[dims]
    types = (
        f"q:{dtype}* kv:{dtype}* table:i32* ctx:i32* acc:fp32* ml:fp32* table_stride:=i32* layer:=i32* v_off:=i32*"
        " scale:=fp32"
    )
    constants = {"G": m.heads // m.kv, "HKV": m.kv, "D": m.d, "BS": block, "S": splits, "GP": 16}
    return Case("decode", types, constants, 4, stages)


B = {name: {"H": m.hidden, "BLOCK": triton.next_power_of_2(m.hidden), "EPS": 1e-5} for name, m in llama.DIMS.items()}
CASES = [
    *(decode(name, 64, s, 7) for name in llama.DIMS for s in (1, 32)),
    *(decode("8B", block, 8, stages) for block, stages in ((16, 7), (64, 3), (64, 5))),
    decode("8B", 64, 8, 7, "fp16"),
    *(Case("merge", "acc:fp32* ml:fp32* out:bf16*", {"G": 4, "D": 128, "S": s, "GP": 16}, 1) for s in (1, 8, 32)),
    *(Case("add_norm", "x:bf16* add:bf16* weight:bf16* out:bf16*", c, 8) for c in B.values()),
    *(
        Case(
            "rope_write",
            "qkv:bf16* cosine:fp32* sine:fp32* position:i32* slot:i64* q:bf16* k:bf16* v:bf16* layer:=i32* v_off:=i32*",
            {"HQ": m.heads, "HKV": m.kv, "D": m.d},
            1,
        )
        for m in llama.DIMS.values()
    ),
    *(Case("silu_mul", "both:bf16* out:bf16*", {"F": m.ffn, "BLOCK": 1024}) for m in llama.DIMS.values()),
    Case("gather", "src:i64* offset:i64* dst:i64*", {"N": 16384, "BLOCK": 1024}),
    Case("scatter", "src:i64* offset:i64* dst:i64*", {"N": 16384, "BLOCK": 1024}),
    Case("where", "out:i32* spin_ns:i64*", {"N": 4 * SMS}, 1),
    Case("touch", "x:i32*", {}, 1),
    Case("peek", "base:i64* offset:i64* out:i64*", {}),
    *(Case("volley", "mine:i32* other:i32* rounds:i32* cap:i32* bad:i32*", {"SERVES": s}, 1) for s in (True, False)),
]


def compiled(case: Case) -> Any:
    """Compile the kernel for sm_90; no device is asked."""
    kernel = getattr(kernels, case.kernel)
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    attrs = {}
    for word in case.types.split():
        name, kind = word.split(":")
        signature[name] = kind.strip("=*") if kind.startswith("=") else f"*{kind.strip('*')}"
        if kind.endswith("*"):
            attrs[kernel.arg_names.index(name),] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(kernel, signature, constants, attrs)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def usage(cubin: bytes, folder: Path) -> dict[str, int]:
    """Return REG, STACK, SHARED, LOCAL of the only kernel in a cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    report = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}


def test_every_kernel_is_compiled_somewhere() -> None:
    assert {case.kernel for case in CASES} == set(NAMES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, (c.kernel, *c.constants.values(), c.stages))))
def test_a_kernel_compiles_for_hopper(case: Case, tmp_path: Path) -> None:
    got = compiled(case)
    used, ptx = usage(got.asm["cubin"], tmp_path), got.asm["ptx"]
    assert used["LOCAL"] == used["STACK"] == 0  # nothing spilled
    assert used["REG"] <= REGISTERS
    assert got.metadata.shared <= SHARED
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+)", ptx)
    wide = [size for size in copies if int(size, 0) == 16]
    assert len(copies) - len(wide) <= case.stages * (case.kernel == "decode")  # a table entry for each tile in flight
    assert bool(wide) == (case.kernel == "decode")
    assert case.kernel != "decode" or not re.search(r"ld\.global[^;]*\.[bu]16", ptx)  # one number at a time


def test_flags_are_handed_over_with_the_right_order() -> None:
    ptx = compiled(next(case for case in CASES if case.kernel == "volley")).asm["ptx"]
    assert re.search(r"\.acquire\b", ptx)
    assert re.search(r"atom\.global\.gpu\.release\.exch", ptx)


# -------------------------------------------------------------------------------------------------- interpreted


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the same kernels in Triton's interpreter, on a rig whose tensors lie in host memory."""
    patch = interpreter._patch_lang_tensor

    def one_number(tensor: Any, *more: Any) -> None:
        """Make numbers of loop bounds: there they are arrays of one number, which numpy >= 2.4 refuses."""
        patch(tensor, *more)
        patched = more[0].set_attr if more else setattr  # newer versions undo what they patch
        patched(tensor, "__index__", lambda self: int(self.handle.data.item()))

    dot = interpreter.InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        """Widen bf16, which is kept as its bits there: `dot` takes them for whole numbers."""
        if x.dtype.scalar != triton.language.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", one_number)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *more: dot(self, wide(a), wide(b), *more)
    )
    done: dict[int, Any] = {}
    for module in (kernels, triton.language.standard, triton.language):  # sums and maxima are kernels too
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, triton.runtime.jit.JITFunction):
                interpreted = done.setdefault(id(kernel), interpreter.InterpretedFunction(kernel.fn))
                monkeypatch.setattr(module, name, interpreted)
    monkeypatch.setattr(rig, "DEVICE", "cpu")
    torch.manual_seed(0)
    llama.rotary.cache_clear()
    yield
    llama.rotary.cache_clear()


def error(got: Any, want: Any) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


TINY = llama.Dims("tiny", 2, 64, 4, 2, 32, 96, 128)


def shape(group: int, d: int) -> llama.Dims:
    return TINY._replace(heads=2 * group, d=d, hidden=64)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("group", "d", "block", "page", "split", "lengths"),
    [
        (1, 32, 16, 16, 1, [1, 16, 17]),
        (4, 32, 16, 48, 4, [100, 0, 5, 33]),
        (7, 64, 32, 64, 2, [64, 63, 65, 1]),
        (2, 128, 64, 128, 8, [300, 2]),
        (16, 16, 16, 32, 8, [31]),
    ],
)
def test_paged_attention_is_attention(
    group: int, d: int, block: int, page: int, split: int, lengths: list[int], dtype: Any
) -> None:
    m = shape(group, d)
    longest = max(lengths)
    each = -(-longest // page)
    stride = m.layers * 2 * page * m.token + 512  # a page has room to spare
    data = rig.noise(torch.empty(len(lengths) * each * stride), 1.0).to(dtype)
    kv = llama.Kv(m, data, page, stride)
    a = llama.Attend(kv, len(lengths), longest, 8, block, 3, split)
    a.q = a.q.to(dtype)
    a.out = torch.empty_like(a.q)
    a.ctx.copy_(torch.tensor(lengths, dtype=torch.int32))
    for row, n in enumerate(lengths):  # what lies behind a context, in its last block and after, is never seen
        for off in (0, kv.v_off):
            for layer in range(m.layers):
                first = int(a.table[row, (n - 1) // block if n else 0]) * kernels.UNIT + layer * kv.layer + off
                data[first + ((n - 1) % block + 1 if n else 0) * m.token : first + block * m.token] = float("nan")
    for layer in range(m.layers):
        a.run(layer)
        want = llama.reference(a, layer)
        rows = [i for i, n in enumerate(lengths) if n]
        assert error(a.out[rows], want[rows]) < {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
        assert not a.out[[i for i, n in enumerate(lengths) if not n]].any()  # a padded row: zero, not NaN


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 96), (5, 130)])
def test_add_norm_adds_and_norms(rows: int, width: int) -> None:
    x, add, weight = (rig.random(n, 1.0, i) for i, n in enumerate((rows * width, rows * width, width)))
    x, add = x.view(rows, width), add.view(rows, width)
    want = x.float() + add.float()
    out = torch.empty_like(x)
    kernels.add_norm[(rows,)](x, add, weight, out, H=width, BLOCK=triton.next_power_of_2(width))
    assert error(x, want) < 0.01
    assert error(out, want * torch.rsqrt(want.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()) < 0.02


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (3, 96), (2, 1500)])
def test_silu_mul_is_that(rows: int, width: int) -> None:
    both = rig.random(rows * 2 * width, 1.0).view(rows, 2 * width)
    out = torch.empty(rows, width, dtype=torch.bfloat16)
    kernels.silu_mul[(rows, -(-width // 1024))](both, out, F=width, BLOCK=1024)
    gate, up = both.float().chunk(2, 1)
    assert error(out, torch.nn.functional.silu(gate) * up) < 0.02


@pytest.mark.usefixtures("cpu")
def test_gather_then_scatter_is_nothing() -> None:
    src = torch.arange(4000, dtype=torch.int64)
    offset = torch.tensor([1000, 0, 3000])
    stage = torch.zeros(3 * 700, dtype=torch.int64)
    kernels.gather[(3, 1)](src, offset, stage, N=700, BLOCK=1024)
    assert torch.equal(stage.view(3, 700), offset[:, None] + torch.arange(700))
    back = torch.zeros_like(src)
    kernels.scatter[(3, 1)](stage, offset, back, N=700, BLOCK=1024)
    held = torch.cat([torch.arange(o, o + 700) for o in offset.tolist()])
    assert torch.equal(back[held], src[held])
    assert int(back.count_nonzero()) == len(held) - 1  # the first number is 0


def torch_step(model: Any, ids: Any, position: Any, past: list[tuple[Any, Any]]) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return logits of one token a row by plain torch in fp32, and each layer's added K, V as (rows, heads, d)."""
    m, w = model.m, {name: x.float() for name, x in model.w.items()}
    cosine, sine = (table[position.long()][:, None, :] for table in llama.rotary(m.d, 1 << 14))
    x, new = w["embedding"][ids], []

    def norm(x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def turn(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    for l in range(m.layers):
        q, k, v = (norm(x) @ w[f"{l}.qkv"].T).view(len(ids), -1, m.d).split([m.heads, m.kv, m.kv], 1)
        q, k = turn(q), turn(k)
        new.append((k, v))
        out = []
        for row in range(len(ids)):
            ks, vs = (torch.cat([old[row], now[row : row + 1]]) for old, now in zip(past[l], (k, v), strict=True))
            ks, vs = (y.repeat_interleave(m.heads // m.kv, 1) for y in (ks, vs))
            p = torch.softmax(torch.einsum("hd,nhd->hn", q[row], ks) * m.d**-0.5, -1)
            out.append(torch.einsum("hn,nhd->hd", p, vs).reshape(-1))
        x = x + torch.stack(out) @ w[f"{l}.o"].T
        gate, up = (norm(x) @ w[f"{l}.gate_up"].T).chunk(2, 1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{l}.down"].T
    return norm(x) @ w["head"].T, new


@pytest.mark.usefixtures("cpu")
def test_a_decode_step_is_a_llama() -> None:
    model = llama.Model(TINY, rig.random(TINY.weight_bytes() // 2, 0.2))
    rows, ctx, block = 3, 70, 64
    kv = llama.pool(TINY, (rows, 128), page=TINY.kv_bytes * 128, block=block)
    decode = model.decode(kv, rows, ctx, 4)
    past = []
    for l in range(TINY.layers):
        halves = []
        for off in (0, kv.v_off):
            at = decode.a.table[:, : -(-ctx // block)].long() * kernels.UNIT + l * kv.layer + off
            inside = torch.arange(block)[:, None] * TINY.token + torch.arange(TINY.token)
            held = kv.data[(at[:, :, None, None] + inside).view(rows, -1, TINY.token)[:, : ctx - 1]]
            halves.append(held.view(rows, ctx - 1, TINY.kv, TINY.d).float())
        past.append((halves[0], halves[1]))
    want, new = torch_step(model, decode.ids.clone(), decode.position, past)
    decode.step()
    assert error(decode.logits, want) < 0.05
    assert torch.equal(decode.ids, decode.logits.argmax(1))
    for l, pair in enumerate(new):  # the new token's K and V went where the table says
        for off, x in zip((0, kv.v_off), pair, strict=True):
            at = decode.slot[:, None] + l * kv.layer + off + torch.arange(TINY.token)
            assert error(kv.data[at].view_as(x), x) < 0.02


@pytest.mark.usefixtures("cpu")
def test_a_prefill_ends_as_decoding_its_tokens_would() -> None:
    model, n = llama.Model(TINY, rig.random(TINY.weight_bytes() // 2, 0.2)), 9
    prefill = model.prefill(n)
    empty = torch.empty(1, 0, TINY.kv, TINY.d)
    past, want = [(empty, empty)] * TINY.layers, torch.empty(0)
    for t in range(n):
        want, new = torch_step(model, prefill.ids[t : t + 1], torch.tensor([t]), past)
        past = [
            (torch.cat([k, nk[None]], 1), torch.cat([v, nv[None]], 1))
            for (k, v), (nk, nv) in zip(past, new, strict=True)
        ]
    prefill.step()
    assert error(prefill.logits, want) < 0.05


@pytest.mark.parametrize("page_tokens", [16, 48, 128])
def test_a_block_table_names_each_token_once(page_tokens: int) -> None:
    m, rows, ctx, block = TINY, 5, 200, 16
    stride = m.layers * 2 * page_tokens * m.token + 128
    kv = llama.Kv(m, torch.empty(rows * -(-ctx // page_tokens) * stride, dtype=torch.bfloat16), page_tokens, stride)
    table = kv.table(rows, ctx, block)
    assert table.stride(0) % 16 == 0
    held = table[:, : -(-ctx // block)].long().flatten() * kernels.UNIT
    assert len(set(held.tolist())) == len(held)
    inside = held % stride  # K of the first layer, whole blocks of it
    assert ((inside % (block * m.token) == 0) & (inside < page_tokens * m.token)).all()
    slot = kv.slots(table, torch.full((rows,), ctx - 1), block)
    assert torch.equal(slot, table[:, (ctx - 1) // block].long() * kernels.UNIT + (ctx - 1) % block * m.token)


@pytest.mark.parametrize("name", llama.DIMS)
def test_weights_are_views_of_all_of_the_blob(name: str) -> None:
    m = llama.DIMS[name]._replace(layers=2)
    blob = torch.empty(m.weight_bytes() // 2, dtype=torch.bfloat16, device="meta")
    views = llama.weights(m, blob)
    assert sum(w.numel() for w in views.values()) == blob.numel()
    assert views["1.gate_up"].shape == (2 * m.ffn, m.hidden)


def test_a_tensor_over_foreign_memory_shares_it() -> None:
    owner = torch.arange(8, dtype=torch.int64)
    view = rig.at(owner.data_ptr(), 64, torch.int64, "cpu")
    view[3] = 99
    assert owner[3] == 99
