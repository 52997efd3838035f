"""`auto` rank counts: resolved on GPUs that are made up here, refused everywhere else."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
from planner.harness import PLANNER

from sglang.srt.disaggregation.afd import auto_ranks, config
from sglang.srt.disaggregation.afd.auto_ranks import Gpus
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.server_args import ServerArgs


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with nothing but the config.json of Qwen3-235B FP8."""
    config_json = json.loads((PLANNER / "data/models/Qwen3-235B-A22B-FP8.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config_json, "model_type": "qwen3_moe"}))
    return str(tmp_path)


def arguments(checkpoint: str, **changed) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "afd_attn_ranks": "auto",
            "afd_ffn_ranks": "auto",
            "afd_role": "all",
            "afd_connector": "auto",
            "afd_microbatches": "auto",
            "device": None,
            "quantization": None,
            "kv_cache_dtype": "auto",
            "context_length": None,
            "model_path": checkpoint,
            "revision": None,
            **changed,
        }
    )


@pytest.fixture
def gpus(monkeypatch):
    """Eight H200s, as far as `auto_ranks` can tell."""
    found = [Gpus(8, "NVIDIA H200")]
    monkeypatch.setattr(auto_ranks, "visible_gpus", lambda args: found[0])
    return found


def test_both_pools_take_all_gpus(checkpoint, gpus):
    args = arguments(checkpoint)
    auto_ranks.resolve(args)
    assert isinstance(args.afd_attn_ranks, int)
    assert isinstance(args.afd_ffn_ranks, int)
    assert args.afd_attn_ranks + args.afd_ffn_ranks == 8
    # 227 GB of experts do not fit one H200 of 141 GB.
    assert args.afd_ffn_ranks >= 2


@pytest.mark.parametrize(("typed", "result"), [((5, "auto"), (5, 3)), (("auto", 2), (6, 2))])
def test_a_typed_number_stays(checkpoint, gpus, typed, result):
    args = arguments(checkpoint, afd_attn_ranks=typed[0], afd_ffn_ranks=typed[1])
    auto_ranks.resolve(args)
    assert (args.afd_attn_ranks, args.afd_ffn_ranks) == result


def test_smaller_experts_need_fewer_ffn_ranks(checkpoint, gpus, monkeypatch):
    """A 30 GB model on the same GPUs leaves more of them to attention."""
    big, small = arguments(checkpoint), arguments(checkpoint)
    auto_ranks.resolve(big)
    other = json.loads((PLANNER / "data/models/Qwen3-30B-A3B-FP8.json").read_text())
    monkeypatch.setattr(auto_ranks, "model_config", lambda args: other)
    auto_ranks.resolve(small)
    assert small.afd_ffn_ranks < big.afd_ffn_ranks


def test_numbers_are_left_alone(checkpoint):
    args = arguments(checkpoint, afd_attn_ranks=3, afd_ffn_ranks=2)
    auto_ranks.resolve(args)
    assert (args.afd_attn_ranks, args.afd_ffn_ranks) == (3, 2)


def test_the_planners_doubt_is_logged(checkpoint, gpus, caplog):
    with caplog.at_level("INFO", logger=auto_ranks.__name__):
        auto_ranks.resolve(arguments(checkpoint))
    text = caplog.text
    assert "AFD planner advises against AFD here: colocated EP8" in text


REFUSED = [
    ({"device": "cpu"}, (8, "NVIDIA H200"), "on CPU, or with other devices, type both numbers"),
    ({}, (0, ""), "0 can be used"),
    ({}, (1, "NVIDIA H200"), "1 can be used"),
    ({"afd_role": "attn"}, (8, "NVIDIA H200"), "auto plans one host, and --afd-role is attn"),
    ({}, (8, "NVIDIA A100-SXM4-80GB"), "no numbers for 'NVIDIA A100-SXM4-80GB'"),
    ({}, (2, "NVIDIA H200"), "227 GB of routed experts need 2 FFN ranks of h200, and --gpus is 2"),
    ({"afd_attn_ranks": 8}, (8, "NVIDIA H200"), "M = 8 and N = any are no layout of 8 GPUs"),
    ({"afd_connector": "gloo"}, (8, "NVIDIA H200"), "the planner has no numbers"),
]


@pytest.mark.parametrize(("changed", "found", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_refusals_say_what_to_type(checkpoint, gpus, changed, found, text):
    gpus[0] = Gpus(*found)
    with pytest.raises(AFDConfigError) as caught:
        auto_ranks.resolve(arguments(checkpoint, **changed))
    assert text in str(caught.value)


def test_server_arguments_on_cpu_refuse_auto_by_name(checkpoint):
    with pytest.raises(AFDConfigError, match="--afd-attn-ranks auto divides this host's GPUs"):
        ServerArgs(
            model_path=checkpoint, device="cpu", disaggregation_mode="afd", afd_attn_ranks="auto"
        )


def test_the_command_line_takes_numbers_and_auto(capsys):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    typed = ["--model-path", "m", "--afd-attn-ranks", "auto", "--afd-ffn-ranks", "3"]
    parsed = parser.parse_args(typed)
    assert (parsed.afd_attn_ranks, parsed.afd_ffn_ranks) == ("auto", 3)
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "m", "--afd-attn-ranks", "some"])
    assert "argument --afd-attn-ranks" in capsys.readouterr().err


def test_auto_without_the_mode_has_no_effect_and_is_refused(checkpoint):
    with pytest.raises(AFDConfigError, match="--afd-ffn-ranks auto has no effect without"):
        config.check_unused(ServerArgsLike())


class ServerArgsLike(SimpleNamespace):
    """Server arguments with every AFD flag at its default but one."""

    def __init__(self) -> None:
        fields = {flag.name[2:].replace("-", "_"): flag.default for flag in config.FLAGS}
        super().__init__(**{**fields, "afd_ffn_ranks": "auto"})
