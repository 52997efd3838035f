"""Requests that an AFD server answers with status 400 and the reason.

They would reach the attention ranks only, and leave the two pools with different weights, or one
of them without memory. (What a command line may not ask for is in `config.LIMITS`.)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import HTTPException

from sglang.srt.disaggregation.afd.errors import AFDError

_WEIGHTS = "FFN ranks would keep the old experts; start the server again with the new checkpoint"
_MEMORY = "FFN ranks would keep their memory; end the server instead"
_EXPERTS = "attention ranks hold no experts; /server_info shows the tokens of each FFN rank"

# Methods of upstream's TokenizerManager, which both the HTTP API and `sglang.Engine` call.
REFUSED = {
    "update_weights_from_disk": _WEIGHTS,
    "update_weights_from_tensor": _WEIGHTS,
    "update_weights_from_distributed": _WEIGHTS,
    "update_weights_from_ipc": _WEIGHTS,
    "init_weights_update_group": _WEIGHTS,
    "destroy_weights_update_group": _WEIGHTS,
    "init_weights_send_group_for_remote_instance": _WEIGHTS,
    "send_weights_to_remote_instance": _WEIGHTS,
    "check_weights": _WEIGHTS,
    "release_memory_occupation": _MEMORY,
    "resume_memory_occupation": _MEMORY,
    "start_expert_distribution_record": _EXPERTS,
    "stop_expert_distribution_record": _EXPERTS,
    "dump_expert_distribution_record": _EXPERTS,
}


class Refused(HTTPException, AFDError):
    """Status 400 for a client of the API, an AFDError for a caller of `sglang.Engine`."""

    def __init__(self, text: str) -> None:
        HTTPException.__init__(self, HTTPStatus.BAD_REQUEST, text)

    def __str__(self) -> str:
        return str(self.detail)


def _refusing(name: str, reason: str) -> Callable[..., Awaitable[NoReturn]]:
    async def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise Refused(f"{name} does not work with --disaggregation-mode afd: {reason}")

    return refuse


# --- hooks, see patches.py ---------------------------------------------------------------------


def after_init_communicators(result: Any, manager: Any, server_args: Any) -> None:
    """AFTER `TokenizerControlMixin.init_communicators`, in the constructor of the manager."""
    if server_args.afd_enabled:
        for name, reason in REFUSED.items():
            assert hasattr(manager, name), name
            setattr(manager, name, _refusing(name, reason))
