"""The HTTP server of an FFN rank, and the port of its flag."""

from __future__ import annotations

import re
import socket

import pytest
import requests

from sglang.srt.disaggregation.afd import ports
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.metrics import exporter as module
from sglang.srt.disaggregation.afd.metrics.exporter import Exporter


@pytest.fixture
def exporter():
    made = Exporter("127.0.0.1", 0)
    yield made
    made.close()


def get(exporter: Exporter, path: str) -> requests.Response:
    return requests.get(f"http://127.0.0.1:{exporter.port}{path}", timeout=5)


@pytest.mark.pain(57)
def test_a_rank_is_unhealthy_until_it_serves(exporter):
    answer = get(exporter, "/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
    assert get(exporter, "/metrics").text == ""
    exporter.serve(lambda: ("ok", True, {"rank": 1}), lambda: b"x 1\n")
    answer = get(exporter, "/health?probe")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "rank": 1})
    answer = get(exporter, "/metrics")
    assert answer.text == "x 1\n" and answer.headers["Content-Type"].startswith("text/plain")
    exporter.serve(lambda: ("lost its leader", False, {}), lambda: b"")
    assert get(exporter, "/health").status_code == 503
    assert get(exporter, "/").status_code == 404


def test_a_port_in_use_names_the_flag(exporter):
    expected = re.escape(f"{module.FLAG}: cannot listen on 127.0.0.1:{exporter.port}")
    with pytest.raises(AFDConfigError, match=expected):
        Exporter("127.0.0.1", exporter.port)
    with pytest.raises(AFDConfigError, match=f"{module.FLAG} {exporter.port}"):
        ports.hold("127.0.0.1", exporter.port, module.FLAG)  # as the launcher does


def test_a_held_port_can_still_be_taken():
    with ports.hold("127.0.0.1", 0, module.FLAG) as held:
        made = Exporter("127.0.0.1", held.getsockname()[1])
        assert get(made, "/health").status_code == 503
        made.close()


def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    made = Exporter("::1", 0)
    assert requests.get(f"http://[::1]:{made.port}/health", timeout=5).status_code == 503
    made.close()
