"""`bench mock`."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from harness.cli.codes import Code
from harness.cli.options import Number, complete, examples, gpu_names, stems

if TYPE_CHECKING:
    from harness.mock.agenda import Agenda
    from harness.mock.answer import Flavour
    from harness.mock.model import Served
    from harness.mock.pacing import Pacing

NAMED_TOKENS = 32768  # that a model takes whose name is no checkpoint's
MOST_PORT = 65535
SHARE = Number(0, 1)
MS = Number(0, 86_400_000)
COUNT = click.IntRange(1)
MOST_PORT = 65535


@click.command(epilog=examples("bench mock --models llama-3.1-8b,qwen-2.5-7b --gpu h100 --port 8000",
                               "bench mock --models a,b --ttft-ms 50 --itl-ms 10 --ports --port 8001",
                               "bench mock --models a --ttft-ms 50 --itl-ms 10 --fail 0.01 --hang 0.001 --seed 3",
                               "bench mock --models light8 --flavour llama.cpp --sleep-idle-s 60"))  # fmt: skip
@click.option(
    "--models",
    default="llama-3.1-8b",
    show_default=True,
    metavar="SET|NAMES",
    shell_complete=complete(lambda: stems("workloads/sets")),
    help="A model set, or shapes as llama-3.1-8b*2,llama-3.2-1b; with --ttft-ms any names.",
)
@click.option(
    "--gpu",
    default="h100",
    show_default=True,
    metavar="KIND",
    shell_complete=complete(gpu_names),
    help="GPU whose cost table gives the latency.",
)
@click.option(
    "--gpus",
    type=COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="GPUs, to which models go in turn. Models of one GPU alternate, a step each.",
)
@click.option(
    "--host-profile",
    default="vllm-0.15",
    show_default=True,
    metavar="PROFILE",
    help="CPU cost profile of a serving engine.",
)
@click.option("--table", metavar="FILE", help="Cost table (bench calibrate writes one).")
@click.option("--batch-cap", type=COUNT, default=256, show_default=True, metavar="N", help="Largest batch of a step.")
@click.option(
    "--ttft-ms",
    type=MS,
    metavar="MS",
    help="Fixed TTFT instead of a cost table, whatever else runs.",
)
@click.option("--itl-ms", type=MS, metavar="MS", help="With --ttft-ms: fixed time between tokens.  [default: 0]")
@click.option(
    "--max-model-len",
    type=click.IntRange(2),
    metavar="N",
    help="Longest prompt + output, in tokens.  [default: the checkpoint's; 32768 for other names]",
)
@click.option(
    "--output-tokens",
    type=COUNT,
    default=256,
    show_default=True,
    metavar="N",
    help="Output tokens of requests that do not set ignore_eos.",
)
@click.option(
    "--flavour",
    type=click.Choice(["vllm", "llama.cpp"]),
    default="vllm",
    show_default=True,
    help="Server to imitate. A request to a sleeping model waits for /wake_up (vllm) or wakes it (llama.cpp); "
    "the last chunks differ too.",
)
@click.option(
    "--sleep-idle-s",
    type=Number(0, 86_400 * 365),
    metavar="S",
    help="Idle time after which a model falls asleep.  [default: never]",
)
@click.option("--sleep-ms", type=MS, metavar="MS", help="Time to fall asleep.  [default: by the cost table, else 0]")
@click.option("--wake-ms", type=MS, metavar="MS", help="Time to wake.  [default: by the cost table, else 0]")
@click.option(
    "--queue",
    type=click.IntRange(0),
    metavar="N",
    help="Sequences of a model that may wait for a first token; more get 429.  [default: no limit]",
)
@click.option("--fail", type=SHARE, default=0.0, metavar="SHARE", help="Share of requests answered with 500.")
@click.option("--reject", type=SHARE, default=0.0, metavar="SHARE", help="Share of requests answered with 429.")
@click.option("--hang", type=SHARE, default=0.0, metavar="SHARE", help="Share of requests that never get a byte.")
@click.option(
    "--cut", type=SHARE, default=0.0, metavar="SHARE", help="Share of requests whose connection closes halfway."
)
@click.option(
    "--malformed", type=SHARE, default=0.0, metavar="SHARE", help="Share of requests whose JSON breaks halfway."
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed that selects these requests.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, MOST_PORT),
    default=8000,
    show_default=True,
    metavar="N",
    help="Port to listen on; 0: any free one.",
)
@click.option("--ports", is_flag=True, help="A port for each model, from --port on.")
@click.option("--with-parent", is_flag=True, help="End when the parent process has ended.")
@click.option("--log", is_flag=True, help="Log each ended request, sleep and wake on stderr.")  # fmt: skip
def mock(
    *,
    models: str,
    gpu: str,
    gpus: int,
    host_profile: str,
    table: str | None,
    batch_cap: int,
    ttft_ms: float | None,
    itl_ms: float | None,
    max_model_len: int | None,
    output_tokens: int,
    flavour: str,
    sleep_idle_s: float | None,
    sleep_ms: float | None,
    wake_ms: float | None,
    queue: int | None,
    fail: float,
    reject: float,
    hang: float,
    cut: float,
    malformed: float,
    seed: int,
    host: str,
    port: int,
    ports: bool,
    with_parent: bool,
    log: bool,
) -> None:
    """Serve OpenAI's API with set latencies and no model.

    Its latencies come from a cost table or from options; it can sleep, and fail on request.
    """
    import time

    from harness.mock.faults import Shares
    from harness.mock.server import Mock, run
    from harness.mock.settings import Settings
    from harness.policy.types import UserError

    numbers = {"--ttft-ms": ttft_ms, "--itl-ms": itl_ms, "--sleep-idle-s": sleep_idle_s, "--sleep-ms": sleep_ms,
               "--wake-ms": wake_ms, "--fail": fail, "--reject": reject, "--hang": hang, "--cut": cut,
               "--malformed": malformed}  # fmt: skip
    for option, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise UserError(f"{option} {value:g} is not a finite number")
    if itl_ms is not None and ttft_ms is None:
        raise UserError("--itl-ms needs --ttft-ms: latency is either fixed or by a cost table")
    if (total := fail + reject + hang + cut + malformed) > 1:
        raise UserError(f"--fail, --reject, --hang, --cut and --malformed are {total:g} of all requests together")
    priced = ("gpu", "gpus", "host_profile", "table", "batch_cap")
    given = click.get_current_context().get_parameter_source
    if ttft_ms is not None and (
        other := next((name for name in priced if given(name) is ParameterSource.COMMANDLINE), None)
    ):
        raise UserError(f"--{other.replace('_', '-')} is of latency by a cost table: leave out --ttft-ms")
    if not host.strip():
        raise UserError('--host "" is no address')
    if ttft_ms is None:
        served, pacing = _priced(models, gpu, gpus, host_profile, table, batch_cap)
    else:
        served, pacing = _fixed(models, ttft_ms, itl_ms or 0.0)
    if ports and port and port + len(served) - 1 > MOST_PORT:
        most = MOST_PORT + 1 - len(served)
        raise UserError(f"--ports --port {port}: {len(served)} models need as many ports; --port is at most {most}")
    for i, model in enumerate(served):
        served[i] = replace(
            model,
            max_tokens=max_model_len or model.max_tokens,
            sleep_ns=model.sleep_ns if sleep_ms is None else _levels(sleep_ms),
            wake_ns=model.wake_ns if wake_ms is None else _levels(wake_ms),
            idle_ns=None if sleep_idle_s is None else round(1e9 * sleep_idle_s),
            wakes=flavour == "llama.cpp",
        )
    if ports and port and port + len(served) - 1 > MOST_PORT:
        raise UserError(f"--ports: {len(served)} models from --port {port} on go beyond {MOST_PORT}")
    shares = Shares(fail, reject, hang, cut, malformed)
    kind: Flavour = "llama.cpp" if flavour == "llama.cpp" else "vllm"
    settings = Settings(kind, queue, output_tokens, shares, seed, log)
    stopped = run(Mock(served, pacing, settings, time.monotonic_ns()), host, port, ports=ports, with_parent=with_parent)
    sys.exit(Code.INTERRUPTED if stopped is signal.SIGINT else Code.DONE)


def _priced(
    models: str, gpu: str, gpus: int, host: str, table: str | None, batch_cap: int
) -> tuple[list[Served], Callable[[Agenda, int], Pacing]]:
    """Build the models of a set, with the latency of a cost table."""
    from harness.mock.table import Table
    from workloads.models import model_set, sets

    members = model_set(models).members
    names = [member.name for member in members]
    if models not in sets() and not models.endswith(".toml"):  # shapes: numbered only where one is there several times
        shapes = [member.shape.name for member in members]
        names = [shape if shapes.count(shape) == 1 else name for name, shape in zip(names, shapes, strict=True)]
    costs = Table(((n, m.shape, m.tp) for n, m in zip(names, members, strict=True)), gpu, host, table)
    return costs.served(), costs.pacing(gpus, batch_cap)


def _fixed(models: str, ttft_ms: float, itl_ms: float) -> tuple[list[Served], Callable[[Agenda, int], Pacing]]:
    """Build the models of a set, or of any names, with the same latency always."""
    from harness.mock.model import Served
    from harness.mock.pacing import Fixed
    from harness.policy.types import UserError
    from workloads.models import model_set, named, sets, shapes

    if models in sets() or models.endswith(".toml"):
        served = [Served(member.name, member.shape.max_tokens) for member in model_set(models).members]
    else:
        names, known = [name.strip() for name in models.split(",")], shapes()
        tokens = {name: known[ours].max_tokens for name in names if (ours := named(name)) in known}
        served = [Served(name, tokens.get(name, NAMED_TOKENS)) for name in names]
        if bad := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f'--models "{models}": "{bad}" is there twice')
        if "" in names:
            raise UserError(f'--models "{models}" has an empty name')
    return served, lambda agenda, _: Fixed(agenda, round(1e6 * ttft_ms), round(1e6 * itl_ms))


def _levels(ms: float) -> dict[int, int]:
    return dict.fromkeys((1, 2), round(1e6 * ms)) | {0: 0}
