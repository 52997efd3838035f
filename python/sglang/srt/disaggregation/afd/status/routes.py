"""Adds /afd and /afd/topology to upstream's API, in the server's main process."""

from __future__ import annotations

import asyncio
import time
from html import escape
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.responses import HTMLResponse

from sglang.srt.disaggregation.afd.status import page, topology

_ANSWER_S = 10.0  # attention ranks answer between two steps


class Status:
    """Asks the attention ranks; remembers the last answer, so that the page can show rates."""

    def __init__(self) -> None:
        self._last: tuple[float, dict[str, int]] = (0.0, {})

    async def topology(self) -> dict[str, Any]:
        """GET /afd/topology.

        Raises:
            HTTPException: status 503, the attention ranks do not answer.
        """
        from sglang.srt.entrypoints.http_server import _global_state

        manager = _global_state.tokenizer_manager
        try:
            states = await asyncio.wait_for(manager.get_internal_state(), _ANSWER_S)
        except TimeoutError:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the attention ranks did not answer within {_ANSWER_S:g} s; see the server's log",
            ) from None
        return topology.build(states, await manager.get_loads())

    async def page(self) -> HTMLResponse:
        """GET /afd."""
        try:
            found = await self.topology()
        except HTTPException as error:
            body = f'<h1>SGLang-AFD</h1><p class="bad">{escape(str(error.detail))}</p>'
            return HTMLResponse(page.document(body), error.status_code)
        self._add_rates(found)
        return HTMLResponse(page.render(found))

    def _add_rates(self, found: dict[str, Any]) -> None:
        """Rates since the page was last asked for; none the first time."""
        now = time.monotonic()
        last_time, last = self._last
        ranks = {
            f"{role} {rank['rank']}": rank for role in ("attention", "ffn") for rank in found[role]
        }
        for name, rank in ranks.items():
            if name in last and now > last_time:
                rank["tokens_per_s"] = (rank["tokens"] - last[name]) / (now - last_time)
        self._last = now, {name: rank["tokens"] for name, rank in ranks.items()}


def add_routes(app: Any) -> None:
    """Called once, before the API is served."""
    status = Status()
    app.add_api_route("/afd/topology", status.topology, methods=["GET"])
    app.add_api_route("/afd", status.page, methods=["GET"], response_class=HTMLResponse)
