"""Servers that run already, of whatever kind and wherever they are: `--engine attach+urls=URL[,URL]`.

Each URL is an OpenAI-compatible endpoint that serves one or more models, which its /v1/models lists. Each model of the
workload is served by the listed model of the same name. Models without a namesake are assigned the remaining listed
models, in the order of the URLs. Nothing is loaded or stopped. A `Load` is done at once, on whichever GPU a policy puts
the model. Evictions, limits and the like are refused. Policies see the sizes and speeds of the spec's GPUs, which may
not be those of the servers.

The servers' caches may be warm, so each run draws a salt that changes all prompts; the verdict states the salt. If
prompts were found in a cache nevertheless, the run is invalid.

A key is sent only to the hosts of the URLs: redirects are refused, and so are URLs with a user or a password.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from harness.client.body import OPENAI, Server
from harness.client.wire import shown
from harness.engines import machine as machines
from harness.engines.llamacpp import LlamaCpp
from harness.engines.machine import Config, Machine
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Kind, Seat
from harness.engines.sglang import Sglang
from harness.engines.vllm import Vllm
from harness.policy.types import Inst, Option, UserError

ANSWER_S, ANSWER_BYTES = 10.0, 4_000_000  # seconds and bytes that the whole list of models may take
NAME = 80  # characters of a model's name on a server that are printed
STYLE_OF = {kind.name: kind.style for kind in (LlamaCpp, Sglang, Vllm)}  # keys are the owners that servers state
HERE = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields that `--engine attach+urls=...+key_env=...` sets."""

    urls: str = ""  # with commas between them
    key_env: str = ""  # the environment variable that holds their key: its name, never the key


class Attached(Kind):
    """Running servers at the URLs that a user names."""

    name = "attach"
    can = frozenset({"Load", "Admit", "Drop", "Run", "view.oracle_tokens"})
    ways = frozenset({"host"})
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",), "process": ("gpu", "model")}

    def __init__(self, config: Config, priced: Machine, fields: Fields) -> None:
        self.config, self.key_env = config, fields.key_env
        if "@" in fields.urls:
            raise UserError("urls: a URL with a user or a password is refused, and not shown: key_env=NAME names a key")
        self.urls = tuple(url for text in fields.urls.split(",") if (url := text.strip()))
        for url in self.urls:
            _base(url)
        self.cluster = machines.cluster(config, priced=priced)
        self.slots = 0  # the servers manage their own memory
        self.style = OPENAI
        self.lacks = "" if self.urls else "the URLs of servers that run: --engine attach+urls=http://HOST:PORT"
        self.facts: Mapping[str, str] = {"servers": " ".join(self.urls) or "none"}
        self.matched: dict[str, tuple[Server, str]] = {}  # a model maps to its server, matched by "name" or "order"

    def ready(self, folder: Path) -> None:  # noqa: ARG002 - there is nothing to keep
        """Ask every URL for its models, and match them to the workload's models. Raises UserError; see Kind."""
        if self.lacks:
            raise UserError(f"attach needs {self.lacks}")
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        offers = [offer for url in self.urls for offer in models(url, key)]
        self.matched = match([m.name for m in self.config.models], [server for server, _ in offers])
        ours = {to for to, _ in self.matched.values()}
        styles = [STYLE_OF.get(maker, OPENAI) for server, maker in offers if server in ours]
        self.style = styles[0] if styles.count(styles[0]) == len(styles) else OPENAI
        self.style = self.style._replace(key_env=self.key_env, salt=1 + secrets.randbelow(1 << 32))

    def seat(self, inst: Inst, kv_bytes: int, log: Path, sms: int | None = None) -> Seat:  # noqa: ARG002
        """Return the address of the server that is matched to an instance's model; see Kind."""
        return Seat(self.matched[inst.model][0], None)

    def roots(self) -> list[int]:
        """Return the ids of this machine's processes that listen at the URLs; see Kind."""
        ports = {url.port for text in self.urls if (url := urlsplit(text)).hostname in HERE | {socket.gethostname()}}
        return listeners(ports) if ports else []

    def served(self) -> dict[str, str]:
        """Return, for each model, a text that names its matched server; see Kind."""
        return {
            m: f"served as {shown(to.model, NAME)} at {to.url}, matched by {how}"
            for m, (to, how) in self.matched.items()
        }


def models(url: str, key: str = "") -> list[tuple[Server, str]]:
    """List the models that a URL serves, each with the owner that its server states.

    Raises UserError if the server lists no model, or if its answer is not a list of models.
    """
    base = _base(url)
    try:
        listed = json.loads(_answer(base, key))["data"]
        offers = [(entry["id"], str(entry.get("owned_by", ""))) for entry in listed]
        sound = all(isinstance(name, str) and name for name, _ in offers)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise UserError(f"{base}/v1/models is no list of models, as OpenAI's is")
    if not offers:
        raise UserError(f"{base} serves no model")
    return [(Server(base, name), maker) for name, maker in offers]


def _answer(base: str, key: str) -> bytes:
    """Return the bytes of a server's list of models.

    Raises UserError for a redirect, an error, or an answer that is too long or takes too long.
    """
    where, came = f"{base}/v1/models", list[tuple[int, bytes] | Exception]()
    # A thread asks, as a server that sends a byte now and then keeps within every limit of a connection.
    asking = threading.Thread(target=lambda: came.append(_asked(base, key)), daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    if not came:
        raise UserError(f"{where}: no whole answer within {ANSWER_S:g} s")
    if isinstance(came[0], Exception):
        raise UserError(f"{base} does not answer: {shown(str(came[0])) or type(came[0]).__name__}")
    status, body = came[0]
    if 300 <= status < 400:
        raise UserError(f"{where}: HTTP {status}, a redirect, which no key follows: name the server itself")
    if status != http.client.OK:
        raise UserError(f"{where}: HTTP {status}")
    if len(body) > ANSWER_BYTES:
        raise UserError(f"{where}: an answer of more than {ANSWER_BYTES / 1e6:.0f} MB")
    return body


def _asked(base: str, key: str) -> tuple[int, bytes] | Exception:
    """Ask a server for its models; return the status and the body of its answer, or the exception raised."""
    parts = urlsplit(base)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", f"{parts.path}/v1/models", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(ANSWER_BYTES + 1) if answer.status == http.client.OK else b""
    except (OSError, ValueError, http.client.HTTPException) as error:
        return error
    finally:
        connection.close()


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
    """Map each model to (server, "name" or "order"): the server of the model's name, or else the next server left.

    Raises UserError if servers are too few.
    """
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
    """Return the ids of this machine's processes that listen at one of the ports.

    The list is empty if this process may not see the connections of others.
    """
    try:
        every = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    listening = [(c.pid, c.laddr[1]) for c in every if c.status == psutil.CONN_LISTEN and c.laddr]
    return sorted({pid for pid, port in listening if pid is not None and port in ports})


def make(config: Config, options: Mapping[str, Option], machine: Machine, fields: Fields) -> Servers:  # noqa: ARG001
    """Configure the engine of this file; see harness/loop/engine.py."""
    return Servers(config, Attached(config, machine, fields))
