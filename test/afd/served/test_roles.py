"""The roles started apart, in the unusual order, and ended by the attention side."""

from __future__ import annotations

import shutil
import time

import pytest
import requests
from safetensors import safe_open
from served.conftest import AFD
from served.record import MAX_TOKENS, prompts
from served.server import free_port

pytestmark = pytest.mark.timeout(1200)  # a fixture may start two servers


@pytest.mark.pain(42, 43, 49)
def test_roles_start_apart_in_any_order_and_end_together(serve):
    pair = (*AFD, "--afd-bootstrap-addr", f"127.0.0.1:{free_port()}")
    ffn = serve("tiny", *pair, "--afd-role", "ffn", log="ffn", api=False)
    try:
        time.sleep(5)
        # As under torchrun, whose store is not ours.
        torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        attn = serve("tiny", *pair, "--afd-role", "attn", log="attn", env=torchrun)
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


def test_each_role_starts_without_the_other_roles_shards(serve, record_of, model_path, tmp_path):
    """The demo model has one shard of everything but experts and one shard of experts per layer."""
    attn_copy, ffn_copy = tmp_path / "attn", tmp_path / "ffn"
    shards = list(model_path("demo").glob("*.safetensors"))
    for copy, keeps_experts in ((attn_copy, False), (ffn_copy, True)):
        shutil.copytree(model_path("demo"), copy)
        for shard in shards:
            with safe_open(shard, "pt") as tensors:
                experts = {".experts." in name for name in tensors.keys()}
            assert len(experts) == 1, "a shard of both roles proves nothing"
            if experts != {keeps_experts}:
                (copy / shard.name).unlink()
    pair = (*AFD, "--afd-bootstrap-addr", f"127.0.0.1:{free_port()}")
    ffn = serve(ffn_copy, *pair, "--afd-role", "ffn", log="pure-ffn", api=False)
    attn = serve(attn_copy, *pair, "--afd-role", "attn", log="pure-attn")
    texts = [
        requests.post(
            f"{attn.url}/v1/completions",
            json={"model": "x", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0},
            timeout=60,
        ).json()["choices"][0]["text"]
        for prompt in prompts()[:10]
    ]
    assert texts == record_of("demo").completions[:10]
    attn.stop()
    assert ffn.wait(20) == 0, ffn.tail()
