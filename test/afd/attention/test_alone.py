"""A model that believes to be alone: sizes, reductions, and steps in which its rank idles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.disaggregation.afd.attention import alone, runtime


class Model:
    def __init__(self) -> None:
        from sglang.srt.runtime_context import get_parallel

        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=11))
        self.built_with = get_parallel().tp_size
        self.seen: list[tuple[int, int]] = []

    def forward(self, input_ids, positions, forward_batch):
        from sglang.srt.layers.moe.utils import get_moe_a2a_backend
        from sglang.srt.runtime_context import get_parallel

        self.seen.append((get_parallel().tp_size, get_parallel().attn_dp_size))
        assert get_moe_a2a_backend().is_none()
        return alone.all_reduce(lambda x: x * 1000, input_ids)

    def load_weights(self, weights):
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().tp_rank


def batch(idle: bool) -> SimpleNamespace:
    mode = SimpleNamespace(is_idle=lambda: idle)
    return SimpleNamespace(forward_mode=mode, input_ids=torch.ones(2, dtype=torch.int64))


@pytest.fixture
def model():
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(tp_size=4, tp_rank=3, attn_dp_size=4, attn_dp_rank=3):
        yield alone.build(Model)
        assert get_parallel().tp_size == 4, "the world of one has ended"


def test_sizes_hold_while_it_is_built_loaded_and_run(model):
    assert model.built_with == 1
    assert model.load_weights([]) == 0
    working = batch(idle=False)
    assert torch.equal(model.forward(working.input_ids, None, working), working.input_ids)
    assert model.seen == [(1, 1)]


def test_reduction_outside_is_upstreams():
    assert alone.all_reduce(lambda x: x * 2, torch.ones(1)).item() == 2


def test_idle_rank_takes_part_in_transfers_and_computes_nothing(model, monkeypatch):
    steps = []
    monkeypatch.setattr(
        runtime, "current", lambda: SimpleNamespace(idle_step=lambda: steps.append(1))
    )
    output = model.forward(None, None, forward_batch=batch(idle=True))
    assert steps == [1]
    assert model.seen == []
    assert output.next_token_logits.shape == (2, 11)


def test_recurrent_state_is_sized_for_a_model_that_is_not_sharded():
    from sglang.srt.runtime_context import get_parallel

    class Config:
        mamba2_cache_params = property(lambda self: get_parallel().tp_size)

    class Recurrent(Model):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

    with get_parallel().override(tp_size=4, tp_rank=3):
        for _ in range(2):  # loaded again
            assert alone.build(Recurrent).config.mamba2_cache_params == 1
        assert get_parallel().tp_size == 4
