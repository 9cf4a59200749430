"""The constants of the simulated hardware on which a comparison depends: values, sources, and the changes to try."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from harness.engines import machine
from harness.engines.costs import quantities, whole
from harness.engines.costs.constants import CONSTANTS, SOURCES
from harness.loop.system import System
from harness.policy import mix
from harness.policy.types import GIB, Infeasible, Unsupported, UserError
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec
from harness.study.study import refuse_unknown

FACTORS = (0.5, 2.0)
# Both ends of what is known: 1 (own kernels, RTX 3090) and 3 layers; .7 (1B and 3B), .9, and all of a GPU.
# Kernels take 1.15 (vLLM) or 1.16 times their own seconds in steps with prompts, as prompts of 1,024 tokens
# and more showed. Shorter prompts were not measured: both no slowdown at all and twice as much are tried.
TRIED = {"passes": (0.5, 1.5), "decode_fill": (0.875, 1.125, 1.25), "prompts": (0.87, 1.15)}
TURNS = ("passes", "decode_fill", "prompt_tokens")  # constants of kernels that take turns
SHARING, MODES = "sharing", ("fluid", "turns")  # not a number: it is changed to the other mode, for both systems
MEANS = {**CONSTANTS, SHARING: "how concurrent models share a GPU"}


class Constant(NamedTuple):
    """A constant with its value in the comparison."""

    name: str
    means: str
    value: str
    source: str


class Setting(NamedTuple):
    """A change of a constant: the constant, the change in words, and the fields of a spec that it sets."""

    constant: str
    setting: str
    changes: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the change in a study."""
        return f"{self.constant} {self.setting}".strip()

    def fields(self, spec: Spec) -> dict[str, Any]:
        """Return the fields of a spec with this change.

        If the spec already scales the constant, the two factors are multiplied.
        """
        if "scaled" not in self.changes:
            return dict(self.changes)
        have = dict(spec.scaled)
        factors = {name: by * have.get(name, 1.0) for name, by in self.changes["scaled"]}
        return {**self.changes, "scaled": have | factors}


def settings(specs: Sequence[Spec], only: Collection[str] | None = None) -> tuple[list[Setting], dict[str, str]]:
    """List the changes of constants to try; also return the reason why each other constant is not varied, by its name.

    `only` limits the changes to these constants (None: all). Raises UserError for an unknown constant.
    """
    refuse_unknown("there is no constant", only or (), MEANS)
    changes, unchanged = list[Setting](), dict[str, str]()
    for name in MEANS:
        if only is not None and name not in only:
            unchanged[name] = "not asked for"
        elif why := _fixed(name, specs):
            unchanged[name] = why
        elif name == SHARING:
            have = _sharing(specs)
            changes += [Setting(name, mode, {SHARING: mode}) for mode in MODES if have != {mode}]
        else:
            changes += [Setting(name, f"x {by:g}", {"scaled": ((name, by),)}) for by in TRIED.get(name, FACTORS)]
    return changes, unchanged


def _fixed(name: str, specs: Sequence[Spec]) -> str:
    """Return the reason why a constant is not varied; empty if it is varied."""
    if name == "net" and all(resolve(spec).gpus <= spec.node_gpus for spec in specs):
        return "nothing crosses nodes, for there is one"
    if name == "reserve" and not any(policy.options.get("kv") == "elastic" for policy in _policies(specs)):
        return "neither system has elastic KV memory"
    if (name == "co_run" or name in TURNS) and "fluid" not in _sharing(specs):
        return "neither system has steps that run beside others"
    if name == "prompts" and any(quantities.machine(spec.table) is not None for spec in specs):
        return "steps with prompts were measured whole"
    return ""


def constants(specs: Sequence[Spec]) -> tuple[Constant, ...]:
    """List every constant with its source and its value in these specs. Raises UserError for a mix of kinds of GPU."""
    spec = resolve(specs[0])
    if mix.mixed(spec.gpu):
        raise UserError(f"gpu {spec.gpu}: constants are varied on one kind of GPU")
    setup = Setup(spec)
    config, priced, measured = setup.config, setup.machine, quantities.machine(spec.table)
    card, ladder, host = priced.spec, priced.ladder, priced.host
    sources = {row.quantity: row.source for row in quantities.sources((), spec.gpu, spec.host, spec.table)}
    uses = {what for policy in _policies(specs) for what in policy.uses}
    ways = [way for way in ladder if f"Load.way:{way}" in uses] or ["host"]  # the default way of a Load
    why = quantities.ladder_sources(spec.table)
    gib = sorted(sum(machine.parts(config, model)) / GIB for model in config.models)
    span = " to ".join(dict.fromkeys(f"{x:.2f}" for x in (gib[0], gib[-1])))
    hidden = "added" if host.serial else "hidden where the GPU takes longer"

    def link(rate: float, key: str, given: float | None) -> tuple[str, str]:
        return f"{rate / 1e9:g} GB/s", sources[f"{card.kind}.{key}"] if given is None else "as given"

    co_run, turns = _co_run(measured, sources), priced.tables.cost[0]
    stated = {
        "pcie": link(card.h2d, "h2d", spec.pcie_gbps),
        "nvlink": link(card.nvlink, "nvlink", spec.nvlink_gbps),
        "net": link(card.net, "net", spec.net_gbps),
        "disk": link(card.disk, "disk", spec.disk_gbps),
        "swap": (
            ", ".join(f"{way} {ladder[way].fixed_s:g} s" for way in ways),
            "; ".join(f"{way}: {why[way]}" for way in ways),
        ),
        "step": (
            f"{1e3 * host.host0:.3g} ms + {1e6 * host.host1:.3g} us/sequence, {hidden}",
            sources[f"host {spec.host}"],
        ),
        "prompts": (f"{host.scale_prefill:g} x", sources[f"host {spec.host}"]),
        "process": (f"{span} GiB", SOURCES["process"] if spec.process_bytes is None else "as given"),
        "reserve": (f"{machine.kept_pages(config):g} pages", SOURCES["reserve"]),
        "co_run": co_run,
        "passes": (f"{turns['passes']:g} layers", co_run[1]),
        "decode_fill": (f"{turns['dec_fill']:g}", co_run[1]),
        "prompt_tokens": (f"{turns['few']:g} to {turns['many']:g} tokens", co_run[1]),
        SHARING: (", ".join(sorted(_sharing(specs))), co_run[1]),
    }
    return tuple(Constant(name, means, *stated[name]) for name, means in MEANS.items())


def _co_run(measured: whole.Machine | None, sources: Mapping[str, str]) -> tuple[str, str]:
    """Describe how much concurrent prefill and decode steps slow each other down.

    The source of these numbers is returned too.
    """
    if measured is None:
        return "as computed from turns", next(why for what, why in sources.items() if what.endswith(".co_run"))
    prefill, decode = measured.co_run.prefill, measured.co_run.decode
    text = f"prefill {prefill.factor:g} x and decode {decode.factor:g} x the time by turns"
    return text, sources[f"{measured.kind}.co_run.decode"]


def _sharing(specs: Sequence[Spec]) -> set[str]:
    """Return the modes in which models share a GPU: the mode that the specs set, else the mode of each system."""
    if specs[0].sharing != "own":
        return {specs[0].sharing}
    return {str(policy.options.get(SHARING, MODES[0])) for policy in _policies(specs)}


def _policies(specs: Iterable[Spec]) -> list[System]:
    """Make the policies of specs; leave out those that do not fit or are not supported."""
    policies = []
    for spec in specs:
        with suppress(Infeasible, Unsupported):
            policies.append(Setup(resolve(spec)).policy)
    return policies
