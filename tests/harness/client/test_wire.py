"""Responses to chunks: every way in which bytes may be cut gives the same chunks, and what is not a token is none."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from harness.client.wire import Response
from tests.cases import cases
from tests.harness.client.scripted import DONE, HEAD, chunked, error, event, tokens, usage_only

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
DELTA = 'data: {"choices":[{"delta":{"content":"é"}}]}\r\n\r\n'.encode()
STREAM = b"".join(chunked(ROLE, b": a comment\n\n", event("a"), event(""), DELTA, event("b"), usage_only(3), DONE))


def fed(pieces: list[bytes], counts: bool = False) -> tuple[Response, list[int]]:
    response = Response(counts)
    return response, [made for piece in pieces for made in response.feed(piece)]


def reads_whole(pieces: list[bytes]) -> bool:
    """Return whether pieces of the stream make all of its answer."""
    response, made = fed(pieces)
    status = (response.status, response.error, response.ended, response.complete, response.reusable)
    return made == [1, 1, 1] and status == (200, "", True, True, True) and response.usage_tokens == 3


def test_a_cut_anywhere_changes_nothing() -> None:
    assert [at for at in range(len(STREAM) + 1) if not reads_whole([STREAM[:at], STREAM[at:]])] == []


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
@example(list(range(len(STREAM))))  # byte by byte
def test_any_cuts_change_nothing(cuts: list[int]) -> None:
    assert reads_whole([STREAM[a:b] for a, b in pairwise([0, *sorted(cuts), len(STREAM)])])


def test_chunks_of_one_read_come_together() -> None:
    response = Response(False)
    head, *parts, end = chunked(event("a"), event("b"), DONE)
    assert response.feed(head) == []
    assert response.feed(parts[0] + parts[1]) == [1, 1]
    assert response.feed(parts[2] + end) == []
    assert response.complete


def test_a_connection_carries_one_response_after_another() -> None:
    response = Response(False)
    for n in (1, 3):
        response.begin()
        assert response.feed(b"".join(tokens(n))) == [1] * n
        assert response.reusable


def test_a_count_so_far_says_what_a_chunk_holds() -> None:
    # An empty text is a token whose bytes are no character yet; two tokens may come at once.
    parts = chunked(event("", 1), event("a", 2), event("bc", 4), event("", 4), usage_only(4), DONE)
    assert fed(parts, counts=True)[1] == [1, 1, 2]
    assert fed(parts, counts=False)[1] == [1, 1]


def test_a_count_so_far_may_stand_in_timings() -> None:
    parts = chunked(event("a", timings={"predicted_n": 1}), event("b", timings={"predicted_n": 3}), DONE)
    assert fed(parts, counts=True)[1] == [1, 2]


def test_a_server_that_does_not_count_gives_a_token_a_chunk() -> None:
    assert fed(chunked(event("a"), event(""), event("b"), DONE), counts=True)[1] == [1, 1]


def test_the_last_chunk_of_llama_cpp_is_no_token() -> None:
    # Its three tokens came in two chunks with text, for one held its bytes back; the last has usage and no text.
    response, made = fed(chunked(event("a"), event("é"), event("", 3, timings={"predicted_n": 3}), DONE))
    assert (made, response.usage_tokens, response.error) == ([1, 1], 3, "")


def test_a_body_without_a_length_ends_at_done() -> None:
    response, made = fed([b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", event("a"), DONE])
    assert (made, response.ended, response.error, response.reusable) == ([1], True, "", False)


@cases(
    ("pieces", "says"),
    [
        (error(429, '{"error": "slow\ndown"}'), 'HTTP 429: {"error": "slow down"}'),
        (error(500, ""), "HTTP 500"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP"),
        (chunked(b"data: {not json\n\n"), "malformed chunk: {not json"),
        (chunked(b"data: 7\n\n"), "malformed chunk: 7"),
        (chunked(b'data: {"choices": [3]}\n\n'), "malformed chunk"),
        (chunked(b'data: {"choices":[{"text":"a"}],"usage":{"completion_tokens":"x"}}\n\n'), 'counts "x" tokens'),
        (chunked(event("a", 2**31)), "counts 2147483648 tokens, 1073741824 were asked for"),
        (chunked(event("a", -1)), "counts -1 tokens"),
        (chunked(event("a"), usage_only(3), usage_only(2)), "counts 2 tokens after 3"),
        (chunked(b'data: {"choices":[],"usage":{"completion_tokens":true}}\n\n'), "counts true tokens"),
        (chunked(b'data: {"choices":[],"usage":{"completion_tokens":1.5}}\n\n'), "counts 1.5 tokens"),
        (chunked(b"data: " + b"[" * 90_000 + b"\n\n"), "malformed chunk"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", *[b"data: " + b"x" * 400_000] * 3], "an event of more than 1 MiB"),
        (chunked(b'data: {"error": {"message": "out of memory"}}\n\n', DONE), "the server said"),
        (chunked(event("a")), "the stream ended without [DONE]"),
        ([b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"choices": []}'], "the stream ended without [DONE]"),
        ([HEAD, b"zz\r\n"], "not HTTP"),
    ],
)
def test_what_is_not_an_answer_fails_with_its_reason(pieces: list[bytes], says: str) -> None:
    response, _ = fed(pieces)
    assert says in response.error
    assert "\n" not in response.error
    assert not response.ended


def test_more_tokens_than_were_asked_for_fail() -> None:
    response = Response(True)
    response.begin(3)
    assert [made for piece in chunked(event("a", 2), event("b", 4)) for made in response.feed(piece)] == [2]
    assert response.error == "the server counts 4 tokens, 3 were asked for"


def test_an_error_keeps_its_connection_and_an_excerpt_escaped_and_cut() -> None:
    response, made = fed(error(503, "\x1b[31m\u202e" + "x" * 10_000))
    assert (made, response.status, response.reusable) == ([], 503, True)
    assert response.error.startswith("HTTP 503: \\x1b[31m\\u202exxx")
    assert response.error.isprintable()
    assert len(response.error) < 300


def test_tokens_before_an_error_stay() -> None:
    response, made = fed(chunked(event("a"), b"data: {\n\n", event("b"), DONE))
    assert (made, response.made, response.broken) == ([1], 1, True)


def test_a_stream_without_an_end_is_cut_at_what_was_asked_for() -> None:
    response = Response(False)
    response.begin(5)
    made = sum(
        len(response.feed(piece)) for piece in [HEAD, *(b"%x\r\n%b\r\n" % (len(x), x) for x in [event("a")] * 100)]
    )
    assert response.error == "more than the 5 tokens that were asked for: the server does not end"
    assert (response.broken, made) == (True, 14)
