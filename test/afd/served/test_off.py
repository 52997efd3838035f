"""A colocated server with the package installed is the server that it is without the package."""

from __future__ import annotations

import subprocess
from typing import Any

import psutil
import pytest
import requests
from served import without_package
from served.record import prompts

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # two fresh interpreters

# What our package chooses on a CPU, typed, so that both servers have it.
FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--random-seed", "1")
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# Different at every start: times, free memory of the machine, the port that the test chose.
VOLATILE = {"startup_time", "memory_usage", "port", "nccl_port", "last_gen_throughput"}
VOLATILE |= {"step_time_dict", "avg_spec_accept_length"}


def ask(url: str) -> list[Any]:
    """Scores and greedy tokens, one request at a time: batches are then the same in both."""
    answers = []
    for text in prompts()[:12]:
        body = {
            "text": text,
            "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = requests.post(f"{url}/generate", json=body, timeout=60).json()
        meta = answer["meta_info"]
        kept = ("input_token_logprobs", "output_token_logprobs", "finish_reason", "cached_tokens")
        answers.append([answer["text"], answer["output_ids"], [meta[key] for key in kept]])
    return answers


def stable(info: Any) -> Any:
    """A document without what differs from start to start."""
    if isinstance(info, dict):
        return {key: stable(value) for key, value in info.items() if key not in VOLATILE}
    return [stable(value) for value in info] if isinstance(info, list) else info


def command(process: Any) -> str:
    """What a process calls itself; the launcher's arguments hold the test's port."""
    words = process.cmdline()
    if "multiprocessing.resource_tracker" in " ".join(words):
        return "resource tracker"
    return " ".join(words[1:4]) if words[0].endswith("python") else " ".join(words).strip()


def look_at(server: Any) -> dict[str, Any]:
    processes = [psutil.Process(server.process.pid), *server.descendants()]
    return {
        "answers": ask(server.url),
        "processes": sorted(command(process) for process in processes),
        "server_info": stable(requests.get(f"{server.url}/server_info", timeout=30).json()),
        "model_info": requests.get(f"{server.url}/model_info", timeout=30).json(),
        "routes": sorted(requests.get(f"{server.url}/openapi.json", timeout=30).json()["paths"]),
        "exit code": server.stop(),
    }


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    return without_package.make(tmp_path_factory.mktemp("off") / "env")


@pytest.fixture(scope="module")
def both(serve, interpreter):
    seen = []
    for log, python in (("off-with", None), ("off-without", interpreter)):
        server = serve("tiny", *FLAGS, log=log, zygote=None, env=ENVIRONMENT, python=python)
        seen.append(look_at(server))
    return seen


def test_the_other_environment_is_really_without_the_package(interpreter):
    code = (
        "import importlib.metadata as m, importlib.util as u, sglang;"
        "print([d.name for d in m.distributions() if 'afd' in (d.name or '')],"
        "u.find_spec('sglang.srt.disaggregation.afd'), m.version('sglang'))"
    )
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["[]", "None", "0.5.17"], done.stderr


@pytest.mark.pain(63)
@pytest.mark.parametrize(
    "what", ["answers", "processes", "server_info", "model_info", "routes", "exit code"]
)
def test_off_is_as_without_the_package(both, what, record_property):
    with_package, without = both
    assert without[what] is not None
    if what == "server_info":
        assert len(without[what]) > 300 and without[what]["internal_states"]
    if what == "processes":
        assert len(without[what]) == 4  # launcher, its resource tracker, scheduler, detokenizer
    if what == "answers":
        positions = sum(len(answer[2][0]) + len(answer[2][1]) for answer in without[what])
        record_property("positions", positions)
        assert positions > 300
    assert with_package[what] == without[what]
