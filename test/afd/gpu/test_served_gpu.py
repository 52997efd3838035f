"""On two GPUs of one host: AFD scores and generates as colocated SGLang does, with and without graphs.

Teacher-forced: the colocated server's own sequences are scored by every AFD server.
"""

from __future__ import annotations

import importlib.util
import random
from functools import cache

import pytest
import requests
import torch
from served.models import tiny_model
from served.server import Server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

AFD = ("--disaggregation-mode", "afd", "--afd-connector")
EAGER = ("--cuda-graph-backend-decode", "disabled")
GRAPH = ("--cuda-graph-bs-decode", "1", "2", "4", "8")
GRAPH2 = ("--cuda-graph-bs-decode", "2", "4", "8")
COMMON = ("--attention-backend", "triton", "--cuda-graph-backend-prefill", "disabled")
CASES = {
    "nccl-eager": (*AFD, "nccl", *EAGER),
    "nccl-graph": (*AFD, "nccl", *GRAPH),
    "nccl-graph-rounds": (*AFD, "nccl", *GRAPH, "--afd-max-tokens-per-rank", "16"),
    "nccl-graph-2mb": (*AFD, "nccl", *GRAPH2, "--afd-microbatches", "2"),
    "deepep-eager": (*AFD, "deepep", *EAGER, "--afd-max-tokens-per-rank", "64"),
    "deepep-graph": (*AFD, "deepep", *GRAPH, "--afd-max-tokens-per-rank", "64"),
}
# BF16 on both sides.
TOLERANCE = 2e-2


HAS_DEEPEP = importlib.util.find_spec("deep_ep") is not None
AVAILABLE = [
    pytest.param(
        case, marks=pytest.mark.skipif("deepep" in case and not HAS_DEEPEP, reason="no deep_ep")
    )
    for case in CASES
]


def ask(server: Server, ids: list[int], new_tokens: int) -> dict:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return requests.post(f"{server.url}/generate", json=body, timeout=120).json()


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 3, 7, 16, 33, 64, 100)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    model = tiny_model(folder / "tiny", hidden=2048, head_dim=128)  # sizes that the kernels take

    @cache
    def get(*flags: str):
        """(scores of the colocated server's sequences, own answers, /server_info, log)"""
        is_colocated = flags[0] != AFD[0]
        sequences = [] if is_colocated else get(*GRAPH)[2]
        server = Server(folder / f"{'_'.join(flags)}.log", model, *COMMON, *flags, dtype="bfloat16")
        try:
            answers = [ask(server, ids, 24) for ids in prompts()]
            if is_colocated:
                pairs = zip(prompts(), answers, strict=True)
                sequences = [ids + answer["output_ids"] for ids, answer in pairs]
            scores = [logprobs(ask(server, ids, 1)) for ids in sequences]
            info = [] if is_colocated else server.info()
        finally:
            server.kill()
        return scores, answers, sequences if is_colocated else info, server.log.read_text()

    return get


def logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


@pytest.mark.pain(6, 18, 76)
@pytest.mark.parametrize("case", AVAILABLE)
def test_colocated_sequences_score_the_same(run, case):
    expected, colocated, _, _ = run(*GRAPH)
    got, answers, _, _ = run(*CASES[case])
    differences = [
        abs(a - b)
        for ours, theirs in zip(got, expected, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    tokens = [
        a == b
        for ours, theirs in zip(answers, colocated, strict=True)
        for a, b in zip(ours["output_ids"], theirs["output_ids"], strict=True)
    ]
    print(
        f"{case}: |dlogprob| max {max(differences):.4f} mean {sum(differences) / len(differences):.5f}"
        f", {sum(tokens)} of {len(tokens)} free-running tokens equal"
    )
    assert max(differences) < TOLERANCE
    assert sum(tokens) > 0.9 * len(tokens)


@pytest.mark.pain(27, 46)
@pytest.mark.parametrize("case", AVAILABLE)
def test_every_rank_worked(run, case):
    _, _, info, log = run(*CASES[case])
    sent, received = info[0]["tokens"], info[0]["ffn"][0]["tokens"]
    assert 0 < sent <= received <= 2 * sent  # DeepEP delivers a row per expert
    if "graph" in case:
        assert "captured bucket" in log
