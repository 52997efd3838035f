"""What a test asks of an engine and what it gets back; plain data that travels over a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EngineSpec:
    """One engine: arguments of `sglang.Engine`, its log, and faults to put in before it starts.

    `faults` are names of functions in `matrix.faults`.
    """

    model: Path
    log: Path
    arguments: dict[str, Any]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """`python ARGV...` in `folder`, with `env` on top of the zygote's environment.

    `argv` starts with "-m", MODULE or with a script; `faults` as for `EngineSpec`.
    """

    argv: tuple[str, ...]
    log: Path
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        ids: prompt tokens.
        new_tokens: generated greedily; 0 scores the prompt.
        score: return the log probability of every prompt token, too.
        delay_s: after the start of its job.
        rank: attention rank that takes it, modulo their number; None leaves the choice to the
            engine.
        abort_after: abort once so many tokens are there.
    """

    ids: tuple[int, ...]
    new_tokens: int
    score: bool = False
    delay_s: float = 0.0
    rank: int | None = None
    abort_after: int | None = None


@dataclass(frozen=True)
class Job:
    """Requests that run together, at most `concurrency` at a time."""

    requests: tuple[Request, ...]
    concurrency: int = 64
    timeout_s: float = 120.0


@dataclass
class Answer:
    """What came back. `logprobs` covers scored prompt tokens (but the first), then new tokens.

    `gaps` holds, per new token, how far the second best token was behind the best.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finish: str = "lost"
