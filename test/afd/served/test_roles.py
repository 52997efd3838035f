"""The roles started apart, in the unusual order, and ended by the attention side."""

from __future__ import annotations

import time

import pytest
import requests
from served.conftest import AFD
from served.server import free_port

pytestmark = pytest.mark.timeout(1200)  # a fixture may start two servers


def test_roles_start_apart_in_any_order_and_end_together(serve):
    pair = (*AFD, "--afd-bootstrap-addr", f"127.0.0.1:{free_port()}")
    ffn = serve("tiny", *pair, "--afd-role", "ffn", log="ffn", api=False)
    try:
        time.sleep(5)
        attn = serve("tiny", *pair, "--afd-role", "attn", log="attn")
        try:
            answer = requests.post(
                f"{attn.url}/v1/completions",
                json={"model": "x", "prompt": "import", "max_tokens": 4, "temperature": 0},
                timeout=60,
            ).json()
            assert answer["usage"]["completion_tokens"] == 4
            assert attn.info()[0]["ffn"][0]["tokens"] > 0
            attn.stop()
            assert ffn.wait(20) == 0, ffn.tail()
            assert "the server was shut down" in ffn.log.read_text()
        finally:
            attn.kill()
    finally:
        ffn.kill()
