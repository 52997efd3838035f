"""Lanes: one runs at a time, they take turns where they give way, and their errors come back."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.disaggregation.afd.attention import overlap
from sglang.srt.disaggregation.afd.attention.overlap import Lane


@pytest.fixture(scope="module")
def lanes() -> tuple[Lane, Lane]:
    return Lane(0), Lane(1)


def test_lanes_take_turns_where_they_give_way(lanes):
    seen = []

    def work() -> str:
        for step in range(3):
            seen.append((overlap.microbatch(), step))
            overlap.give_way()
        return f"result {overlap.microbatch()}"

    for lane in lanes:
        lane.begin(work)
    while not all(lane.done for lane in lanes):
        for lane in lanes:
            if not lane.done:
                lane.resume()
    assert seen == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [lane.result for lane in lanes] == ["result 0", "result 1"]


def test_outside_of_a_lane_nothing_waits():
    overlap.give_way()
    assert overlap.microbatch() == 0


def test_error_of_a_lane_is_raised_where_it_is_waited_for(lanes):
    def broken() -> None:
        overlap.give_way()
        raise RuntimeError("in the lane")

    lanes[0].begin(broken)
    with pytest.raises(RuntimeError, match="in the lane"):
        lanes[0].resume()
    lanes[0].begin(lambda: 7)
    assert lanes[0].result == 7


def test_lane_has_the_settings_of_the_main_thread(lanes):
    def settings() -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        lanes[0].begin(settings)
    assert lanes[0].result == (True, False)
    with torch.no_grad():
        lanes[0].begin(settings)
    assert lanes[0].result == (False, False)
    lanes[0].begin(settings)
    assert lanes[0].result == (False, True)


def test_padding_along_a_dimension():
    positions = torch.arange(6).view(3, 2)
    assert overlap._padded(positions, 1, 4).shape == (3, 4)
    assert overlap._padded(positions, 1, 2) is positions
    assert overlap._padded(positions, 0, 5)[3:].eq(0).all()


class Residual(torch.nn.Module):
    def forward(self, positions, hidden_states, residual=None):
        return hidden_states, residual


def test_rank_without_rows_returns_what_it_was_given():
    layer = overlap.Layer(Residual(), 0, is_last=True)
    hidden, residual = torch.zeros(0, 4), torch.ones(0, 4)
    assert layer.unchanged((None, hidden, residual), {}) == (hidden, residual)
    assert layer.unchanged((None,), {"hidden_states": hidden, "residual": None}) == (hidden, hidden)
