"""Scripts of single ranks for the tests of faults and of gloo; run in threads or in processes."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import torch
from connector import contract

from sglang.srt.disaggregation.afd.connector import gloo
from sglang.srt.disaggregation.afd.connector.base import AttnConnector, FFNConnector, Transfer
from sglang.srt.disaggregation.afd.errors import AFDError

TRANSFER = Transfer(step_id=41, layer=5, microbatch=1, round_idx=0)


def dispatch(connector: AttnConnector, spec, rank, transfer=TRANSFER):
    return connector.dispatch(transfer, *contract.random_tokens(spec, 2, seed=rank))


def round_trip(connector: AttnConnector, spec, rank, transfer=TRANSFER):
    return connector.combine(dispatch(connector, spec, rank, transfer))


def serve(connector: FFNConnector, spec, rank, transfer=TRANSFER):
    batch = connector.receive(transfer)
    connector.send(batch, batch.hidden_RH)
    return batch


def stall(connector, spec, rank, seconds=3):
    time.sleep(seconds)


def leave(connector, spec, rank):
    """Close the connector at once."""


def dispatch_only(connector: AttnConnector, spec, rank):
    """Return the seconds of a dispatch; stay until the FFN side has given up."""
    start = time.monotonic()
    dispatch(connector, spec, rank)
    seconds = time.monotonic() - start
    time.sleep(3)
    return seconds


def receive_only(connector: FFNConnector, spec, rank):
    return connector.receive(TRANSFER)


def die(connector, spec, rank):
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def timed_error(script, connector, spec, rank):
    """The script must fail: returns the error and the seconds it took."""
    start = time.monotonic()
    try:
        script(connector, spec, rank)
    except AFDError as error:
        return error, time.monotonic() - start
    raise AssertionError("no error")


def timed(script):
    return partial(timed_error, script)


def error_twice(connector: FFNConnector, spec, rank):
    """After a failure the connector says the same again."""
    errors = []
    for _ in range(2):
        try:
            connector.receive(TRANSFER)
        except AFDError as error:
            errors.append(str(error))
    return errors


def run_rank_with_separate_tokens(spec, world_rank, rendezvous):
    """The contract over gloo, while at most one token fits beside a header."""
    usual, gloo._INLINE_BYTES = gloo._INLINE_BYTES, 200
    try:
        contract.run_rank("gloo", spec, world_rank, rendezvous)
    finally:
        gloo._INLINE_BYTES = usual


def in_and_out_of_inference_mode(connector, spec, rank):
    """The first transfer runs under inference mode, the second one does not."""
    script = round_trip if isinstance(connector, AttnConnector) else serve
    with torch.inference_mode():
        script(connector, spec, rank)
    script(connector, spec, rank)
