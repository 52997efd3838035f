"""One microbatch or two: what is tried, what is kept, and that all ranks take it at one replay."""

from __future__ import annotations

import pytest

from sglang.srt.disaggregation.afd.attention.choice import (
    AGAIN,
    BLOCK,
    DELAY,
    MEASURED,
    SKIP,
    WIDTHS,
    Choice,
)


class Board:
    def __init__(self):
        self.words: dict[str, str] = {}

    def write(self, key, value):
        assert key not in self.words, "said twice"
        self.words[key] = value

    def read(self, key):
        return self.words[key]  # a KeyError is a rank that would wait for ever


class Clock:
    """A device on which each replay takes what `ms` says of the graph that runs."""

    def __init__(self, ms):
        self.ms, self.width, self.timed = ms, 0, []
        clock = self

        class Timer:
            def start(self):
                pass

            def stop(self):
                self.took = clock.ms[clock.width]
                clock.timed.append(clock.width)

            def milliseconds(self):
                return self.took

        self.new = Timer


def run(choice, clock, batch, replays):
    widths = []
    for _ in range(replays):
        with choice.replay(batch) as width:
            clock.width = width
        widths.append(width)
    return widths


@pytest.mark.parametrize("faster", [1, 2])
def test_the_faster_graph_is_kept(faster):
    clock = Clock({faster: 1.0, 3 - faster: 1.2})
    choice = Choice(True, clock.new, Board())
    widths = run(choice, clock, 8, MEASURED + DELAY + 100)
    tried = [width for width in WIDTHS * 2 for _ in range(BLOCK)]
    assert widths[:MEASURED] == tried
    assert set(widths[MEASURED + DELAY :]) == {faster}
    assert len(clock.timed) == 4 * (BLOCK - SKIP)
    assert choice.results[8].microbatches == faster
    assert choice.results[8].ms == clock.ms


def test_batch_sizes_choose_for_themselves():
    clock = Clock({1: 1.0, 2: 2.0})
    choice = Choice(True, clock.new, Board())
    run(choice, clock, 1, MEASURED + DELAY + 1)
    clock.ms = {1: 3.0, 2: 2.0}
    run(choice, clock, 64, MEASURED + DELAY + 1)
    assert {batch: found.microbatches for batch, found in choice.results.items()} == {1: 1, 64: 2}


def test_it_is_measured_again_when_the_traffic_changed():
    clock = Clock({1: 1.0, 2: 2.0})
    choice = Choice(True, clock.new, Board())
    assert run(choice, clock, 8, AGAIN + 1)[-1] == 1
    clock.ms = {1: 3.0, 2: 2.0}
    assert run(choice, clock, 8, MEASURED + DELAY + 5)[-1] == 2


def test_all_attention_ranks_replay_the_same_graphs():
    board = Board()
    leader_clock, member_clock = Clock({1: 1.0, 2: 2.0}), Clock({1: 9.0, 2: 1.0})
    leader = Choice(True, leader_clock.new, board)
    member = Choice(False, member_clock.new, board)
    for _ in range(2):
        replays = AGAIN + 1
        assert run(leader, leader_clock, 8, replays) == run(member, member_clock, 8, replays)
    assert not member_clock.timed
    assert list(board.words) == ["microbatches/8/0", "microbatches/8/1"]
