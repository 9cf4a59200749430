"""The types of policies: models, places, requests, and the facts that are known before the start.

This module imports no other module of the bench. Times are in seconds, and sizes in bytes per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GIB = 1 << 30
MIB = 1 << 20
KEPT_PAGES = 5  # pages that an engine keeps mapped (kvcached 0.1.6, KVCACHED_MIN_RESERVED_PAGES)

Gpus = tuple[int, ...]  # one GPU, or a tensor-parallel group in rank order
Phase = Literal["mixed", "prefill", "decode"]  # what a lane steps: prompts and decodes, or one of them
Option = str | int | float | bool  # a value of a field or an option
Fidelity = Literal["simulated", "emulated", "real"]


class UserError(Exception):
    """A mistake of the user, as one line that names the cause and the remedy. The command line exits with 2."""

    @property
    def lines(self) -> list[str]:
        """The lines of the message: one for each argument. Each argument describes one mistake."""
        return list(map(str, self.args))

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Unsupported(Exception):
    """The error that an engine cannot run a system; it names what is missing. The run's row is marked as skipped."""


class Infeasible(Exception):
    """The error that a system cannot hold its models on these GPUs. The run's row has attainment 0 and this reason."""


@dataclass(frozen=True, slots=True)
class Host:
    """The host memory of a node: a home for weights and for KV. It is no tuple, so it never equals a GPU group."""

    node: int = 0  # as in `Gpu.node`


class Inst(NamedTuple):
    """The weights of a model at a place. A policy creates an instance by naming it, without any declaration."""

    model: str  # a key of `Cluster.models`
    place: Gpus | Host  # GPUs by their index in `Cluster.gpus`, all of one node


class Batch(NamedTuple):
    """Requests of one instance that share steps. A batch stays when the instance's weights are evicted.

    A lane is a pair (Batch, Phase). While it is open, the engine runs steps of this phase for the batch.
    """

    inst: Inst  # the weights with which they step
    tag: int = 0  # tells batches of one instance apart


class Request(NamedTuple):
    """A request as a policy sees it: everything but its output length."""

    id: int  # unique in the run
    model: str  # its name
    arrival_s: float  # seconds from the window's start
    prompt_tokens: int  # length of its prompt
    ttft_slo_s: float  # seconds from its arrival to its first token; inf: it has no such SLO
    tpot_slo_s: float  # seconds a token after the first; inf: it has no such SLO


class Prefix(NamedTuple):
    """The blocks of each prompt that other prompts may share, as ids: request r has ids[offsets[r] : offsets[r + 1]].

    Only whole blocks of `block_tokens` tokens have an id, from the prompt's start: floor(prompt_tokens / block_tokens)
    of them, or none if a request's content is not known. Two blocks of one model have equal ids if and only if their
    tokens, and all tokens before them in their prompts, are the same. So two requests share the blocks at the start of
    their prompts whose ids are equal.
    """

    block_tokens: int
    offsets: NDArray[np.int64]  # (requests + 1,), from 0, not descending
    ids: NDArray[np.int64]  # (offsets[-1],), not negative

    def first(self, n: int) -> Prefix:
        """Return the prefixes of the first n requests."""
        return Prefix(self.block_tokens, self.offsets[: n + 1], self.ids[: self.offsets[n]])


