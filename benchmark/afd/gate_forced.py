"""Teacher forcing in decode steps: the next token is given, and its log probability comes back.

Runs inside a server, as upstream's custom logit processor. Upstream reports log probabilities of
the logits that this class leaves, so it leaves two tokens: the given one, far ahead, and a slot that
holds, `OFFSET` below it, the log probability that the model gave it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

SLOT = 0  # a token that is never given
OFFSET = 20.0
_NEVER = -1e4


class Forced(CustomLogitProcessor):
    """`custom_params` of a request: `forced`, the tokens in order."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or [], strict=True):
            # The dictionary lives as long as the request; under the overlap scheduler the
            # request's own list of tokens is one step behind.
            step = params["step"] = params.get("step", -1) + 1
            token = params["forced"][min(step, len(params["forced"]) - 1)]
            found = torch.log_softmax(row.float(), dim=0)[token]
            row.fill_(_NEVER)
            row[token] = 0.0
            row[SLOT] = found - OFFSET
        return logits


def logprob(slot: float) -> float:
    """The model's log probability of the given token, from what was reported of the slot."""
    weight = math.exp(slot)  # p / (1 + p) of p, the slot's weight beside the token's 1
    return math.log(weight / (1.0 - weight)) + OFFSET
