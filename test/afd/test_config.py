"""Every refusal names the flag, its value and the way out."""

from __future__ import annotations

import dataclasses
import pickle
import re
import subprocess
import sys
import time
import types

import psutil
import pytest

from sglang.srt.disaggregation.afd import config
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.server_args import AFDServerArgs
from sglang.srt.server_args import MOE_A2A_BACKEND_CHOICES, ServerArgs


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


@pytest.mark.pain(76)
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


@pytest.mark.long
@pytest.mark.pain(56)
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


@pytest.mark.pain(64)
def test_arguments_of_an_ffn_rank_leave_the_servers_alone(model):
    args = make(model, afd_attn_ranks=2, afd_ffn_ranks=2, afd_microbatches="2")
    before = pickle.dumps(dataclasses.asdict(args))
    first, again = args.for_ffn_rank(1), args.for_ffn_rank(1)
    object.__setattr__(first, "lora_paths", ["a"])
    assert pickle.dumps(dataclasses.asdict(args)) == before
    assert dataclasses.asdict(args.for_ffn_rank(1)) == dataclasses.asdict(again)


@pytest.mark.pain(65)
def test_what_upstream_turned_on_by_itself_is_refused(model, monkeypatch):
    upstream = AFDServerArgs.__mro__[1]
    resolve = upstream.__post_init__

    def turning_on(self):
        resolve(self)
        object.__setattr__(self, "enable_eplb", True)

    monkeypatch.setattr(upstream, "__post_init__", turning_on)
    with pytest.raises(AFDConfigError, match="--enable-eplb=True is broken"):
        make(model)


@pytest.mark.pain(38)
@pytest.mark.parametrize("backend", MOE_A2A_BACKEND_CHOICES)
def test_every_moe_backend_is_refused_or_replaced(model, backend):
    """Whatever was typed, attention ranks end up on the branch that our dispatcher serves."""
    try:
        args = make(model, moe_a2a_backend=backend)
    except AFDConfigError as error:
        assert f"--moe-a2a-backend={backend!r}" in str(error)
        assert backend not in ("none", "deepep")
    else:
        assert args.moe_a2a_backend == make(model).moe_a2a_backend
        assert args.for_ffn_rank(0).moe_a2a_backend == "none"


def _graph_args(batches, capacity=None):
    decode = types.SimpleNamespace(backend="full", bs=batches)
    graphs = types.SimpleNamespace(decode=decode)
    return types.SimpleNamespace(cuda_graph_config=graphs, afd_max_tokens_per_rank=capacity)


@pytest.mark.pain(30)
def test_capacity_holds_the_largest_graph():
    assert config._capacity(_graph_args([1, 8])) == config.EAGER_CAPACITY
    assert config._capacity(_graph_args([1, 2 * config.EAGER_CAPACITY])) == 2048
    assert config._capacity(_graph_args([1, 64], 64)) == 64
    with pytest.raises(AFDConfigError, match="--afd-max-tokens-per-rank 63 is less than .* 64"):
        config._capacity(_graph_args([1, 64], 63))


REFUSED = [
    ({"afd_attn_ranks": 0}, "--afd-attn-ranks 0"),
    ({"afd_ffn_ranks": -1}, "--afd-ffn-ranks -1"),
    ({"afd_peer_timeout": 0}, "--afd-peer-timeout 0"),
    ({"afd_load_timeout": 0}, "--afd-load-timeout 0"),
    ({"afd_max_tokens_per_rank": 0}, "--afd-max-tokens-per-rank 0"),
    ({"afd_ffn_metrics_port": -1}, "--afd-ffn-metrics-port -1"),
    ({"afd_ffn_metrics_port": 65535, "afd_ffn_ranks": 2}, "for each of 2 FFN ranks"),
    ({"afd_role": "expert"}, "--afd-role 'expert' is unknown; choose one of all, attn, ffn"),
    ({"afd_role": "ffn"}, "--afd-role ffn needs --afd-bootstrap-addr HOST:PORT"),
    ({"afd_bootstrap_addr": "somewhere"}, "--afd-bootstrap-addr 'somewhere' is not HOST:PORT"),
    ({"afd_bootstrap_addr": "h:99999"}, "--afd-bootstrap-addr 'h:99999' is not HOST:PORT"),
    ({"afd_microbatches": "3"}, "--afd-microbatches '3' is unknown; choose one of auto, 1, 2"),
    ({"afd_microbatches": "measured"}, "--afd-microbatches measured times CUDA graphs"),
    ({"afd_connector": "rdma"}, "--afd-connector 'rdma' is unknown"),
    ({"afd_connector": "nvlink"}, "--afd-connector nvlink moves cuda tensors and --device is cpu"),
    ({"afd_connector": "loopback"}, "--afd-connector loopback joins both roles in one process"),
    ({"afd_connector": "null"}, "--afd-connector null moves nothing, so answers would be"),
    ({"tp_size": 4, "afd_attn_ranks": 2}, "--tp-size 4 differs from --afd-attn-ranks 2"),
    ({"dp_size": 4, "afd_attn_ranks": 2}, "--dp-size 4 differs from --afd-attn-ranks 2"),
    ({"enable_two_batch_overlap": True, "afd_microbatches": "1"}, "--enable-two-batch-overlap"),
    ({"enable_mixed_chunk": True, "afd_microbatches": "2"}, "--enable-mixed-chunk"),
]


@pytest.mark.pain(19)
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


@pytest.mark.pain(19, 68)
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


@pytest.mark.pain(70)
@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_RUST_SERVER",
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER",
        "SGLANG_SIMULATE_UNIFORM_EXPERTS",
        "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
    ],
)
def test_environment_in_the_way_is_refused(model, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(AFDConfigError, match=name):
        make(model)


def test_flags_without_the_mode_are_refused(model):
    with pytest.raises(AFDConfigError, match="--afd-ffn-ranks 2 has no effect without"):
        make(model, disaggregation_mode="null", afd_ffn_ranks=2)


@pytest.mark.pain(63)
def test_arguments_of_a_server_without_the_mode_report_upstreams_fields_only(model):
    args = make(model, disaggregation_mode="null")
    (upstream,) = [base for base in AFDServerArgs.__mro__[1:] if dataclasses.is_dataclass(base)]
    theirs = {field.name for field in dataclasses.fields(upstream)}
    copy = pickle.loads(pickle.dumps(args))
    for each in (args, copy):
        assert set(dataclasses.asdict(each)) == theirs
        assert not [name for name in vars(each) if name.startswith("afd")]
        assert (each.afd_enabled, each.afd_ffn_ranks) == (False, 1)
    assert {f"afd_{name}" for name in ("enabled", "role")} <= set(dataclasses.asdict(make(model)))
