"""Servers that run already, of whatever kind and wherever they are: `--engine attach+urls=URL[,URL]`.

Each URL is an OpenAI-compatible endpoint that serves one model or more, as its /v1/models says. A model of the workload
is served by the one of its name; those without a namesake take the others in the order of the URLs. Nothing is loaded
or stopped: a `Load` is done at once wherever a policy puts the model, and evictions, limits and the like are refused.
What policies know of sizes and speeds is what the spec says of its GPUs, and may not be the servers'.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from harness.client.body import OPENAI, Server, Style
from harness.engines import machine as machines
from harness.engines.llamacpp import LlamaCpp
from harness.engines.machine import Config, Machine
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Keep, Seat, Sleep
from harness.engines.sglang import Sglang
from harness.engines.vllm import Vllm
from harness.policy.types import Inst, Option, UserError

ANSWER_S = 10.0  # for the list of models
# By who says to have made a server; "bench": ours (bench mock).
STYLE_OF = {**{kind.name: kind.style for kind in (LlamaCpp, Sglang, Vllm)}, "bench": Style()}
HERE = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields that `--engine attach+urls=...+key_env=...` sets."""

    urls: str = ""  # with commas between them
    key_env: str = ""  # the environment variable that holds their key: its name, never the key


class Attached:
    """The servers of the URLs."""

    name = "attach"
    can = frozenset({"Load", "Admit", "Drop", "Run", "view.oracle_tokens"})
    ways = frozenset({"host"})
    sleeps: Mapping[str, Sleep] = {}
    apart = False
    elastic = False
    keep: Keep | None = None
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",), "process": ("gpu", "model")}

    def __init__(self, config: Config, priced: Machine, fields: Fields) -> None:
        self.config, self.key_env = config, fields.key_env
        self.urls = tuple(url for text in fields.urls.split(",") if (url := text.strip()))
        for url in self.urls:
            _base(url)
        self.cluster = machines.cluster(config, priced=priced)
        self.slots = 0  # their memory is their own matter
        self.style = OPENAI
        self.lacks = "" if self.urls else "the URLs of servers that run: --engine attach+urls=http://HOST:PORT"
        self.facts: Mapping[str, str] = {"servers": " ".join(self.urls) or "none"}
        self.matched: dict[str, tuple[Server, str]] = {}  # by model, with the way in which it was found

    def ready(self, folder: Path) -> None:  # noqa: ARG002 - there is nothing to keep
        """Ask every URL for its models; see Kind."""
        if self.lacks:
            raise UserError(f"attach needs {self.lacks}")
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        offers = [offer for url in self.urls for offer in models(url, key)]
        self.matched = match([m.name for m in self.config.models], [server for server, _ in offers])
        ours = {to for to, _ in self.matched.values()}
        styles = [STYLE_OF.get(maker, OPENAI) for server, maker in offers if server in ours]
        self.style = styles[0] if styles.count(styles[0]) == len(styles) else OPENAI
        self.style = self.style._replace(key_env=self.key_env)

    def close(self) -> None:
        """See Kind: nothing is ours."""

    def seat(self, inst: Inst, kv_bytes: int, log: Path, sms: int | None = None) -> Seat:  # noqa: ARG002
        """See Kind."""
        return Seat(self.matched[inst.model][0], None)

    def resize(self, inst: Inst, kv_bytes: int) -> None:
        """See Kind: their memory is their own matter."""

    def roots(self) -> list[int]:
        """See Kind: who listens at the URLs of this machine."""
        ports = {url.port for text in self.urls if (url := urlsplit(text)).hostname in HERE | {socket.gethostname()}}
        return listeners(ports) if ports else []

    def served(self) -> dict[str, str]:
        """See Kind."""
        return {m: f"served as {to.model} at {to.url}, matched by {how}" for m, (to, how) in self.matched.items()}


def models(url: str, key: str = "") -> list[tuple[Server, str]]:
    """List the models that a URL serves, each with the owner that its server states. Raises UserError."""
    base = _base(url)
    request = urllib.request.Request(f"{base}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=ANSWER_S) as answer:
            listed = json.load(answer)["data"]
        offers = [(Server(base, str(entry["id"])), str(entry.get("owned_by", ""))) for entry in listed]
    except urllib.error.HTTPError as error:
        raise UserError(f"{base}/v1/models: HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{base} does not answer: {getattr(error, 'reason', None) or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{base}/v1/models is no list of models, as OpenAI's is") from None
    if not offers:
        raise UserError(f"{base} serves no model")
    return offers


def _base(url: str) -> str:
    """Return the URL without /v1. Raises UserError if it is not an HTTP URL."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return base
    except ValueError:  # brackets, a port beyond 65535
        pass
    raise UserError(f'"{url}" is no http://HOST:PORT')


def match(names: Sequence[str], servers: Iterable[Server]) -> dict[str, tuple[Server, str]]:
    """Match models to servers: (server, "name" or "order") by model. UserError if servers are too few."""
    left = list(servers)
    total = len(left)
    matched: dict[str, tuple[Server, str]] = {}
    for name in names:
        if (same := next((server for server in left if server.model == name), None)) is not None:
            matched[name] = same, "name"
            left.remove(same)
    for name in names:
        if name not in matched:
            if not left:
                raise UserError(f"{len(names)} models, and the servers have {total}: --models names as many")
            matched[name] = left.pop(0), "order"
    return {name: matched[name] for name in names}


def listeners(ports: set[int | None]) -> list[int]:
    """Return the processes of this machine that listen at one of the ports, as far as we may know."""
    try:
        every = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    listening = [(c.pid, c.laddr[1]) for c in every if c.status == psutil.CONN_LISTEN and c.laddr]
    return sorted({pid for pid, port in listening if pid is not None and port in ports})


def make(config: Config, options: Mapping[str, Option], machine: Machine, fields: Fields) -> Servers:  # noqa: ARG001
    """Configure the engine of this file; see harness/loop/engine.py."""
    return Servers(config, Attached(config, machine, fields))
