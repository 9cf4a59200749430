"""The body of a completion request, checked as OpenAI's and vLLM's servers check it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BYTES_A_TOKEN = 4  # of text: there is no tokenizer, and about four bytes of English are one token
MOST_CHOICES = 128
DEFAULT_MAX_TOKENS = 16  # of a completion that names none (OpenAI's reference, and vLLM)


KINDS = {429: "rate_limit_error", 500: "server_error"}  # by status; any other's is invalid_request_error


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """Return the answer's JSON."""
        about = {
            "message": str(self),
            "type": KINDS.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": about}).encode()


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text_or_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value))


Check = tuple[Callable[[Any], bool], str]
BOOLEAN: Check = (lambda x: isinstance(x, bool), "a boolean")
NUMBER: Check = (_number, "a number")
INTEGER: Check = (_integer, "an integer")
POSITIVE: Check = (lambda x: _integer(x) and x >= 1, "a positive integer")
OBJECT: Check = (lambda x: isinstance(x, dict), "an object")
# Fields whose types are checked wherever they stand; others are ignored, as by vLLM. null is as if absent.
FIELDS: dict[str, Check] = {
    "model": (lambda x: isinstance(x, str), "a string"),
    "max_tokens": POSITIVE,
    "max_completion_tokens": POSITIVE,
    "min_tokens": (lambda x: _integer(x) and x >= 0, "an integer of at least 0"),
    "n": (lambda x: _integer(x) and 1 <= x <= MOST_CHOICES, f"an integer from 1 to {MOST_CHOICES}"),
    "stream": BOOLEAN,
    "stream_options": OBJECT,
    "ignore_eos": BOOLEAN,
    "mock_stamps": BOOLEAN,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "seed": INTEGER,
    "stop": (_text_or_texts, "a string or a list of strings"),
    "user": (lambda x: isinstance(x, str), "a string"),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A completion request."""

    chat: bool
    model: str | None
    prompts: tuple[int, ...]  # tokens of each prompt
    n: int  # choices of each
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stream: bool
    usage: bool  # streamed: a last chunk of it
    usages: bool  # streamed: in every chunk
    stamps: bool  # the mock's own: when chunks were sent


def read(body: bytes, *, chat: bool) -> Ask:
    """Parse a body as a request. ApiError if it is none."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body is not a JSON object")
    for name, (fits, what) in FIELDS.items():
        value = data.get(name)
        if value is not None and not fits(value):
            raise ApiError(400, f"{name} must be {what}", name)
    stream, options = bool(data.get("stream")), data.get("stream_options")
    if options is not None and not stream:
        raise ApiError(400, "stream_options needs stream to be true", "stream_options")
    options = options or {}
    for name in ("include_usage", "continuous_usage_stats"):
        if not isinstance(options.get(name), bool | None):
            raise ApiError(400, f"stream_options.{name} must be a boolean", "stream_options")
    prompts = (_chat_tokens(data.get("messages")),) if chat else _prompts(data.get("prompt"))
    n = data.get("n") or 1
    if len(prompts) * n > MOST_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts of {n} choices each are more than {MOST_CHOICES}", "n")
    most = data.get("max_completion_tokens") if chat else None
    most = most if most is not None else data.get("max_tokens")
    return Ask(
        chat,
        data.get("model"),
        prompts,
        n,
        most if chat or most is not None else DEFAULT_MAX_TOKENS,
        data.get("min_tokens") or 0,
        bool(data.get("ignore_eos")),
        stream,
        bool(options.get("include_usage")),
        bool(options.get("include_usage")) and bool(options.get("continuous_usage_stats")),
        bool(data.get("mock_stamps")),
    )


def text_tokens(text: str) -> int:
    """Count the tokens of a text: one for each four bytes or part of them, at least one."""
    return max(1, -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_A_TOKEN))


def _prompts(prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return (text_tokens(prompt),)
    if isinstance(prompt, list) and prompt:
        if all(type(x) is int for x in prompt):
            if min(prompt) < 0:
                raise ApiError(400, "prompt has a negative token id", "prompt")
            return (len(prompt),)
        if all(isinstance(x, str) or (isinstance(x, list) and x) for x in prompt):
            return tuple(tokens for x in prompt for tokens in _prompts(x))
    raise ApiError(400, "prompt must be a string, a list of token ids, or a list of such prompts", "prompt")


def _chat_tokens(messages: Any) -> int:
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", "messages")
    return sum(text_tokens(_content(message)) for message in messages)


def _content(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, "a message must be an object with a role", "messages")
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in parts):
            return "".join(parts)
    raise ApiError(400, "a message's content must be a string or a list of text parts", "messages")
