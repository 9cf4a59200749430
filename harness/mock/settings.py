"""Settings of the mock's answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.mock.answer import Flavour
from harness.mock.faults import Shares


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that hold for all requests."""

    flavour: Flavour = "vllm"
    queue: int | None = None  # requests of a model without a token, beyond which it answers 429
    output_tokens: int = 256  # after which a model ends by itself, unless told to ignore its end
    shares: Shares = field(default_factory=Shares)
    seed: int = 0
    log: bool = False
