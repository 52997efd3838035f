"""What is gloo's own: tensors of inference mode, where it listens, and the log line."""

from __future__ import annotations

import logging

import pytest
import torch
from connector import contract, faults, harness

from sglang.srt.disaggregation.afd.connector import gloo, gloo_link
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.store import host_store
from sglang.srt.disaggregation.afd.errors import AFDConfigError


def _rendezvous(host: str) -> Rendezvous:
    return Rendezvous(store_host=host, store_port=1, timeout_s=1)


def test_inference_mode_may_end_between_two_transfers(run_link):
    spec = contract.make_spec(1, 1, torch.bfloat16)
    harness.raise_first(run_link("gloo", spec, faults.in_and_out_of_inference_mode))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_with_tokens_in_a_message_of_their_own(pool, dtype):
    spec = contract.make_spec(3, 2, dtype)
    rendezvous = harness.new_rendezvous()
    for rank in range(spec.topology.world_size):
        pool.start(rank, faults.run_rank_with_separate_tokens, spec, rank, rendezvous)
    harness.raise_first(pool.results(spec.topology.world_size))


@pytest.mark.pain(45, 51)
def test_a_loopback_store_pins_the_loopback_interface(monkeypatch, caplog):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with caplog.at_level(logging.INFO, logger=gloo_link.__name__):
        gloo_link._listen("attn 0", _rendezvous("localhost"))
    assert "attn 0: connector gloo over TCP listens on" in caplog.text
    assert "no-such-interface" not in caplog.text


@pytest.mark.pain(51)
def test_an_interface_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    monkeypatch.setattr(gloo_link, "_local_address", lambda rendezvous: "192.0.2.1")
    with pytest.raises(AFDConfigError, match="GLOO_SOCKET_IFNAME=no-such-interface"):
        gloo_link._listen("attn 0", _rendezvous("192.0.2.2"))


@pytest.mark.pain(41)
def test_a_store_on_a_foreign_host_is_refused():
    with pytest.raises(AFDConfigError, match="--afd-bootstrap-addr names host 192.0.2.1"):
        host_store("192.0.2.1", timeout_s=1)


@pytest.mark.pain(41)
def test_an_unknown_host_is_named():
    with pytest.raises(AFDConfigError, match="--afd-bootstrap-addr nowhere.invalid"):
        gloo_link._local_address(_rendezvous("nowhere.invalid"))


@pytest.mark.pain(11)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_a_message_holds_its_three_parts_side_by_side(dtype, num_rows):
    spec = contract.make_spec(1, 1, dtype)
    data = torch.empty(num_rows * gloo._token_bytes(spec), dtype=torch.uint8)
    hidden, ids, weights = gloo._views(spec, data, num_rows)
    assert hidden.shape == (num_rows, spec.hidden_size)
    assert ids.shape == weights.shape == (num_rows, spec.topk)
    assert hidden.nbytes + ids.nbytes + weights.nbytes == data.nbytes
