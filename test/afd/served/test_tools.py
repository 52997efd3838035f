"""Upstream's own tools, unchanged, in AFD mode: bench_one_batch, bench_serving, Engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from served.conftest import AFD

pytestmark = pytest.mark.timeout(1200)  # a fixture may start two servers


def _run(folder: Path, *command: object, timeout_s: int = 600) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,  # bench_one_batch leaves its result.jsonl where it runs
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_bench_one_batch_prints_upstreams_lines(model_path, workspace):
    output = _run(
        workspace,
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
    output = _run(workspace, script, model_path("tiny"))
    assert re.search(r"TEXT '.*' 8\n", output), output[-3000:]


def test_bench_serving_works_unchanged(record_of):
    output = record_of("demo", *AFD).bench_serving
    assert output.startswith("exit code 0"), output[-3000:]
    assert re.search(r"Successful requests:\s+8\b", output), output[-3000:]
