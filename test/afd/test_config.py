"""Every refusal names the flag, its value and the way out."""

from __future__ import annotations

import dataclasses
import pickle
import re
import subprocess
import sys
import time

import psutil
import pytest

from sglang.srt.disaggregation.afd import config
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.server_args import AFDServerArgs
from sglang.srt.server_args import ServerArgs


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    from served.models import tiny_model

    return str(tiny_model(tmp_path_factory.mktemp("config") / "tiny"))


def make(model: str, **flags) -> AFDServerArgs:
    return ServerArgs(model_path=model, device="cpu", **{"disaggregation_mode": "afd", **flags})


def test_every_command_line_knows_the_flags():
    import argparse

    assert ServerArgs is AFDServerArgs
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    typed = ["--model-path", "m", "--disaggregation-mode", "afd"]
    for flag in config.FLAGS:
        if flag.type is bool:
            typed.append(flag.name)
        else:
            typed += [flag.name, str(flag.choices[0] if flag.choices else 3)]
    parsed = parser.parse_args(typed)
    for flag in config.FLAGS:
        assert getattr(parsed, flag.name[2:].replace("-", "_")) is not None


def test_resolved_settings(model):
    args = make(model, afd_attn_ranks=2, afd_ffn_ranks=3, afd_microbatches="2")
    assert args.disaggregation_mode == "null"
    assert args.afd_enabled
    assert (args.tp_size, args.dp_size, args.enable_dp_attention) == (2, 2, True)
    assert args.enable_two_batch_overlap
    assert not args.disable_overlap_schedule
    assert not args.disable_radix_cache
    settings = config.build(args)
    assert (settings.attn_ranks, settings.ffn_ranks, settings.microbatches) == (2, 3, 2)
    assert settings.connector == "gloo"
    assert settings.capacity == config.EAGER_CAPACITY


def test_arguments_survive_pickle_and_rebuild(model):
    args = make(model, afd_ffn_ranks=2)
    copy = pickle.loads(pickle.dumps(args))
    assert type(copy) is AFDServerArgs
    assert dataclasses.asdict(copy) == dataclasses.asdict(args)
    again = AFDServerArgs(**dataclasses.asdict(args))  # as upstream's offline benchmark does
    assert again.afd_enabled
    assert again.moe_a2a_backend == args.moe_a2a_backend


ORPHAN_SCRIPT = """
import multiprocessing, os, sys
from sglang.srt.server_args import ServerArgs

def child(args):
    print("child ran", flush=True)

if __name__ == "__main__":
    args = ServerArgs(model_path=sys.argv[1], device="cpu", disaggregation_mode="afd")
    process = multiprocessing.get_context("spawn").Process(target=child, args=(args,))
    process.start()
    print("CHILD", process.pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_child_whose_parent_died_during_import_ends(model, tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN_SCRIPT)
    done = subprocess.run(
        [sys.executable, script, model], capture_output=True, text=True, timeout=200, check=False
    )
    pid = int(re.search(r"CHILD (\d+)", done.stdout)[1])
    deadline = time.monotonic() + 100
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert "child ran" not in done.stdout


def test_ffn_rank_is_a_world_of_one(model):
    args = make(model, afd_attn_ranks=2, afd_ffn_ranks=2).for_ffn_rank(1)
    assert args.is_ffn_rank
    assert args.ffn_rank == 1
    assert (args.tp_size, args.dp_size, args.moe_a2a_backend) == (1, 1, "none")
    assert not args.enable_two_batch_overlap


REFUSED = [
    ({"afd_attn_ranks": 0}, "--afd-attn-ranks 0"),
    ({"afd_ffn_ranks": -1}, "--afd-ffn-ranks -1"),
    ({"afd_peer_timeout": 0}, "--afd-peer-timeout 0"),
    ({"afd_load_timeout": 0}, "--afd-load-timeout 0"),
    ({"afd_max_tokens_per_rank": 0}, "--afd-max-tokens-per-rank 0"),
    ({"afd_role": "expert"}, "--afd-role 'expert' is unknown; choose one of all, attn, ffn"),
    ({"afd_role": "ffn"}, "--afd-role ffn needs --afd-bootstrap-addr HOST:PORT"),
    ({"afd_bootstrap_addr": "somewhere"}, "--afd-bootstrap-addr 'somewhere' is not HOST:PORT"),
    ({"afd_bootstrap_addr": "h:99999"}, "--afd-bootstrap-addr 'h:99999' is not HOST:PORT"),
    ({"afd_microbatches": "3"}, "--afd-microbatches '3' is unknown; choose one of auto, 1, 2"),
    ({"afd_connector": "rdma"}, "--afd-connector 'rdma' is unknown"),
    ({"afd_connector": "nvlink"}, "--afd-connector nvlink is not part of this version"),
    ({"afd_connector": "loopback"}, "--afd-connector loopback joins both roles in one process"),
    ({"tp_size": 4, "afd_attn_ranks": 2}, "--tp-size 4 differs from --afd-attn-ranks 2"),
    ({"dp_size": 4, "afd_attn_ranks": 2}, "--dp-size 4 differs from --afd-attn-ranks 2"),
    ({"enable_two_batch_overlap": True, "afd_microbatches": "1"}, "--enable-two-batch-overlap"),
    ({"enable_mixed_chunk": True, "afd_microbatches": "2"}, "--enable-mixed-chunk"),
]


@pytest.mark.parametrize(("flags", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_impossible_flags_are_refused_by_name(model, flags, text):
    with pytest.raises(AFDConfigError) as caught:
        make(model, **flags)
    assert text in str(caught.value)


BAD_VALUES = {
    "speculative_algorithm": "EAGLE",
    "decoupled_spec_role": "drafter",
    "lora_paths": ["a"],
    "init_expert_location": "map.json",
    "elastic_ep_backend": "mooncake",
    "ep_join_mode": "scale",
    "kt_weight_path": "w",
    "weight_cache_mode": "daemon",
    "dllm_algorithm": "LowConfidence",
    "load_format": "gguf",
    "moe_a2a_backend": "mooncake",
    "deepep_mode": "low_latency",
    "disaggregation_mode": "prefill",
}


@pytest.mark.parametrize("limit", config.LIMITS, ids=[limit.field for limit in config.LIMITS])
def test_every_limit_refuses_and_names_its_flag(model, limit):
    args = make(model)
    assert not limit.is_bad(getattr(args, limit.field)), "the default must be served"
    default = type(args).__dataclass_fields__[limit.field].default
    bad = BAD_VALUES.get(limit.field, 2 if isinstance(default, int) and default == 1 else 1)
    assert limit.is_bad(bad)
    object.__setattr__(args, limit.field, bad)
    with pytest.raises(AFDConfigError) as caught:
        config.check_limits(args)
    assert "--" + limit.field.replace("_", "-") in str(caught.value)
    assert limit.reason in str(caught.value)
    object.__setattr__(args, "afd_allow_untested", True)
    if limit.grade == "untested":
        config.check_limits(args)
    else:
        with pytest.raises(AFDConfigError):
            config.check_limits(args)


@pytest.mark.parametrize("name", ["SGLANG_RUST_SERVER", "SGLANG_SCHEDULER_SKIP_ALL_GATHER"])
def test_environment_in_the_way_is_refused(model, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(AFDConfigError, match=name):
        make(model)


def test_flags_without_the_mode_are_refused(model):
    with pytest.raises(AFDConfigError, match="--afd-ffn-ranks 2 has no effect without"):
        make(model, disaggregation_mode="null", afd_ffn_ranks=2)
