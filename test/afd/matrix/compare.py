"""Decides whether an engine answered as the colocated one did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matrix.jobs import Answer

FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 2e-2
MAX_TIES = 0.01  # share of requests that may differ after a near-tie of the two best tokens


@dataclass
class Comparison:
    """`wrong` explains every request that differs, `ties` those that a near-tie excuses."""

    num_requests: int = 0
    num_positions: int = 0
    largest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert not self.wrong, "\n".join(self.wrong[:10])
        assert self.num_positions > 0, "nothing was compared"
        assert len(self.ties) <= MAX_TIES * self.num_requests, "\n".join(self.ties)


def compare(reference: Sequence[Answer], found: Sequence[Answer], tolerance: float) -> Comparison:
    """Compare tokens, and log probabilities at every position up to the first other token.

    An aborted answer is compared as far as it goes.
    """
    assert len(reference) == len(found)
    result = Comparison(num_requests=len(found))
    for index, (want, got) in enumerate(zip(reference, found, strict=True)):
        _compare_one(result, f"request {index}", want, got, tolerance)
    return result


def distances(reference: Sequence[Answer], found: Sequence[Answer]) -> list[float]:
    """Distances of two scorings of the same sequences, position by position."""
    return [
        abs(want - got)
        for a, b in zip(reference, found, strict=True)
        for want, got in zip(a.logprobs, b.logprobs, strict=True)
    ]


def mean_distance(reference: Sequence[Answer], found: Sequence[Answer]) -> float:
    """Mean distance of two scorings of the same sequences."""
    found_distances = distances(reference, found)
    return sum(found_distances) / len(found_distances)


def _compare_one(
    result: Comparison, name: str, want: Answer, got: Answer, tolerance: float
) -> None:
    if got.finish not in ("length", "abort"):
        result.wrong.append(f"{name}: finish reason {got.finish!r}")
        return
    length = len(got.ids) if got.finish == "abort" else len(want.ids)
    first = next((i for i in range(length) if got.ids[i : i + 1] != want.ids[i : i + 1]), length)
    scored = len(want.logprobs) - len(want.ids)
    if len(got.logprobs) - len(got.ids) != scored:
        result.wrong.append(f"{name}: {len(got.logprobs) - len(got.ids)} scores, not {scored}")
        return
    positions = scored + first
    for position in range(positions):
        delta = abs(want.logprobs[position] - got.logprobs[position])
        result.num_positions += 1
        result.largest = max(result.largest, delta)
        if not delta <= tolerance:  # also true for NaN
            result.wrong.append(
                f"{name}: log probability {got.logprobs[position]} instead of "
                f"{want.logprobs[position]} at position {position} of {positions}"
            )
            return
    if first == length:
        return
    text = (
        f"{name}: token {first} of {length} is {got.ids[first : first + 1]}, not {want.ids[first]}"
    )
    if first < len(got.ids) and want.gaps[first] <= tolerance:
        result.ties.append(f"{text}, after a gap of {want.gaps[first]:.1e}")
    else:
        result.wrong.append(text)
