"""The definitions of SLO attainment. Each is a function with a name, a formula (its docstring) and inputs.

A definition scores every offered request in [0, 1] against that request's limits. Attainment is the mean of the scores.
In it each request has equal weight or, if the definition pools tokens, each token. Under every definition, a request
that did not end `done` scores 0.

The command line imports this module for the names alone. So numpy is imported only when a definition is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from harness.rows.requests import Bools, Floats, Limits, Rows, Slo

    Rule = Callable[[Rows, Limits], Floats | Bools]
R = TypeVar("R", bound="Rule")
# The part of a request's time that explains its miss (causes.py): the parts, before and after the first token, whose
# limits it missed; its TTFT; the time after it; its longest gap between two tokens; its whole life; or the time to its
# first late token.
Part = Literal["limits", "ttft", "decode", "longest gap", "whole", "first late token"]


class Definition(NamedTuple):
    """A definition of attainment."""

    name: str
    rule: Rule
    judges: tuple[str, ...]  # the parts of the SLO that it reads; empty: it compares requests with a limit of its own
    beside: tuple[str, ...]  # definitions that a table shows beside it
    by_token: bool  # needs the time of each token
    part: Part  # explains a miss by this part of a request's time
    pooled: bool  # weighs each request by the tokens that it asked for

    @property
    def formula(self) -> str:
        """The formula: the docstring of the definition's function."""
        return cleandoc(self.rule.__doc__ or "")

    def score(self, rows: Rows, slo: Slo) -> Floats | None:
        """Score each request; None if the definition needs token times and the run has none."""
        from harness.rows.requests import limits

        if self.by_token and rows.tokens is None:
            return None
        return self.rule(rows, limits(rows, slo)).astype(float)

    def weights(self, rows: Rows) -> Floats:
        """Return the weight of each request in the mean."""
        import numpy as np

        return rows.output_tokens.astype(float) if self.pooled else np.ones(len(rows))


DEFINITIONS: dict[str, Definition] = {}  # keeps the order of this file


def definition(
    judges: str, *, part: Part, beside: str = "", by_token: bool = False, pooled: bool = False
) -> Callable[[R], R]:
    """Register a function as a definition, under its own name. The arguments are fields of `Definition`."""

    def enter(rule: R) -> R:
        name = rule.__name__
        DEFINITIONS[name] = Definition(name, rule, tuple(judges.split()), tuple(beside.split()), by_token, part, pooled)
        return rule

    return enter


@definition("ttft tpot", part="limits", beside="ttft tpot")
def both(rows: Rows, slo: Limits) -> Bools:
    """1 where the TTFT and the TPOT limit are both met."""
    return ttft(rows, slo) & tpot(rows, slo)


@definition("ttft", part="ttft")
def ttft(rows: Rows, slo: Limits) -> Bools:
    """1 where done and first token - arrival <= TTFT."""
    return rows.done & (rows.ttft_s <= slo.ttft_s)


@definition("tpot", part="decode")
def tpot(rows: Rows, slo: Limits) -> Bools:
    """1 where done and TPOT <= limit; an undefined TPOT (one token) is met."""
    from harness.rows.requests import tpot_s

    return rows.done & ~(tpot_s(rows) > slo.tpot_s)


@definition("ttft tpot", part="whole")
def e2e(rows: Rows, slo: Limits) -> Bools:
    """1 where done and last token - arrival <= TTFT + (n - 1) x TPOT, the deadline of the last token asked for."""
    from harness.rows.requests import deadline_s

    return rows.done & (rows.e2e_s <= deadline_s(slo, rows.output_tokens - 1))


@definition("ttft tpot", part="first late token", beside="token_mean qos both", by_token=True, pooled=True)
def token(rows: Rows, slo: Limits) -> Floats:
    """Share of all tokens in time; token k = 1..n of a request is in time if t_k <= arrival + TTFT + (k - 1) x TPOT.

    The share counts all tokens asked for, over all requests. The tokens of a request that is not done are late. This is
    the definition in Aegaeon's text.
    """
    return token_mean(rows, slo)


@definition("ttft tpot", part="first late token", beside="token qos both", by_token=True)
def token_mean(rows: Rows, slo: Limits) -> Floats:
    """Share of a request's own tokens that are in time, as `token` defines it; 0 unless done.

    The mean is over requests, as it is for `qos` in Aegaeon's artifact: a short request counts as much as a long one.
    """
    import numpy as np

    from harness.rows.requests import late

    owner, counts = rows.stamps.owner, rows.stamps.counts
    missed = np.bincount(owner, late(rows, slo), len(rows))
    return np.where(rows.done & (counts > 0), 1.0 - missed / np.maximum(counts, 1), 0.0)


@definition("ttft tpot", part="first late token", beside="token token_mean both", by_token=True)
def qos(rows: Rows, slo: Limits) -> Floats:
    """Time-fraction QoS as Aegaeon's artifact scores it; 0 unless done.

    Segments start at the arrival and at each late token. In a segment from s, token k = 0, 1, ... is late if
    t_k - s > TTFT + k x TPOT. A segment cut by late token k counts TTFT + (k - 1) x TPOT if it had a token on time,
    else 0; the last one counts min(TTFT + n x TPOT, t_last - s). The score is the sum over t_last.
    After a late token the allowance is not reset: the rule is lenient there, as released.
    """
    import numpy as np

    from harness.rows.requests import late, time_fraction

    stamps = rows.stamps
    scores = (rows.done & (stamps.counts > 0)).astype(float)  # holds for a single segment
    for i in np.unique(np.searchsorted(stamps.at, np.flatnonzero(late(rows, slo)), "right") - 1):
        if scores[i]:
            seconds = stamps.ns[stamps.at[i] : stamps.at[i + 1]] / 1e9
            scores[i] = time_fraction(seconds, float(slo.ttft_s[i]), float(slo.tpot_s[i]))
    return scores


@definition("tpot", part="longest gap", beside="ttft tpot", by_token=True)
def itl(rows: Rows, slo: Limits) -> Floats:
    """Share of a request's gaps between tokens that are <= TPOT; 1 for a single token without gaps, 0 unless done.

    Attainment of 99 % means that the P99 of the time between tokens (ITL, or TBT) meets the limit, where each request
    has equal weight.
    """
    import numpy as np

    of, gaps_s = rows.stamps.gaps()
    long = np.bincount(of, gaps_s > slo.tpot_s[of], len(rows))
    counts = rows.stamps.counts
    return np.where(rows.done & (counts > 0), 1.0 - long / np.maximum(counts - 1, 1), 0.0)
