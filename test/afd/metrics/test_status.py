"""The topology document and the page, from what ranks report."""

from __future__ import annotations

import html.parser
import types

import pytest

from sglang.srt.disaggregation.afd.status import page, topology


def state(rank, **more):
    row = {"host": "node-a", "pid": 11, "device": "cpu", "steps": 7, "tokens": 12345}
    server = {
        "connector": "gloo",
        "capacity": 64,
        "microbatches": 2,
        "afd_version": "1",
        "sglang_version": "2",
        "moe_layers": 3,
        "param_bytes": 5,
    }
    return {
        "afd": {"rank": rank, **row, **server, **more},
        "afd_live": {"heartbeat_age_s": {"attn 1": 0.5, "ffn 0": 9.25} if rank == 0 else {}},
    }


FFN_ROW = {
    "rank": 0,
    "host": "<b>node</b>",
    "pid": 12,
    "device": "cuda:0 X",
    "steps": 7,
    "tokens": 99,
    "param_bytes": 5,
    "experts": (4, 8),
}
LOADS = [
    types.SimpleNamespace(
        dp_rank=1,
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_used_tokens=10,
        max_total_num_tokens=40,
    )
]


def build():
    return topology.build([state(1), state(0, ffn=[FFN_ROW])], LOADS)


@pytest.mark.pain(45)
def test_ranks_are_in_order_with_their_loads_and_ages():
    found = build()
    assert [rank["rank"] for rank in found["attention"]] == [0, 1]
    assert [rank["heartbeat_age_s"] for rank in found["attention"]] == [0.0, 0.5]
    assert [rank["num_running_reqs"] for rank in found["attention"]] == [0, 3]
    assert found["ffn"][0]["heartbeat_age_s"] == 9.25
    assert (found["connector"], found["microbatches"], found["capacity"]) == ("gloo", 2, 64)


class Balance(html.parser.HTMLParser):
    """Fails on a tag that is closed without being open."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_well_formed_and_escapes():
    text = page.render(build())
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert "&lt;b&gt;node&lt;/b&gt;" in text and "<b>node" not in text
    assert "2A1F" in text and "12,345" in text and "4 to 7" in text
    assert '<td class="bad">9.2 s ago</td>' in text and '<td class="bad">0.5' not in text
    assert "10 of 40 tokens" in text
