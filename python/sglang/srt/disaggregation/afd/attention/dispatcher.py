"""One MoE layer's way to the FFN ranks, in the shape that upstream's models call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang.srt.disaggregation.afd.attention import overlap, runtime
from sglang.srt.disaggregation.afd.connector.base import DispatchHandle, Transfer
from sglang.srt.disaggregation.afd.errors import AFDConfigError, PlanMismatch
from sglang.srt.disaggregation.afd.messages import StepPlan
from sglang.srt.disaggregation.afd.plan import max_rows, round_slices
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, DispatchOutputFormat
from sglang.srt.layers.moe.topk import StandardTopKOutput


class InFlight(NamedTuple):
    """A dispatch between `dispatch_a` and `combine_b`; stands as upstream's dispatch output.

    With several rounds only the first is on its way; the others follow as each one combines,
    because a connector has one buffer per microbatch.
    """

    hidden_states: torch.Tensor  # [T, H]
    topk_ids: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor  # [T, K]
    plan: StepPlan
    slices: tuple[slice, ...]
    first: DispatchHandle

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.DEEPEP_LL


class RemoteDispatcher(BaseDispatcher):
    """Sends the tokens of one layer out and brings the expert outputs back.

    `dispatch` and `combine` serve one microbatch; the `_a`/`_b` halves are upstream's two-batch
    overlap, which names the microbatch by `tbo_subbatch_index`.
    """

    def __init__(self, moe_runner_config: Any) -> None:
        super().__init__()
        self._runtime = runtime.current()
        self.config = moe_runner_config
        self._weight_on_input = bool(moe_runner_config.apply_router_weight_on_input)
        if self._weight_on_input and moe_runner_config.top_k not in (None, 1):
            raise AFDConfigError(
                f"MoE layer {moe_runner_config.layer_id} weighs its input once for each of its "
                f"{moe_runner_config.top_k} experts, and AFD sends a token once; serve this model "
                "without --disaggregation-mode afd"
            )
        self.layer = -1  # index among the MoE layers, set once all layers are known
        self._in_flight: list[InFlight | None] = [None, None]
        self._runtime.add_layer(self)

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> InFlight:
        microbatch = overlap.microbatch()
        self.dispatch_a(hidden_states, topk_output, microbatch)
        return self.dispatch_b(microbatch)

    def dispatch_a(
        self,
        hidden_states: torch.Tensor,
        topk_output: Any,
        tbo_subbatch_index: int | None = None,
    ) -> None:
        microbatch = tbo_subbatch_index or 0
        if self._in_flight[microbatch] is not None:
            raise PlanMismatch(
                f"MoE layer {self.layer}, microbatch {microbatch}: dispatched twice without combine"
            )
        plan = self._runtime.plan
        slices = tuple(round_slices(len(hidden_states), self._runtime.capacity, plan.rounds))
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        if self._weight_on_input:
            # Done here, because not every connector brings the weights to the FFN ranks.
            assert weights.shape[1] == 1, "one expert per token"
            hidden_states = (hidden_states.float() * weights).to(hidden_states.dtype)
            weights = torch.ones_like(weights)
        if len(ids) < len(hidden_states):
            # Upstream routes nothing for an idle microbatch but may still pad its hidden states.
            missing = len(hidden_states) - len(ids)
            ids = torch.nn.functional.pad(ids, (0, 0, 0, missing), value=-1)
            weights = torch.nn.functional.pad(weights, (0, 0, 0, missing))
        if self.layer == 0:
            self._runtime.count_tokens(ids)
        self._in_flight[microbatch] = InFlight(
            hidden_states,
            ids,
            weights,
            plan,
            slices,
            self._runtime.connector.dispatch(
                Transfer(plan.step_id, self.layer, microbatch, 0),
                hidden_states[slices[0]],
                ids[slices[0]],
                weights[slices[0]],
                max_rows(plan, self._runtime.capacity, 0),
            ),
        )

    def send_nothing(self, microbatch: int) -> None:
        """The layer's transfer for a microbatch in which this rank has no tokens."""
        spec, device = self._runtime.spec, self._runtime.device
        self.dispatch_a(
            torch.zeros((0, spec.hidden_size), dtype=spec.dtype, device=device),
            StandardTopKOutput(
                topk_weights=torch.zeros((0, spec.topk), device=device),
                topk_ids=torch.zeros((0, spec.topk), dtype=torch.int32, device=device),
                router_logits=torch.zeros((0, 0), device=device),
            ),
            microbatch,
        )
        # The other microbatch may still have rounds to send, which come before this answer.
        overlap.give_way()
        self.combine_b(microbatch)

    def dispatch_b(self, tbo_subbatch_index: int | None = None) -> InFlight:
        in_flight = self._in_flight[tbo_subbatch_index or 0]
        assert in_flight is not None, "dispatch_b before dispatch_a"
        return in_flight

    def combine(self, combine_input: InFlight) -> torch.Tensor:
        microbatch = overlap.microbatch()
        overlap.give_way()
        self.combine_a(combine_input, microbatch)
        return self.combine_b(microbatch)

    def combine_a(self, combine_input: InFlight, tbo_subbatch_index: int | None = None) -> None:
        pass  # the FFN ranks return rows unasked

    def combine_b(self, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        """Expert outputs [T, H], summed over FFN ranks."""
        microbatch = tbo_subbatch_index or 0
        sent = self._in_flight[microbatch]
        assert sent is not None, "combine_b before dispatch_a"
        self._in_flight[microbatch] = None
        connector = self._runtime.connector
        parts = [connector.combine(sent.first)]
        for round_idx, rows in enumerate(sent.slices[1:], start=1):
            handle = connector.dispatch(
                Transfer(sent.plan.step_id, self.layer, microbatch, round_idx),
                sent.hidden_states[rows],
                sent.topk_ids[rows],
                sent.topk_weights[rows],
                max_rows(sent.plan, self._runtime.capacity, round_idx),
            )
            parts.append(connector.combine(handle))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
