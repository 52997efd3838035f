"""Upstream's own tools, unchanged, in AFD mode: bench_one_batch, bench_serving, Engine."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from matrix.harness import Process
from matrix.jobs import Command
from served.conftest import AFD

pytestmark = pytest.mark.timeout(1200)  # a fixture may start two servers


TIMEOUT_S = 250


@pytest.fixture
def run(zygote, workspace):
    """Output of `python ARGV...`, in a folder of its own because the tools leave files there."""

    def get(*argv: object) -> str:
        log = workspace / "tool.log"
        process = Process(zygote, Command(tuple(map(str, argv)), log, workspace))
        code = process.wait(TIMEOUT_S)
        output = log.read_text()
        log.unlink()
        assert code == 0, output[-3000:]
        return output

    return get


@pytest.mark.long  # with one attention rank it runs in test_documented
def test_bench_one_batch_prints_upstreams_lines(model_path, run):
    output = run(
        *("-m", "sglang.bench_one_batch", "--model-path", model_path("demo"), *AFD),
        *("--afd-attn-ranks", 2, "--dtype", "float32", "--max-total-tokens", 4096),
        *("--batch-size", 2, "--input-len", 16, "--output-len", 4),
    )
    assert re.search(r"Prefill\. latency: .* throughput: ", output), output[-3000:]
    assert re.search(r"Decode\.  median latency: .* median throughput: ", output), output[-3000:]


ENGINE_SCRIPT = """
import sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], disaggregation_mode="afd", dtype="float32", max_total_tokens=4096
    )
    answer = engine.generate("import", {"temperature": 0, "max_new_tokens": 8})
    print("TEXT", repr(answer["text"]), answer["meta_info"]["completion_tokens"])
    engine.shutdown()
"""


def test_offline_engine(model_path, workspace):
    script = workspace / "engine.py"
    script.write_text(ENGINE_SCRIPT)
    # A fresh interpreter, as on a user's machine.
    output = subprocess.check_output(
        [sys.executable, script, model_path("tiny")], text=True, timeout=TIMEOUT_S
    )
    assert re.search(r"TEXT '.*' 8\n", output), output[-3000:]


def test_bench_serving_works_unchanged(record_of):
    output = record_of("demo", *AFD).bench_serving
    assert output.startswith("exit code 0"), output[-3000:]
    assert re.search(r"Successful requests:\s+8\b", output), output[-3000:]
