"""Each user error, as a user types it: a non-zero exit, a message, no traceback."""

from __future__ import annotations

import json
import shlex
import shutil
import socket

import pytest
from matrix.harness import Process
from matrix.jobs import Command

TIMEOUT_S = 60

# What follows `--disaggregation-mode afd`, and parts of the message: flag, value, way out.
ROWS = (
    ("--afd-attn-ranks 0", "--afd-attn-ranks 0", "greater than 0"),
    ("--afd-ffn-ranks -2", "--afd-ffn-ranks -2", "greater than 0"),
    ("--afd-ffn-ranks two", "--afd-ffn-ranks", "two"),
    ("--afd-ffn-ranks 9", "--afd-ffn-ranks 9", "8 routed experts"),
    ("--afd-peer-timeout 0", "--afd-peer-timeout 0", "greater than 0"),
    ("--afd-load-timeout -1", "--afd-load-timeout -1", "greater than 0"),
    ("--afd-drain-timeout -1", "--afd-drain-timeout -1", "at least 0"),
    ("--afd-max-tokens-per-rank 0", "--afd-max-tokens-per-rank 0", "greater than 0"),
    ("--afd-role expert", "--afd-role", "expert", "all", "attn", "ffn"),
    ("--afd-role ffn", "--afd-role ffn needs --afd-bootstrap-addr HOST:PORT"),
    ("--afd-role attn", "--afd-role attn needs --afd-bootstrap-addr HOST:PORT"),
    ("--afd-bootstrap-addr here", "--afd-bootstrap-addr 'here' is not HOST:PORT"),
    ("--afd-bootstrap-addr h:0", "--afd-bootstrap-addr 'h:0' is not HOST:PORT"),
    ("--afd-microbatches 3", "--afd-microbatches", "3", "auto", "1", "2"),
    ("--afd-connector rdma", "--afd-connector", "rdma", "gloo"),
    ("--afd-connector loopback", "--afd-connector loopback", "leave the flag out"),
    ("--afd-connector nccl", "--afd-connector nccl", "--device is cpu"),
    ("--afd-attn-ranks 2 --tp-size 4", "--tp-size 4 differs from --afd-attn-ranks 2"),
    ("--afd-attn-ranks 2 --dp-size 3", "--dp-size 3 differs from --afd-attn-ranks 2"),
    ("--pp-size 2", "--pp-size=2", "drop the flag"),
    ("--enable-lora", "--enable-lora", "drop the flag"),
    ("--enable-eplb", "--enable-eplb", "drop the flag"),
    ("--ep-num-redundant-experts 4", "--ep-num-redundant-experts=4", "drop the flag"),
    ("--speculative-algorithm NGRAM", "--speculative-algorithm='NGRAM'", "drop the flag"),
    ("--dwdp-size 2", "--dwdp-size=2", "drop the flag"),
    ("--enable-single-batch-overlap", "--enable-single-batch-overlap", "drop the flag"),
    ("--use-ray", "--use-ray", "drop the flag"),
    ("--enable-memory-saver", "--enable-memory-saver", "drop the flag"),
    ("--is-embedding", "--is-embedding", "drop the flag"),
    ("--load-format gguf", "--load-format", "gguf", "safetensors"),
    ("--moe-a2a-backend mooncake", "--moe-a2a-backend='mooncake'", "--afd-connector"),
    ("--enable-torch-compile", "--enable-torch-compile", "--afd-allow-untested"),
    ("--tokenizer-worker-num 2", "--tokenizer-worker-num=2", "--afd-allow-untested"),
    (
        "--enable-mixed-chunk --afd-microbatches 2",
        "--enable-mixed-chunk does not work with --afd-microbatches 2",
    ),
    (
        "--enable-two-batch-overlap --afd-microbatches 1",
        "--enable-two-batch-overlap contradicts --afd-microbatches 1",
    ),
)


@pytest.fixture(scope="module")
def refused(zygote, model_path, tmp_path_factory):
    """Log of a server that must end by itself."""
    folder = tmp_path_factory.mktemp("refused")

    def get(flags: str, mode: str = "--disaggregation-mode afd", model=None) -> str:
        log = folder / "log"
        argv = ("-m", "sglang.launch_server", "--model-path", str(model or model_path("tiny")))
        argv += ("--max-total-tokens", "4096", *shlex.split(f"{mode} {flags}"))
        process = Process(zygote, Command(argv, log, folder))
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        text = log.read_text()
        log.unlink()
        assert code not in (0, None), text
        assert code > 0, f"ended by signal {-code}:\n{text}"
        assert "Traceback" not in text, text
        return text

    return get


def check(log: str, parts: tuple[str, ...]) -> None:
    message = [line for line in log.splitlines() if all(part in line for part in parts)]
    assert message, log


@pytest.mark.pain(19, 68)
@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_wrong_command_is_refused_by_name(refused, row):
    check(refused(row[0]), row[1:])


def test_the_mode_was_forgotten(refused):
    log = refused("--afd-ffn-ranks 2", mode="")
    check(log, ("--afd-ffn-ranks 2", "--disaggregation-mode afd"))


def test_the_port_is_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        check(refused(f"--port {port}"), (f"--port {port}", "in use", "choose another"))


def test_the_model_has_no_routed_experts(refused, model_path, tmp_path):
    folder = shutil.copytree(model_path("tiny"), tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    config["model_type"] = "qwen3"
    (folder / "config.json").write_text(json.dumps(config))
    check(refused("", model=folder), ("Qwen3ForCausalLM", "routed experts"))
