"""On GPUs, 1A1F: the families and formats that upstream runs on a GPU only.

Teacher-forced: the colocated server scores its own sequences one at a time and all at once, the AFD
server one at a time. In 16 bits the two colocated scorings differ too; AFD may differ 1.5 times as
much in the mean, or by `FLOOR`. The servers of several rows run at the same time, since each needs
more than a minute to start and little of a GPU.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch
from matrix.compare import Comparison, compare, mean_distance
from matrix.jobs import Answer
from models.absent import last_error
from models.on_gpu import ROWS, GpuRow
from served.server import Server

from sglang.srt.disaggregation.afd import sharing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(590),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Mean |difference| of log probabilities that stands for rounding alone: a router's near-tie that
# falls the other way moves a few positions, a missing expert or factor moves all of them by tenths.
FLOOR = 0.02
BOUND = 1.5  # times the colocated server's own distance, one at a time against all at once
# Free-running: a token may differ where the two best were this close; what follows it is not compared.
NEAR_TIE = 0.25
MAX_FLIPPED = 1  # requests in which a router's near-tie moved a token by more than that
AT_A_TIME = int(os.environ.get("AFD_TEST_GPU_ROWS", "6"))  # rows whose servers run together
ALL_ROWS_TIMEOUT_S = 480.0
NEW_TOKENS = 12
STARTED: list[Server] = []
PORTS = iter(range(10000, 32000, 700))  # a server takes more ports near its own
COMMON = (
    *("--skip-tokenizer-init", "--trust-remote-code", "--mem-fraction-static", "0.7"),
    *("--max-running-requests", "16", "--cuda-graph-backend-prefill", "disabled"),
    # The colocated side of some families would run shared experts as one more routed expert.
    "--disable-shared-experts-fusion",
)
EAGER = ("--cuda-graph-backend-decode", "disabled")
GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "4", "8")
COLOCATED = (*EAGER, "--base-gpu-id", str(max(0, torch.cuda.device_count() - 1)))
AFD = (
    *("--disaggregation-mode", "afd", "--afd-connector", "nccl"),
    # The longest prompts go in rounds.
    *("--afd-max-tokens-per-rank", "48"),
    # Kernels are compiled in the first steps.
    *("--afd-peer-timeout", "240"),
)


@dataclass
class Outcome:
    """What one row showed.

    `error` is upstream's, if the colocated server did not serve it; `without_graphs` the log's end
    of an AFD server that did not start with CUDA graphs, after which one was started without.
    """

    error: str = ""
    without_graphs: str = ""
    noise: float = 0.0
    mean: float = 0.0
    forced: Comparison | None = None
    free: Comparison | None = None
    state: dict | None = None
    graphs: bool = False


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[GpuRow], Outcome]]:
    """Rows start in the order of the tests, so that a test waits for its own and not for all."""
    folder = tmp_path_factory.mktemp("on_gpu")
    sharing.share_if_fewer(2)
    chosen = [item.name for item in request.session.items]  # less than all with -k
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        wanted = {
            row.name: pool.submit(_run, row, folder)
            for row in ROWS
            if f"{test_equal_on_gpu.__name__}[{row.name}]" in chosen
        }

        deadline = time.monotonic() + ALL_ROWS_TIMEOUT_S

        def get(row: GpuRow) -> Outcome:
            future: Future[Outcome] = wanted[row.name]
            return future.result(max(1.0, deadline - time.monotonic()))

        try:
            yield get
        finally:
            for future in wanted.values():
                future.cancel()
            for server in STARTED:  # of a row that came too late; its thread ends with its server
                server.kill()


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_equal_on_gpu(row: GpuRow, outcomes, record_property):
    record_property("architecture", row.architecture)
    record_property("topology", "1A1F")
    record_property("format", row.format)
    record_property("methods", " ".join(row.methods))
    record_property("device", torch.cuda.get_device_name())
    outcome = outcomes(row)
    if outcome.error:
        record_property("error", outcome.error)
        pytest.fail(f"upstream alone: {outcome.error}")
    assert outcome.forced is not None
    record_property("positions", outcome.forced.num_positions)
    record_property("largest", f"{outcome.forced.largest:.0e}")
    record_property("mean", f"{outcome.mean:.1e}")
    record_property("colocated_mean", f"{outcome.noise:.1e}")
    record_property("graphs", outcome.graphs)
    print(
        f"{row.name}: mean {outcome.mean:.5f}, largest {outcome.forced.largest:.4f}, colocated "
        f"batched against single {outcome.noise:.5f}; {outcome.free.num_positions} tokens equal, "
        f"{len(outcome.free.ties)} near-ties, {outcome.free.wrong}, graphs {outcome.graphs}"
    )
    if outcome.without_graphs:
        print(f"{row.name} did not start with CUDA graphs:\n{outcome.without_graphs}")
    outcome.forced.check()
    assert outcome.mean <= max(FLOOR, BOUND * outcome.noise)
    assert len(outcome.free.wrong) <= MAX_FLIPPED, outcome.free.wrong
    assert outcome.state["tokens"] > 0
    assert outcome.state["ffn"][0]["tokens"] > 0
    assert outcome.state["tensors_read"] > 0
    assert outcome.state["ffn"][0]["tensors_read"] > 0


def _run(row: GpuRow, folder: Path) -> Outcome:
    """Both servers of a row, started together."""
    model = row.build(folder / row.name)

    def start(side: str, *flags: str) -> Server:
        server = Server(
            folder / f"{row.name}-{side}.log",
            model,
            *COMMON,
            *row.flags,
            *flags,
            api=False,
            dtype=row.dtype,
            env=row.environment,
            port=next(PORTS),
        )
        STARTED.append(server)
        return server

    colocated, afd = start("colocated", *COLOCATED), start("graphs", *AFD, *row.ours, *GRAPHS)
    try:
        reference = _reference(colocated)
        if isinstance(reference, Outcome):
            return reference
        colocated.kill()
        without_graphs = ""
        try:
            afd.wait_healthy()
        except AssertionError as error:
            without_graphs = str(error)[-3000:]
            afd.kill()
            afd = start("eager", *AFD, *row.ours, *EAGER)
            afd.wait_healthy()
        return _compare(reference, afd, without_graphs)
    finally:
        colocated.kill()
        afd.kill()


@dataclass
class Reference:
    """What the colocated server generated, and how it scores that one at a time and all at once."""

    generated: list[Answer]
    sequences: list[list[int]]
    single: list[Answer]
    batched: list[Answer]


def _reference(server: Server) -> Reference | Outcome:
    try:
        server.wait_healthy()
        generated = _ask_all(server, _prompts(), NEW_TOKENS)
        sequences = [[*ids, *got.ids] for ids, got in zip(_prompts(), generated, strict=True)]
        single = [_score(server, ids) for ids in sequences]
        batched = _without_generation(_ask_all(server, sequences, 1))
        return Reference(generated, sequences, single, batched)
    except (AssertionError, requests.RequestException):
        return Outcome(error=last_error(server.log.read_text(errors="replace")))


def _compare(reference: Reference, afd: Server, without_graphs: str) -> Outcome:
    ours = [_score(afd, ids) for ids in reference.sequences]
    free = _ask_all(afd, _prompts(), NEW_TOKENS)
    return Outcome(
        without_graphs=without_graphs,
        noise=mean_distance(reference.single, reference.batched),
        mean=mean_distance(reference.single, ours),
        forced=compare(reference.single, ours, float("inf")),
        free=compare(_tokens_only(reference.generated), _tokens_only(free), NEAR_TIE),
        state=afd.info()[0],
        graphs="captured bucket" in afd.log.read_text(errors="replace"),
    )


def _prompts() -> list[list[int]]:
    rng = random.Random(6)
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 7, 16, 33, 64, 100, 130)]


def _score(server: Server, ids: list[int]) -> Answer:
    (answer,) = _without_generation([_ask(server, ids, 1)])
    return answer


def _ask_all(server: Server, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: _ask(server, ids, new_tokens), prompts))


def _ask(server: Server, ids: list[int], new_tokens: int) -> Answer:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    response.raise_for_status()
    meta = response.json()["meta_info"]
    prompt, new = meta["input_token_logprobs"][1:], meta["output_token_logprobs"]
    return Answer(
        ids=[entry[1] for entry in new],
        logprobs=[entry[0] for entry in (*prompt, *new)],
        gaps=[top[0][0] - top[1][0] for top in meta["output_top_logprobs"]],
        finish=meta["finish_reason"]["type"],
    )


def _without_generation(answers: list[Answer]) -> list[Answer]:
    return [
        Answer(logprobs=a.logprobs[: len(a.logprobs) - len(a.ids)], finish=a.finish)
        for a in answers
    ]


def _tokens_only(answers: list[Answer]) -> list[Answer]:
    """Without the prompts' scores, which are compared where they are forced."""
    return [
        Answer(a.ids, a.logprobs[len(a.logprobs) - len(a.ids) :], a.gaps, finish=a.finish)
        for a in answers
    ]
