"""The HTTP server of an FFN rank: /health for probes and /metrics for Prometheus, nothing else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError

FLAG = "--afd-ffn-metrics-port"
_SLOW_CLIENT_S = 5.0

# (status of the rank, whether it can serve, more to say)
Health = Callable[[], tuple[str, bool, dict[str, Any]]]


def _loading() -> tuple[str, bool, dict[str, Any]]:
    return "loading", False, {}


class Exporter:
    """Listens as soon as it is made, in daemon threads; says "loading" until `serve`.

    Raises:
        AFDConfigError: the port is in use.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        kind = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server = kind((host, port), _Handler)
        except OSError as error:
            raise AFDConfigError(
                f"{FLAG}: cannot listen on {host}:{port} ({error.strerror}); FFN rank r takes port "
                "+ r: choose others, or end the process that has it"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="afd-exporter", daemon=True
        )
        self._thread.start()

    def serve(self, health: Health, metrics: Callable[[], bytes]) -> None:
        """From now on answer with these, called on the server's threads."""
        self._server.health, self._server.metrics = health, metrics

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    health: Health = staticmethod(_loading)
    metrics: Callable[[], bytes] = staticmethod(lambda: b"")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SLOW_CLIENT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            status, healthy, more = self.server.health()
            code = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
            body = json.dumps({"status": status, **more}).encode()
            self._answer(code, "application/json", body)
        elif path == "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            self._answer(HTTPStatus.OK, kind, self.server.metrics())
        else:
            text = b"an FFN rank answers /health and /metrics\n"
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", text)

    def _answer(self, code: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        """A probe every few seconds is no news."""
