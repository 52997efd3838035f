"""Pure functions from token counts to a StepPlan, and from a StepPlan to the order of transfers.

Both sides call these, so that nobody infers a step from what arrives. No sockets, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang.srt.disaggregation.afd.errors import CapacityExceeded
from sglang.srt.disaggregation.afd.messages import Mode, StepPlan


def make_plan(
    step_id: int,
    mode: Mode,
    tokens_per_rank: Sequence[int],
    capacity: int,
    microbatches: int,
    bucket: int,
) -> StepPlan:
    """The plan of one step.

    In an eager step, `rounds` is what the fullest attention rank needs to move ALL its tokens,
    and is the same for both microbatches: where a rank splits its tokens is known to that rank
    alone, and one microbatch may hold all of them. Rounds that turn out unneeded carry no rows.
    A graph step has one round, because its bucket bounds each microbatch already.

    Args:
        tokens_per_rank: tokens of each attention rank, all microbatches together.
        capacity: most tokens of one attention rank in one dispatch.
        microbatches: 1 or 2.
        bucket: padded tokens per rank and microbatch of the graph to replay; 0 for eager.
    Raises:
        CapacityExceeded: the bucket exceeds the capacity, or a rank's tokens exceed the bucket.
        ValueError: a number is out of its range.
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}, must be at least 1")
    plan = StepPlan(
        step_id=step_id,
        mode=mode,
        microbatches=microbatches,
        bucket=bucket,
        tokens=tuple(tokens_per_rank),
        rounds=1 if bucket else max(1, -(-max(tokens_per_rank, default=0) // capacity)),
    )
    if bucket > capacity:
        raise CapacityExceeded(
            f"step {step_id}: graph bucket {bucket} exceeds the capacity of {capacity} tokens per "
            "rank and microbatch; raise --afd-max-tokens-per-rank or capture smaller batches"
        )
    most = max(plan.tokens)
    if bucket and most > bucket * microbatches:
        raise CapacityExceeded(
            f"step {step_id}: attn {plan.tokens.index(most)} has {most} tokens, its graph has room "
            f"for {microbatches} x {bucket}; run this step without a graph"
        )
    return plan


def round_slices(num_tokens: int, capacity: int, rounds: int) -> list[slice]:
    """Rows of each round of one rank and microbatch, in order; later slices may be empty.

    Raises:
        CapacityExceeded: the tokens do not fit into the rounds.
    """
    if num_tokens > capacity * rounds:
        raise CapacityExceeded(
            f"{num_tokens} tokens do not fit into {rounds} round(s) of {capacity}: "
            "the plan announced too few rounds for this rank"
        )
    ends = [min(i * capacity, num_tokens) for i in range(rounds + 1)]
    return [slice(ends[i], ends[i + 1]) for i in range(rounds)]


def transfers(plan: StepPlan, moe_layers: int) -> Iterator[tuple[int, int, int]]:
    """(layer, microbatch, round) of every transfer of a step, in the order of the FFN ranks."""
    for layer in range(moe_layers):
        for microbatch in range(plan.microbatches):
            for round_idx in range(plan.rounds):
                yield layer, microbatch, round_idx


def max_rows(plan: StepPlan, capacity: int, round_idx: int) -> tuple[int, ...]:
    """Most tokens of each attention rank in one transfer of this round, for either microbatch.

    In an eager step with two microbatches it is what the rank has in all: see `make_plan`.
    """
    if plan.bucket:
        return (plan.bucket,) * len(plan.tokens)
    return tuple(min(capacity, max(0, tokens - round_idx * capacity)) for tokens in plan.tokens)
