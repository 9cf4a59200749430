"""Requests on their way to servers: their states as the client reports them, and the server of each."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.client.body import Server
from harness.client.client import Client, Told
from harness.engines import stamps
from harness.engines.machine import Config
from harness.engines.servers.fleet import Fleet, Kind, Up
from harness.engines.wallclock import Live, WallClock
from harness.policy.events import Arrived, Finished, Prefilled
from harness.policy.types import Batch, Host, Inst, Request

IGNORED = "the server ignores ignore_eos"  # every request sets it


class Requests(WallClock):
    """The part of an engine of servers that sends requests to servers, and follows them by the client's reports."""

    def __init__(self, config: Config, kind: Kind) -> None:
        super().__init__(config)
        self.kind, self.fleet = kind, Fleet(kind)
        self.client: Client | None = None
        self.lanes: set[Batch] = set()
        self.routed: dict[str, Server | None] = {}  # the routes that the client was told
        self.unsure = 0  # routes that the client was told and has not confirmed
        self.sent: dict[int, Up] = {}  # requests under way, by their server
        self.cancelled: set[int] = set()  # requests given up whose end the client has still to tell
        self.errors: dict[int, str] = {}  # why requests failed, beyond what the client knows
        self._sent_s: NDArray[np.float64] = np.zeros(0)  # when each request was given to its server
        self._zero_ns = 0  # the client's clock at 0 s
        self._expected = 0  # requests that the client has still to announce

    def _take(self, told: Told) -> None:
        kind, rid, at_ns, tokens = told
        at_s = (at_ns - self._zero_ns) / 1e9
        if at_s > self._end_s:
            return
        match kind:
            case "arrived":
                self._come(rid, at_s, bool(tokens))
            case "routed":
                self.unsure -= 1
            case "first":
                self._first(self.live[rid], tokens, at_s)
            case "done" | "failed" | "dropped":
                self._ended(self.live[rid], kind, at_s, tokens)

    def _come(self, r: int, due_s: float, sent: bool) -> None:
        """Handle the arrival of a request; `sent` tells whether the client sent the request by its model's route."""
        jobs = self.jobs
        if jobs.after is None:
            due_s = jobs.arrival_s.item(r)  # not rounded
        model, prompt = jobs.models[jobs.model.item(r)], jobs.prompt_tokens.item(r)
        self._expected -= 1
        self._due_s[r] = self._R["arrival"][r] = due_s
        request = self.live[r] = Live(r, model, prompt, jobs.output_tokens.item(r), due_s)
        if (batch := self.routes.get(model)) is not None:
            self._R["admit"][r], request.batch = due_s, batch
            self.batches.setdefault(batch, {})[r] = request
            if sent:
                self._sending(request, due_s)
            else:
                self._offer(request)
        slos = jobs.ttft_slo_s.item(r), jobs.tpot_slo_s.item(r)
        self.tell([Arrived(Request(r, model, due_s, prompt, *slos))])

    def _first(self, request: Live, tokens: int, at_s: float) -> None:
        assert request.batch is not None
        self._R["first"][request.rid] = at_s
        request.made, request.kv_tokens = tokens, request.prompt_tokens + tokens
        if tokens < request.output_tokens:
            self.tell([Prefilled(request.rid, request.batch)])

    def _ended(self, request: Live, how: Literal["done", "failed", "dropped"], at_s: float, tokens: int) -> None:
        r, up = request.rid, self.sent.pop(request.rid, None)
        self.cancelled.discard(r)
        if how == "done" and tokens != request.output_tokens:
            why = f": {IGNORED}" if tokens < request.output_tokens else ""
            how, self.errors[r] = "failed", f"ended after {tokens} of {request.output_tokens} tokens{why}"
        elif how == "dropped" and r in self.errors:  # given up here, for want of a server
            how = "failed"
        if up is None:
            self._pass(request, at_s)
        else:
            up.flying.discard(r)
        self._R["done"][r], self._ends[r] = at_s, stamps.NAMES.index(how)
        self._leave(request)
        del self.live[r]
        self.tell([Finished(r, request.batch, how)])

    def _at(self, batch: Batch) -> Server | None:
        """Return the server to which requests of a batch may be sent now; None if there is none."""
        up = self.fleet.up.get(batch.inst)
        return up.seat.at if up is not None and up.seat and up.state == "ready" and batch in self.lanes else None

    def _offer(self, request: Live) -> None:
        """Send a member of a batch to its server if the server is ready and the lane is open.

        If the server ended by itself, the request fails.
        """
        assert request.batch is not None
        assert self.client is not None
        self._pass(request, self.now_s)
        if (to := self._at(request.batch)) is not None:
            self.client.send(request.rid, to)
            self._sending(request, self.now_s)
        elif (why := self.fleet.dead.get(request.batch.inst)) is not None and request.rid not in self.cancelled:
            self.errors[request.rid] = why
            self._cancel(request.rid)

    def _sending(self, request: Live, at_s: float) -> None:
        """Record that a request was sent to its server at `at_s`."""
        assert request.batch is not None
        inst = request.batch.inst
        assert not isinstance(inst.place, Host)
        self._pass(request, at_s)
        last = self._places.setdefault(inst.place, len(self._places))
        self._R["first_inst"][request.rid] = self._R["last_inst"][request.rid] = last
        self._sent_s[request.rid] = at_s
        if (up := self.fleet.up.get(inst)) is None:  # it ended by itself a moment ago, and the client does not know yet
            up = Up(inst, state="dead")
            self.errors[request.rid] = self.fleet.dead.get(inst, "its server has ended")
        self.sent[request.rid] = up
        up.flying.add(request.rid)

    def _cancel(self, rid: int) -> None:
        assert self.client is not None
        self.client.cancel(rid)
        self.cancelled.add(rid)

    def _flow(self, inst: Inst) -> None:
        """Send an instance's waiting requests if its server is ready, and update the client's routes to the server.

        It is called after a change of the server or of its lanes.
        """
        for batch in [batch for batch in self.batches if batch.inst == inst]:
            for request in list(self.members(batch)):
                if request.rid not in self.sent:
                    self._offer(request)
        for model, batch in self.routes.items():
            if batch.inst == inst:
                self._route(model)

    def _route(self, model: str) -> None:
        """Set the client's route of a model to the server that takes its requests now, if that server has changed."""
        to = self._at(self.routes[model])
        if self.client is not None and to != self.routed.get(model):
            self.client.route(model, to)
            self.routed[model] = to
            self.unsure += self.begun

    def _pass(self, request: Live, at_s: float) -> None:
        """Charge a request's time up to `at_s` to its present cause, then set the cause of its later time."""
        self._R[request.cause][request.rid] += max(0.0, at_s - request.since_s)
        request.since_s, request.cause = at_s, "admission" if request.batch is None else self.waits_for(request)

    def waits_for(self, request: Live) -> str:
        """Return the cause for which a request waits: "queue" if its server is ready, else "load"; see WallClock."""
        assert request.batch is not None
        up = self.fleet.up.get(request.batch.inst)
        return "queue" if up is not None and up.state == "ready" else "load"

    def charge(self) -> None:
        """Do nothing: `_pass` charges the waits of each request; see WallClock."""

    def release(self, request: Live) -> None:
        """Do nothing, because the servers manage the KV themselves; see WallClock."""

    def kv_bytes(self, request: Live) -> int:
        """Return a request's KV bytes at its server, for the tokens that the client has seen; see WallClock."""
        return request.kv_tokens * self.cluster.models[request.model].kv_token_bytes
