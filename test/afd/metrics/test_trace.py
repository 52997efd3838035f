"""Merging the parts of all ranks: same steps, one clock, lanes that nest; and who keeps spans."""

from __future__ import annotations

import json

import pytest
from served.lanes import lanes, parents, steps

from sglang.srt.disaggregation.afd import profile
from sglang.srt.disaggregation.afd.connector.base import Transfer
from sglang.srt.disaggregation.afd.ffn.profiling import LoopTrace
from sglang.srt.disaggregation.afd.messages import Trace
from sglang.srt.disaggregation.afd.plan import make_plan
from sglang.srt.disaggregation.afd.trace import spans as spans_module
from sglang.srt.disaggregation.afd.trace.merge import merge
from sglang.srt.disaggregation.afd.trace.spans import SpanLog


def part(role, rank, step_ids, host="node-a", wall_ns=0, late_ns=0):
    """A rank's file: steps of 1000 ns with one transfer in each of two microbatches."""
    first, second = ("dispatch", "combine") if role == "attn" else ("receive", "send")
    planned, spans = [], []
    for step_id in step_ids:
        began = 10_000 + step_id * 1000 + late_ns
        planned.append([step_id, "decode", began])
        for microbatch in (0, 1):
            at = began + 100 + 50 * microbatch
            spans.append([first, step_id, 0, microbatch, 0, at, at + 40])
            spans.append([second, step_id, 0, microbatch, 0, at + 200, at + 300])
    return {
        "role": role,
        "rank": rank,
        "host": host,
        "pid": 7,
        "wall_ns": wall_ns,
        "steps": planned,
        "spans": spans,
    }


@pytest.mark.pain(75)
def test_only_steps_that_all_saw_whole_are_kept():
    trace = merge([part("ffn", 0, [4, 5, 6, 7, 8]), part("attn", 0, [3, 4, 5, 6, 7])])
    found = lanes(trace)
    assert list(found) == [("attn 0", 0), ("attn 0", 1), ("ffn 0", 0), ("ffn 0", 1)]
    for spans in found.values():
        assert steps(spans) == [4, 5, 6]  # the last of each rank may have been cut off
        assert ("step", "layer") in parents(spans)
    inner = {path[-1] for path in parents(found["ffn 0", 1])}
    assert inner == {"step", "layer", "receive", "send"}


@pytest.mark.pain(75)
def test_ranks_of_one_host_share_a_clock_and_others_are_shifted_to_it():
    near = part("ffn", 0, [0, 1, 2], wall_ns=999)  # read at another moment, on the same clock
    far = part("ffn", 1, [0, 1, 2], host="node-b", wall_ns=5_000, late_ns=-5_000)
    found = lanes(merge([part("attn", 0, [0, 1, 2]), near, far]))
    began = {rank: spans[0].began for (rank, lane), spans in found.items() if lane == 0}
    assert began == {"attn 0": 0.0, "ffn 0": 0.0, "ffn 1": 0.0}


def test_a_step_of_a_graph_has_no_transfers_and_is_shown():
    parts = [part("attn", 0, [0, 1]), part("ffn", 0, [0, 1])]
    for rank in parts:
        rank["spans"] = []
    assert steps(lanes(merge(parts))["ffn 0", 0]) == [0]


def test_nothing_in_common_is_an_error():
    with pytest.raises(ValueError, match="no step ran on all ranks"):
        merge([part("attn", 0, [0, 1]), part("ffn", 0, [])])


class Loop:
    def start_trace(self, spans):
        self.spans = spans

    def stop_trace(self, spans):
        assert spans is self.spans


def test_an_ffn_rank_writes_what_it_kept_between_the_messages(tmp_path):
    loop = Loop()
    trace = LoopTrace(loop, 3)
    trace(Trace(on=False, folder=str(tmp_path)))  # nothing was started
    trace(Trace(on=True, folder=""))
    first = loop.spans
    trace(Trace(on=True, folder=""))
    assert loop.spans is first
    first.begin(make_plan(9, "decode", (1,), 4, 1, 0))
    first.note("receive", Transfer(9, 2, 1, 0), 5, 6)
    first.write(tmp_path)
    written = json.loads((tmp_path / "ffn-3.json").read_text())
    assert (written["role"], written["rank"]) == ("ffn", 3)
    assert written["steps"][0][:2] == [9, "decode"]
    assert written["spans"] == [["receive", 9, 2, 1, 0, 5, 6]]


def test_spans_are_bounded(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(spans_module, "MOST_SPANS", 2)
    log = SpanLog("attn", 0)
    for at in range(4):
        log.note("dispatch", Transfer(0, 0, 0, 0), at, at + 1)
    log.write(tmp_path)
    assert len(json.loads((tmp_path / "attn-0.json").read_text())["spans"]) == 2
    assert "the rest is missing" in caplog.text


def test_the_command_says_why_there_is_no_trace(tmp_path, capsys):
    out = tmp_path / "trace.json"
    assert profile.main(["--url", "http://127.0.0.1:9", "--out", str(out)]) == 1
    assert "http://127.0.0.1:9/afd/topology does not answer" in capsys.readouterr().err
    assert not out.exists()