@dataclass(frozen=True, slots=True)
class Jobs:
    """A workload as arrays with one element for each request, sorted by arrival. Engines replay it.

    `model` indexes `models`. `output_tokens` has the true lengths, which only engines see. In a closed loop, `after` is
    the index of an earlier request. The later request arrives `think_s` seconds after its client learns that the
    earlier one ended (done, dropped or failed). Its `arrival_s` is infinite, and the engine reports the arrival.
    """

    models: tuple[str, ...]
    arrival_s: NDArray[np.float64]  # of the intended arrival, from the window's start; warm-up is negative
    model: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]  # >= 1
    ttft_slo_s: NDArray[np.float64]  # inf where no SLO applies
    tpot_slo_s: NDArray[np.float64]
    after: NDArray[np.int32] | None = None  # an earlier row, of which it is the only successor; -1: arrives by itself
    think_s: NDArray[np.float64] | None = None  # where `after` is given
    prefix: Prefix | None = field(default=None, kw_only=True)  # what a prefix cache may find; None: there is no cache

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def columns(self) -> tuple[NDArray[Any] | None, ...]:
        """The arrays that have one element for each request; None for a field without values."""
        return tuple(getattr(self, field.name) for field in fields(self)[1:-1])

    def part(self, begin: int, end: int) -> Jobs:
        """Return the requests with indices from `begin` to `end` - 1, without prefixes and links of closed loops."""
        return Jobs(self.models, *(rows[begin:end] for rows in self.columns[:6] if rows is not None))

    def first(self, n: int) -> Jobs:
        """Return the first n requests; the later requests of their closed loops are left out."""
        *columns, prefix = (getattr(self, field.name) for field in fields(self)[1:])
        cut = (None if rows is None else rows[:n] for rows in columns)
        return Jobs(self.models, *cut, prefix=prefix and prefix.first(n))  # type: ignore[arg-type]


class Format(NamedTuple):
    """A number format of weights, and the bytes of one parameter including its share of the scales.

    If a group of modules mixes formats, `name` is the format of most of its bytes, and `weight_bytes` is the mean.
    """

    name: str  # "bf16", "fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4", "gguf" or "fp32"
    weight_bytes: float


class Formats(NamedTuple):
    """The formats of a checkpoint's weights, by group of modules."""

    attention: Format
    ffn: Format
    experts: Format
    shared: Format
    head: Format
    embedding: Format
    rest: Format = Format("bf16", 2.0)  # routers and norms, which no checkpoint quantises


class Experts(NamedTuple):
    """A mixture of experts. In `layers` layers, a token's FFN is `top` of `routed` experts plus the shared ones."""

    layers: int  # with experts; the others have the shape's dense FFN
    routed: int  # experts of a layer
    top: int  # of them for each token
    ffn: int  # width of a routed expert
    shared_ffn: int = 0  # width of all shared experts of a layer together


class Latent(NamedTuple):
    """Multi-head latent attention (MLA): K and V of all heads are kept as one vector of kv_rank + rope_dim numbers."""

    q_rank: int  # 0: queries are not compressed
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


class Sliding(NamedTuple):
    """Layers that attend to the last `tokens` tokens only."""

    layers: int
    tokens: int
    kv_heads: int | None = None  # of these layers; None: the shape's
    head_dim: int | None = None


class Shape(NamedTuple):
    """A decoder's dimensions: enough to price its weights, KV and steps."""

    name: str  # of the public checkpoint
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool  # three FFN matrices, not two
    tied: bool  # LM head shares the embedding
    max_tokens: int  # longest prompt + output: what the checkpoint can, or less where less is served
    sampled: bool = False  # the checkpoint's own defaults set top-p or top-k
    experts: Experts | None = None
    latent: Latent | None = None
    sliding: Sliding | None = None
    keys_as_values: bool = False  # layers that do not slide have no value projection; their KV has both all the same
    formats: Formats | None = None  # None: all in bf16
    kv_format: str = "bf16"  # of the KV cache: "bf16" or "fp8", on a processor "fp32"
    other_bytes: int = 0  # of weights that no text step reads: a vision tower
    # How its instances are cut over the n GPUs of their place; both divide n.
    dp: int = 1  # groups of n / dp GPUs, each of which attends to its own sequences: data-parallel attention
    ep: int = 1  # parts into which the routed experts of a layer are dealt; each expert is cut over n / ep GPUs


