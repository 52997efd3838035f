"""Log probabilities of given tokens, from a server's /generate, at prefill and at decode steps.

A batch travels in one request, which upstream hands to its scheduler in one piece, and all its
sequences decode equally many tokens. So the batches that run are the batches that were sent.
"""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import requests

ANSWER_TIMEOUT_S = 240  # the first batch compiles kernels
_PROMPT_LENGTHS = (4, 40)


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """`prompt` is prefilled, `forced` is decoded."""

    prompt: tuple[int, ...]
    forced: tuple[int, ...]


@dataclass
class Scores:
    """Log probabilities by sequence: of all prompt tokens but the first, and of forced tokens."""

    prefill: list[list[float]] = field(default_factory=list)
    decode: list[list[float]] = field(default_factory=list)

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.prefill)) + sum(map(len, self.decode))


@dataclass(frozen=True)
class Distance:
    """Absolute differences of two scorings; infinite where one of them is not a number."""

    largest: float
    mean: float
    largest_prefill: float
    largest_decode: float
    positions: int


def sequences(num: int, forced: int, vocab: int, seed: int = 0) -> list[Sequence]:
    """Random ones, the same for every server. Token 0 is the slot of `gate_forced`, 1 ends a text."""
    rng = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, vocab) for _ in range(length))

    return [
        Sequence(prompt=tokens(rng.randint(*_PROMPT_LENGTHS)), forced=tokens(forced))
        for _ in range(num)
    ]


def score(
    url: str,
    asked: list[Sequence],
    width: int,
    rids: list[str] | None = None,
    aborts: bool = False,
) -> Scores:
    """Score all sequences in batches of `width`; the last batch may be smaller.

    Args:
        rids: names of the requests, so that somebody can abort them.
        aborts: an answer may hold fewer tokens than were asked for.
    Raises:
        requests.RequestException, KeyError: the server did not answer as it should.
    """
    from gate_forced import SLOT, Forced, logprob

    processor = json.dumps({"callable": pickle.dumps(Forced).hex()})
    scores = Scores()
    for start in range(0, len(asked), width):
        batch = asked[start : start + width]
        body: dict[str, Any] = {
            "input_ids": [list(each.prompt) for each in batch],
            "sampling_params": [
                {
                    "temperature": 0,
                    "max_new_tokens": len(each.forced),
                    "ignore_eos": True,
                    "custom_params": {"forced": list(each.forced)},
                }
                for each in batch
            ],
            "return_logprob": True,
            "logprob_start_len": 0,
            "token_ids_logprob": [SLOT],
            "custom_logit_processor": processor,
        }
        if rids is not None:
            body["rid"] = rids[start : start + width]
        answer = requests.post(f"{url}/generate", json=body, timeout=ANSWER_TIMEOUT_S)
        answer.raise_for_status()
        for each, got in zip(batch, answer.json(), strict=True):
            info: dict[str, Any] = got["meta_info"]
            given = tuple(got.get("output_ids") or ())
            if aborts and info["finish_reason"]["type"] == "abort":
                assert given == each.forced[: len(given)], "the server did not take the tokens"
            else:
                assert given == each.forced, "the server did not take the tokens"
            scored = info.get("input_token_logprobs") or []
            scores.prefill.append([entry[0] for entry in scored[1:]])
            slots = [entries[0][0] for entries in info.get("output_token_ids_logprobs") or []]
            scores.decode.append([logprob(slot) for slot in slots])
    return scores


def distance(a: Scores, b: Scores) -> Distance:
    """How far two scorings of the same sequences are apart."""
    prefill = _differences(a.prefill, b.prefill)
    decode = _differences(a.decode, b.decode)
    both = prefill + decode
    return Distance(
        largest=max(both),
        mean=sum(both) / len(both),
        largest_prefill=max(prefill),
        largest_decode=max(decode),
        positions=len(both),
    )


def _differences(a: list[list[float]], b: list[list[float]]) -> list[float]:
    found = [
        abs(x - y)
        for ours, theirs in zip(a, b, strict=True)
        for x, y in zip(ours, theirs, strict=True)
    ]
    return [each if each == each else float("inf") for each in found]
