"""The bytes of an answer: chunks as vLLM or llama.cpp stream them, or one JSON object."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from harness.mock.ask import Ask
from harness.mock.sequence import Sequence

Flavour = Literal["vllm", "llama.cpp"]
DONE = b"data: [DONE]\n\n"
BROKEN = b'data: {"id": "broken", "choices": [{"text"\n\n'


compact = json.JSONEncoder(separators=(",", ":")).encode  # JSON without spaces, as both servers write it


def text_of(made: int) -> str:
    """Return the text of a choice's k-th token (from 1), so that a reader sees what was lost or out of order."""
    return f" {made}"


class Answer:
    """A writer of one request's answer in one server's flavour. Bytes are without HTTP's own framing."""

    def __init__(self, ask: Ask, model: str, number: int, flavour: Flavour, read_ns: int) -> None:
        self.ask = ask
        self.read_ns = read_ns  # CLOCK_MONOTONIC, when the request's last byte was read
        self.begun_ns = read_ns  # when the prompt of its first token was begun
        self.first_ns = -1  # when its first token was made
        self._llama = flavour == "llama.cpp"
        kind = "chat.completion" if ask.chat else "text_completion"
        self._id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{number}"
        self._about = {"object": kind, "created": int(time.time()), "model": model}
        about = {**self._about, "object": f"{kind}.chunk" if ask.chat else kind}
        self._head = compact({"id": self._id, **about})[:-1] + ',"choices":['
        self._text = '"delta":{"content":"' if ask.chat else '"text":"'
        self._rest = '"}' if ask.chat else '"'
        self._plain = '","logprobs":null,"finish_reason":null}]}\n\n'
        if ask.chat:
            self._plain = '"},"logprobs":null,"finish_reason":null}]}\n\n'
        self._before = [f'data: {self._head}{{"index":{i},{self._text}' for i in range(len(ask.prompts) * ask.n)]
        self._light = not (ask.stamps or ask.usages)  # a token's chunk is the same but for its text

    def chunk(self, sequence: Sequence, now_ns: int) -> bytes:
        """Return the events of a token, or of the end of an aborted sequence."""
        made, finish = sequence.made, sequence.finish
        if finish is None and self._light and made > 1:
            return f"{self._before[sequence.index]} {made}{self._plain}".encode()
        events = []
        if made == 1 and self.ask.chat:
            empty = "null" if self._llama else '""'
            role = f'"delta":{{"role":"assistant","content":{empty}}},"logprobs":null,"finish_reason":null'
            events.append(f'data: {self._head}{{"index":{sequence.index},{role}}}]}}\n\n')
        text = "" if finish == "abort" else text_of(made)
        says = compact(None if self._llama else finish)
        choice = f'{self._before[sequence.index]}{text}{self._rest},"logprobs":null,"finish_reason":{says}}}]'
        extra = f',"usage":{compact(self._usage([sequence]))}' if self.ask.usages else ""
        if self.ask.stamps:
            read = f',"read_ns":{self.read_ns}' if made == 1 else ""
            extra += f',"mock":{{"sent_ns":{now_ns}{read}}}'
        events.append(f"{choice}{extra}}}\n\n")
        return "".join(events).encode()

    def last(self, sequences: list[Sequence], now_ns: int) -> bytes:
        """Return the events that follow when all sequences have ended."""
        ask = self.ask
        if not (self._llama or ask.usage):
            return DONE
        events, about = [], json.loads(f"{self._head}]}}")
        if self._llama:  # the end is a chunk of its own: 17f5f8a, tools/server/server-task.cpp, to_json_oaicompat*
            for sequence in sequences:
                empty: dict[str, Any] = {"delta": {}} if ask.chat else {"text": "", "logprobs": None}
                end = {**about, "choices": [{"index": sequence.index, **empty, "finish_reason": sequence.finish}]}
                if not ask.chat:
                    end |= {"usage": self._usage([sequence]), "timings": self._timings([sequence], now_ns)}
                elif not ask.usage:
                    end |= {"timings": self._timings([sequence], now_ns)}
                events.append(end)
        if ask.usage and (ask.chat or not self._llama):
            timings = {"timings": self._timings(sequences, now_ns)} if self._llama else {}
            events.append({**about, "usage": self._usage(sequences), **timings})
        return b"".join(f"data: {compact(event)}\n\n".encode() for event in events) + DONE

    def whole(self, sequences: list[Sequence], now_ns: int) -> bytes:
        """Return the answer to a request that streams nothing."""
        choices = []
        for sequence in sequences:
            text = "".join(text_of(k + 1) for k in range(sequence.made))
            message = {"message": {"role": "assistant", "content": text}}
            content: dict[str, Any] = message if self.ask.chat else {"text": text}
            choices.append({"index": sequence.index, **content, "logprobs": None, "finish_reason": sequence.finish})
        body: dict[str, Any] = {"id": self._id, **self._about, "choices": choices, "usage": self._usage(sequences)}
        if self._llama:
            body["timings"] = self._timings(sequences, now_ns)
        if self.ask.stamps:
            body["mock"] = {"read_ns": self.read_ns, "sent_ns": now_ns}
        return compact(body).encode()

    def _usage(self, sequences: list[Sequence]) -> dict[str, int]:
        prompts, n = self.ask.prompts, self.ask.n
        prompt = sum(prompts[i] for i in {sequence.index // n for sequence in sequences})
        made = sum(sequence.made for sequence in sequences)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _timings(self, sequences: list[Sequence], now_ns: int) -> dict[str, float]:
        """Return llama.cpp's timings, in ms: of the prompt up to its first token, and from there to the end."""
        usage, first_ns = self._usage(sequences), self.first_ns if self.first_ns >= 0 else now_ns
        timings: dict[str, float] = {"cache_n": 0}
        for name, n, ms in (
            ("prompt", usage["prompt_tokens"], (first_ns - self.begun_ns) / 1e6),
            ("predicted", usage["completion_tokens"], (now_ns - first_ns) / 1e6),
        ):
            per = {f"{name}_per_token_ms": ms / n if n else 0.0, f"{name}_per_second": 1e3 * n / ms if ms else 0.0}
            timings |= {f"{name}_n": n, f"{name}_ms": ms, **per}
        return timings
