"""An attention rank without FFN ranks, for the connector `null`: a leader that leads nobody.

Without it the handshake would ask for FFN ranks, whose weights would take a GPU's memory for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class LeaderOfNobody:
    """In the place of `control.LeaderControl`."""

    def __init__(self, **kwargs: Any) -> None:
        pass

    def set_on_failure(self, callback: Callable[[Any], None]) -> None:
        pass

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def check(self) -> None:
        pass

    def publish(self, plan: Any) -> None:
        pass

    def peers(self) -> list[Any]:
        return []

    def silences(self) -> Mapping[str, float]:
        return {}

    def stop(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def install() -> None:
    """Before the model is loaded."""
    from sglang.srt.disaggregation.afd.attention import runtime

    setattr(runtime, "LeaderControl", LeaderOfNobody)  # noqa: B010 - not the class it declares
