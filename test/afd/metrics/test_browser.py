"""The status page in a headless Chromium, where there is one: it renders, and is asked for again."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang.srt.disaggregation.afd.status import page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
WAIT_S = 60

RANK = {"rank": 0, "host": "a", "pid": 1, "device": "cpu", "steps": 1, "heartbeat_age_s": 0.5}
TOPOLOGY = {
    "connector": "gloo",
    "microbatches": 1,
    "capacity": 64,
    "moe_layers": 3,
    "afd_version": "1",
    "sglang_version": "2",
    "attention": [{**RANK, "tokens": 5, "num_used_tokens": 1, "max_total_num_tokens": 4}],
    "ffn": [{**RANK, "tokens": 5, "experts": (0, 8)}],
}


@pytest.fixture
def site():
    """(address of a server with the page, paths that it was asked for)."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.render(TOPOLOGY).encode())

        def log_message(self, *_args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/afd", asked
    server.shutdown()
    server.server_close()


def test_it_shows_both_pools_and_asks_again(site, tmp_path):
    url, asked = site
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={tmp_path}", "--dump-dom", url]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert 'id="attn-0"' in dumped.stdout and 'id="ffn-0"' in dumped.stdout
    command.remove("--dump-dom")
    asked.clear()
    with subprocess.Popen(
        [*command, "--remote-debugging-port=0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        deadline = time.monotonic() + WAIT_S
        while asked.count("/afd") < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        running.terminate()
    assert asked.count("/afd") >= 2
