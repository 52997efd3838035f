"""What a running 2A1F server says about itself: metrics of both roles, status, one trace."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests
from served.conftest import AFD
from served.lanes import lanes, parents, steps
from served.server import free_port

from sglang.srt.disaggregation.afd import profile
from sglang.srt.disaggregation.afd.metrics import definitions

TOKENS = 24
_SAMPLE = re.compile(r"^(sglang:afd_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Scrape:
    """All samples of ours in one page of Prometheus text."""

    def __init__(self, url: str) -> None:
        answer = requests.get(url, timeout=30)
        assert answer.status_code == 200, answer.text
        self.text = answer.text
        self._samples = [
            (name.removeprefix(definitions.PREFIX), dict(_LABEL.findall(labels)), float(value))
            for name, labels, value in _SAMPLE.findall(answer.text)
        ]

    def names(self) -> set[str]:
        return {name for name, _, _ in self._samples}

    def sum(self, name: str, **labels: str) -> float:
        return sum(
            value
            for found, own, value in self._samples
            if found == name and labels.items() <= own.items()
        )


@pytest.fixture(scope="module")
def metrics_port():
    return free_port()


@pytest.fixture(scope="module")
def server(serve, metrics_port):
    flags = ("--afd-attn-ranks", "2", "--enable-metrics", "--afd-ffn-metrics-port")
    started = serve("tiny", *AFD, *flags, str(metrics_port), log="metrics")
    generate(started, count=4)
    yield started
    started.kill()


def generate(server, count=1, tokens=TOKENS):
    body = {"sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}}
    with ThreadPoolExecutor(count) as pool:
        texts = [f"prompt {i}" for i in range(count)]
        answers = list(
            pool.map(
                lambda text: requests.post(
                    f"{server.url}/generate", json={"text": text, **body}, timeout=120
                ),
                texts,
            )
        )
    assert all(answer.status_code == 200 for answer in answers), answers[0].text


@pytest.fixture(scope="module")
def scrapes(server, metrics_port):
    """(attention, FFN, /server_info), once nothing moves any more."""
    info = server.info()
    time.sleep(1.5)  # for the reporters' next round
    return (
        Scrape(f"{server.url}/metrics"),
        Scrape(f"http://127.0.0.1:{metrics_port}/metrics"),
        info,
    )


@pytest.mark.pain(8)
def test_both_roles_count_what_server_info_says(scrapes):
    attn, ffn, info = scrapes
    for rank in info:
        own = {"role": "attn", "rank": str(rank["rank"])}
        assert attn.sum("steps_total", **own) == rank["steps"]
        assert attn.sum("tokens_total", **own) == rank["tokens"]
    (row,) = info[0]["ffn"]
    assert ffn.sum("steps_total", role="ffn", rank="0") == row["steps"]
    assert ffn.sum("rows_total") == row["tokens"] == attn.sum("tokens_total")
    # Every token of every layer is a row of each of its two experts.
    assert ffn.sum("expert_rows_total") == 2 * row["moe_layers"] * row["tokens"]
    assert ffn.sum("steps_total", mode="decode", reason="disabled") >= TOKENS
    assert ffn.sum("steps_total", mode="extend", reason="prefill") >= 1


def test_each_metric_has_values_on_its_role_and_no_other(scrapes):
    attn, ffn, _ = scrapes
    for role, page in (("attn", attn), ("ffn", ffn)):
        expected = {
            f"{metric.name}_count" if metric.kind == "histogram" else metric.name
            for metric in definitions.of_role(role)
            if metric.name != "straggler_steps_total"  # nobody need be one
        }
        assert expected <= page.names()
        # The FFN rank's are not in upstream's multiprocess folder.
        other = {"attn": "ffn", "ffn": "attn"}[role]
        assert f'role="{other}"' not in page.text


def test_times_of_a_step_add_up(scrapes):
    attn, ffn, info = scrapes
    for page, phases in ((attn, ("dispatch", "combine_wait")), (ffn, ("dispatch_wait", "expert"))):
        steps = page.sum("step_seconds_count")
        assert steps == page.sum("steps_total")
        spent = [page.sum(f"{phase}_seconds_sum") for phase in phases]
        assert all(spent) and sum(spent) < page.sum("step_seconds_sum")
    assert attn.sum("peer_wait_seconds_total", peer="ffn 0") > 0
    assert ffn.sum("peer_wait_seconds_total", peer="attn 1") > 0


def test_every_peer_is_alive(scrapes):
    attn, ffn, _ = scrapes
    assert 'peer="attn 1"' in attn.text and 'peer="ffn 0"' in attn.text
    assert 0 < ffn.sum("peer_heartbeat_age_seconds", peer="attn 0") < 10


def test_ffn_rank_is_healthy(server, metrics_port, scrapes):
    health = requests.get(f"http://127.0.0.1:{metrics_port}/health", timeout=10)
    assert health.status_code == 200
    assert health.json()["status"] == "ok"
    assert health.json()["steps"] == scrapes[2][0]["ffn"][0]["steps"]


def test_topology_is_that_of_server_info(server, scrapes):
    found = requests.get(f"{server.url}/afd/topology", timeout=30).json()
    info = scrapes[2]
    assert (found["connector"], found["microbatches"], found["moe_layers"]) == ("gloo", 1, 3)
    assert found["afd_version"] and found["sglang_version"]
    for rank, own in zip(found["attention"], info, strict=True):
        assert {key: own[key] for key in ("rank", "steps", "tokens", "pid")}.items() <= rank.items()
        assert psutil.pid_exists(rank["pid"]) and rank["device"] == "cpu"
        assert rank["max_total_num_tokens"] > 0
    (ffn,) = found["ffn"]
    assert [ffn["pid"]] == server.ffn_pids()
    assert (ffn["host"], ffn["device"]) == (socket.gethostname(), "cpu")
    assert (ffn["experts"], ffn["tokens"]) == ([0, 8], info[0]["ffn"][0]["tokens"])
    assert 0 <= ffn["heartbeat_age_s"] < 10


@pytest.mark.pain(45)
def test_the_page_shows_every_rank_live(server, scrapes):
    first = requests.get(f"{server.url}/afd", timeout=30)
    assert first.status_code == 200 and first.headers["Content-Type"].startswith("text/html")
    assert 'http-equiv="refresh"' in first.text and "<script" not in first.text
    rows = {rank: _cells(first.text, rank) for rank in ("attn-0", "attn-1", "ffn-0")}
    info = scrapes[2]
    assert rows["attn-1"][4:6] == [str(info[1]["steps"]), str(info[1]["tokens"])]
    assert rows["ffn-0"][0] == "ffn 0" and "0 to 7" in rows["ffn-0"]
    generate(server)
    after = _cells(requests.get(f"{server.url}/afd", timeout=30).text, "attn-0")
    assert int(after[4]) > int(rows["attn-0"][4])


def _cells(html, rank):
    (row,) = re.findall(rf'<tr id="{rank}">(.*?)</tr>', html)
    return re.findall(r"<td[^>]*>(.*?)</td>", row)


@pytest.mark.pain(75)
def test_one_trace_shows_the_same_steps_on_both_roles(server, tmp_path):
    out = tmp_path / "trace.json"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, server, count=2, tokens=150)
        time.sleep(0.5)
        code = profile.main(["--url", server.url, "--seconds", "1", "--out", str(out)])
        running.result()
    assert code == 0
    found = lanes(json.loads(out.read_text()))
    assert list(found) == [("attn 0", 0), ("attn 1", 0), ("ffn 0", 0)]
    ids = steps(found["ffn 0", 0])
    assert len(ids) >= 3 and ids == list(range(ids[0], ids[0] + len(ids)))
    for (rank, _), spans in found.items():
        assert steps(spans) == ids
        paths = parents(spans)
        phases = ("dispatch", "combine") if rank[0] == "a" else ("receive", "experts", "send")
        for phase in phases:
            assert paths.count(("step", "layer", phase)) == 3 * len(ids)  # MoE layers
        assert len(paths) == len(ids) * (1 + 3 + 3 * len(phases))
    # One clock: an FFN rank works on a layer after the attention rank began to send it.
    began = {
        (rank, span.args["step"], span.args["layer"], span.name): span.began
        for (rank, _), spans in found.items()
        for span in spans
        if span.name in ("dispatch", "experts")
    }
    for (rank, step, layer, name), at in began.items():
        if name == "dispatch":
            assert at < began["ffn 0", step, layer, "experts"], (rank, step, layer)
    requests.get(f"{server.url}/afd/topology", timeout=30).raise_for_status()


def test_the_straggler_is_named(server, scrapes):
    """An FFN rank that stands still for a second, in the middle of a decode."""
    (pid,) = server.ffn_pids()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, server, tokens=200)
        time.sleep(1)
        psutil.Process(pid).send_signal(signal.SIGSTOP)
        time.sleep(1)
        psutil.Process(pid).send_signal(signal.SIGCONT)
        running.result()
    time.sleep(1.5)
    page = Scrape(f"{server.url}/metrics")
    assert page.sum("straggler_steps_total", role="attn", peer="ffn 0") >= 1
    assert re.search(r"AFD straggler: attn \d waited [\d.]+ ms for ffn 0", server.log.read_text())