class Gpu(NamedTuple):
    """A GPU as a policy sees it."""

    kind: str  # such as "h100"
    node: int  # GPUs of one node have the same
    mem_bytes: int  # what the engine may use
    sms: int  # streaming multiprocessors
    sm_choices: tuple[int, ...]  # values of `Run.sms` that are honoured exactly


class Sizes(NamedTuple):
    """A model's bytes on each GPU of a tensor-parallel group of one degree."""

    tp: int  # the degree
    weight_bytes: int  # with what its process holds beside weights and KV, if that comes and goes with them
    kv_token_bytes: int  # KV of one token
    page_bytes: int  # the granule in which KV memory is taken


class Model(NamedTuple):
    """A model as a policy sees it, at one tensor-parallel degree; sizes are bytes on each GPU of its group.

    A policy first gets each model at the degree in the model set. An instance's degree is the number of GPUs of its
    place.
    """

    layers: int  # of its decoder
    tp: int  # GPUs of an instance
    weight_bytes: int  # with what its process holds beside weights and KV, if that comes and goes with them
    kv_token_bytes: int  # KV of one token
    page_bytes: int  # the granule in which KV memory is taken
    max_tokens: int  # longest prompt + output that is served
    ttft_slo_s: float  # seconds; inf: it has no such SLO
    tpot_slo_s: float  # seconds a token; inf: it has no such SLO
    sizes: tuple[Sizes, ...] = ()  # at each degree that the engine serves; none: at `tp` alone
    kept_pages: float = KEPT_PAGES  # that stay mapped while it is loaded, where KV memory is elastic

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees at which the engine serves the model, in ascending order."""
        return tuple(sizes.tp for sizes in self.sizes) or (self.tp,)

    def at(self, tp: int) -> Model:
        """Return the same model at another of its degrees. Raises ValueError if it has no such degree."""
        if tp == self.tp:
            return self
        if tp not in self.degrees:
            raise ValueError(f"tensor-parallel degree {tp} is not one of {self.degrees}")
        return self._replace(**self.sizes[self.degrees.index(tp)]._asdict())


class Plan(NamedTuple):
    """An operator's forecast of a model's traffic, and the origin of this forecast."""

    rate_rps: float  # requests a second
    prompt_tokens: float  # mean
    output_tokens: float  # mean
    origin: str  # in words


class Profile(Protocol):
    """Estimated seconds that policies may query: a calibrated cost table or a noisy copy of it, never the simulator."""

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        """Return the seconds of a prefill of one prompt alone on its GPUs."""
        ...

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """Return the seconds of a decode step of `seqs` sequences with `ctx_tokens` tokens of context in total."""
        ...

    def attend_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """Return the seconds of one layer's attention in a decode step as in `step_s`, alone on its GPUs.

        Attention that is moved to these GPUs takes this time.
        """
        ...

    def kernels_s(self, inst: Inst, seqs: int, ctx_tokens: int) -> tuple[float, ...]:
        """Return the seconds of each kernel of a decode step as in `step_s`, in the order in which they run.

        Kernels of all layers come first, one layer after the other, then the LM head. The sum is the GPU's part of the
        step, without host time.
        """
        ...

    def load_s(self, inst: Inst, way: str, *, from_disk: bool = False) -> float:
        """Return the seconds of a `Load` by `way` on idle links; with `from_disk`, the host lacks the weights."""
        ...

    def move_s(self, kv_bytes: int, src: int | Host, dst: int | Host) -> float:
        """Return the seconds to move `kv_bytes` of KV on an idle link."""
        ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """All that a policy knows before the start."""

    gpus: tuple[Gpu, ...]  # GPU k of a place is the k-th of these
    models: Mapping[str, Model]  # by name
    plan: Mapping[str, Plan]  # by model; one without a forecast has none
    profile: Profile  # seconds of steps, loads and moves
    homes: Mapping[str, Gpus] = field(default_factory=dict)  # where each model is to live, if that is given
    host_bytes: int | None = None  # of weights that a node's memory holds (View.weights tells whose); None: all
