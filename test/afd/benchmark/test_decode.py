"""The parts of bench_decode: what it runs, what it makes of a run, and a whole run on CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import report
import torch
from decode import arena, configurations, kernels, profile, resident, routing, shapes, weights
from decode.configurations import Settings, command_line, parse
from decode.profile import Kernel
from decode.rows import Samples, row
from decode.steps import shape_of

from sglang.srt.disaggregation.afd.planner import hardware, results

ROOT = Path(__file__).resolve().parents[3]


def settings(device: str = "cuda") -> Settings:
    return Settings(
        model="folder",
        device=device,
        batches=(64, 16),
        max_tokens=1000,
        max_length=99,
        attention_backend="flashinfer",
        kv_dtype="auto",
        peer_timeout_s=60,
        flags=(),
    )


# --- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, connector, attn, ffn, microbatches, graph",
    [
        ("colocated:1@1", "colocated", 1, 0, 1, True),
        ("colocated:dp2ep2+deepep", "colocated", 2, 0, 1, True),
        ("colocated:dp8ep8", "colocated", 8, 0, 1, True),
        ("colocated:tp4", "colocated", 4, 0, 1, True),
        ("null:mb2", "null", 1, 0, 2, True),
        ("afd:nccl:mb2:2a1f", "nccl", 2, 1, 2, True),
        ("afd:deepep:mb1:eager:deep_gemm", "deepep", 1, 1, 1, False),
    ],
)
def test_a_name_says_what_runs(name, connector, attn, ffn, microbatches, graph):
    found = parse(name)
    said = (found.connector, found.attn_ranks, found.ffn_ranks, found.microbatches, found.graph)
    assert said == (connector, attn, ffn, microbatches, graph)
    assert found.gpus == attn + ffn


@pytest.mark.parametrize(
    "name", ["colocated:3", "colocated:dp4ep2", "afd", "afd:nccl:mb3", "disaggregated:1"]
)
def test_a_name_that_says_nothing_is_refused(name):
    with pytest.raises(ValueError, match=name):
        parse(name)


def test_second_gpu():
    assert list(parse("colocated:1@1").attn_gpus) == [1]
    assert list(parse("colocated:dp2ep2").attn_gpus) == [0, 1]


def test_command_line_has_the_buckets_and_no_prefill_graph():
    line = command_line(parse("afd:nccl:mb2"), settings(), (1, 2))
    text = " ".join(line)
    assert "--cuda-graph-bs-decode 16 64" in text
    assert "--cuda-graph-backend-prefill disabled" in text
    assert "--afd-bootstrap-addr 127.0.0.1:2" in text
    eager = " ".join(command_line(parse("colocated:1:eager"), settings(), (1, 2)))
    assert "--cuda-graph-backend-decode disabled" in eager
    assert "--afd" not in eager


def test_requests_are_per_rank_where_upstream_divides_them():
    line = command_line(parse("colocated:dp2ep2"), settings(), (1, 2))
    assert line[line.index("--max-running-requests") + 1] == "128"


# --- shapes and weights ------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.names())
def test_a_shape_is_a_folder_with_a_config(name, tmp_path):
    config = json.loads((shapes.write(name, tmp_path, layers=2) / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["model_type"]
    assert not any(key.startswith("_") for key in config)
    if "layer_types" in config:
        assert len(config["layer_types"]) == 2
    assert shapes.kv_bytes_per_token(config, "auto") > 0


def test_kv_size():
    config = shapes.config("Qwen3-30B-A3B-FP8")
    assert shapes.kv_bytes_per_token(config, "auto") == 48 * 2 * 4 * 128 * 2
    assert shapes.kv_bytes_per_token(config, "fp8_e4m3") == 48 * 2 * 4 * 128


class Layer(torch.nn.Module):
    """A few parameters as a model of 128 experts has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(256, 128, bias=False)
        self.norm = torch.nn.LayerNorm(256)
        self.w13_weight = torch.nn.Parameter(torch.zeros(2, 64, 256).to(torch.float8_e4m3fn), False)
        self.w13_weight_scale_inv = torch.nn.Parameter(torch.zeros(2, 1, 2), False)
        self.k_scale = torch.nn.Parameter(torch.zeros(()), False)


def test_weights_are_the_same_wherever_they_are_made():
    one, other = Layer(), Layer()
    for layer in (one, other):
        weights.fill(layer)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor.float(), other.state_dict()[name].float()), name


def test_weights_compute_something():
    layer = Layer()
    weights.fill(layer)
    assert bool((layer.norm.weight == 1).all()) and bool((layer.norm.bias == 0).all())
    codes = layer.w13_weight.float()
    assert bool(codes.isfinite().all())
    assert (codes == 0).float().mean() < 0.05, "upstream's dummy FP8 weights are nearly all 0"
    assert 0.01 < float((codes * layer.w13_weight_scale_inv.max()).std()) < 0.05
    assert float(layer.k_scale) == 1
    logits = torch.randn(512, 256) @ layer.gate.weight.T
    assert 0.8 < float(logits.detach().std()) < 1.2


def test_routing_spreads_and_repeats():
    layer = Layer()
    weights.fill(layer)
    hidden = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    ids = (hidden @ layer.gate.weight.T).topk(8).indices
    rows = torch.bincount(ids.flatten(), minlength=128)
    assert int(rows.min()) > 0
    assert routing.max_rows_per_expert(ids[None]) == int(rows.max()) < 4 * 1024 * 8 / 128


# --- KV memory ---------------------------------------------------------------------------------


def test_kv_buffers_are_carved_from_the_arena():
    memory = torch.zeros(1 << 23, dtype=torch.uint8)
    carver = arena._Torch(memory)
    shape = (1 << 10, 4, 128)
    first = carver.zeros(shape, dtype=torch.bfloat16, device="cuda")
    second = carver.zeros(shape, dtype=torch.bfloat16, device="cuda")
    first.fill_(1)
    assert first.shape == shape and not bool(second.any())
    assert first.data_ptr() == memory.data_ptr()
    assert carver.zeros((8,), dtype=torch.int32, device="cpu").device.type == "cpu"
    assert carver.float32 is torch.float32
    with pytest.raises(MemoryError, match="--kv own"):
        for _ in range(10):
            carver.zeros(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_kv_is_finite(dtype):
    buffer = torch.zeros(1000, dtype=dtype)
    arena.fill(buffer)
    values = buffer.view(torch.float8_e4m3fn) if dtype == torch.uint8 else buffer
    assert bool(values.float().isfinite().all()) and float(values.float().std()) > 0


# --- kernels -----------------------------------------------------------------------------------


def test_helpers_belong_to_their_neighbours():
    names = {
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(deep_gemm::GemmType)0>": kernels.DENSE,
        "flashinfer::BatchDecodeWithPagedKVCacheKernel<...>": kernels.FMHA,
        "per_token_group_quant_8bit_kernel": kernels.DENSE,
        "nvjet_tst_128x32": kernels.DENSE,
        "moe::topkGatingSoftmax<...>": kernels.DENSE,
        "_per_token_group_quant_8bit": kernels.MOE,
        "fused_moe_kernel": kernels.MOE,
        "act_and_mul_kernel": kernels.MOE,
        "moe_sum_reduce_warp_per_token": kernels.MOE,
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": kernels.COMM,
    }
    assert kernels.classify(list(names)) == list(names.values())


def kernel(name: str, start: int, end: int, launch: int = 1) -> Kernel:
    return Kernel(name, start, end - start, launch)


def test_overlap_is_what_lies_under_attention():
    attn = [
        kernel("BatchDecode", 0, 100),
        kernel("nccl", 100, 160),
        kernel("gemm", 160, 200),
    ]
    ffn = [kernel("nccl", 0, 40), kernel("fused_moe", 40, 140), kernel("fused_moe", 150, 170)]
    found = kernels.overlap(attn, ffn)
    assert found["ffn_busy_ms"] == pytest.approx(120e-6)
    assert found["under_attention"] == pytest.approx((60 + 10) / 120)
    assert found["under_fmha"] == pytest.approx(60 / 120)
    assert kernels.by_class(ffn, "ffn")["moe"] == pytest.approx(120e-6)


def test_spans_merge_streams():
    given = [kernel("gemm", 0, 10), kernel("gemm", 5, 8), kernel("gemm", 9, 20)]
    assert kernels.spans(given, "attn", (kernels.DENSE,)) == [(0, 20)]


def test_a_kernel_that_starts_early_computes_when_it_is_its_turn():
    """As with programmatic dependent launches: the norm waits for the connector before it."""
    given = [
        kernel("afd::combine_kernel", 0, 100),
        kernel("norm", 5, 104),
        kernel("gemm", 103, 120),
        kernel("copy", 50, 60)._replace(stream=7),
    ]
    found = {each.name: (each.start, each.end) for each in kernels.in_turn(given)}
    assert found["norm"] == (100, 104)
    assert found["gemm"] == (104, 120)
    assert found["copy"] == (50, 60), "another stream"
    ffn = [kernel("gemm", 10, 90)]
    assert kernels.overlap(kernels.in_turn(given[:3]), ffn)["under_attention"] == 0


def test_steps_are_the_last_replays():
    few = [kernel("copy", 0, 1, launch=9)]
    replays = [
        kernel("gemm", 1000 * step + i, 1000 * step + i + 1, launch=step)
        for step in range(1, 4)
        for i in range(30)
    ]
    found = kernels.steps([*few, *replays], 2)
    assert [step[0].launch for step in found] == [2, 3]
    assert {len(step) for step in found} == {30}


def test_a_trace_is_read_in_nanoseconds():
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.5, "dur": 2.0}
    text = json.dumps(
        {
            "baseTimeNanoseconds": 10**18,
            "traceEvents": [
                {**event, "args": {"correlation": 7, "stream": 3}},
                {**event, "cat": "cpu_op"},
                {"ph": "M"},
            ],
        }
    )
    assert profile.read(text) == [Kernel("k", 10**18 + 1500, 2000, 7, 3)]


def test_a_step_is_small_json():
    given = [kernel("gemm", 10 * i, 10 * i + 5) for i in range(1500)]
    found = kernels.compact(given, "attn", 0)
    assert len(json.dumps(found, separators=(",", ":"))) < 40_000
    assert found["kernels"][1] == [0, kernels.CLASSES.index(kernels.DENSE), 10, 5]


# --- rows and tables ---------------------------------------------------------------------------


def make_row(name: str, step_ms: float, part: str = "all", **more) -> dict:
    samples = Samples(context=80)
    for rep in range(5):
        samples.add([[step_ms + rep, step_ms + rep]], [[step_ms, step_ms]])
    common = {
        "configuration": name,
        "model": "m",
        "layers": 48,
        "quant": "fp8",
        "kv_dtype": "bfloat16",
        "attention_backend": "flashinfer",
        "moe_runner_backend": "triton",
        "gate": "none",
        "ready_s": 70.0,
        **more,
    }
    return row(parse(name), samples, batch=64, context=64, part=part, common=common)


def test_a_row_is_what_the_planner_reads(tmp_path):
    rows = [make_row("colocated:1", 9), make_row("null:mb1", 5, "attn")]
    rows += [make_row("afd:nccl:mb1", 8), make_row("afd:nccl:mb1", 3, "ffn")]
    path = tmp_path / "decode.json"
    path.write_text(json.dumps({"bench": "decode", "rows": rows}))
    result = results.load(path)
    read = results.decode_rows(result, "t")
    assert [found["connector"] for found in read] == ["colocated", "null", "nccl"]


def test_statistics_are_of_repetitions():
    found = make_row("colocated:1", 9)
    assert (found["step_ms"], found["iqr"], found["reps"]) == (11, 3, 5)
    assert len(found["samples"]) == 10
    assert found["tokens_per_s_per_gpu"] == pytest.approx(64 / 9e-3, rel=1e-3)


def test_a_step_takes_as_long_as_its_slowest_rank():
    samples = Samples()
    samples.add([[1.0, 5.0], [2.0, 4.0]], [[1.0, 5.0], [2.0, 4.0]])
    assert samples.step_ms == [[2.0, 5.0]]


def test_gpus_share_the_tokens():
    assert make_row("colocated:dp2ep2", 9)["tokens_per_s_per_gpu"] == pytest.approx(7111, abs=1)
    assert make_row("afd:nccl:mb1", 9)["tokens_per_s_per_gpu"] == pytest.approx(3556, abs=1)


def test_tables():
    rows = [
        make_row("colocated:1", 9),
        make_row("null:mb2", 5, "attn"),
        make_row("afd:nccl:mb2", 6),
        make_row("afd:nccl:mb2", 3, "ffn"),
        make_row("afd:nccl:mb1", 1, gate="fail"),
    ]
    result = {"bench": "decode", "rows": rows, "gpus": ["G", "G"], "commit": "c" * 40}
    text = "\n".join(report.tables("f.json", result))
    assert "| colocated, 1 GPU, triton | 11.00 (3.00) |" in text
    assert "| T_a, mb=2 | 7.00 (3.00) |" in text
    assert "| AFD 1A1F nccl, mb=2, triton* | 1.14 |" in text, "8 / 7"
    assert "mb=1" not in text, "its gate failed"


def test_bucket():
    assert shape_of(15, 2, True).bucket == 8


# --- all of it ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_path_runs_on_cpu(tmp_path):
    """Side by side: AFD with two microbatches and with two attention ranks, T_a, T_e, and colocated.

    Upstream's DP attention with expert parallelism asks for NCCL, so it is not among them.
    """
    out = tmp_path / "decode.json"
    names = "afd:gloo:mb2,afd:gloo:mb1:2a1f;null:mb2,colocated:1"
    command = [sys.executable, str(ROOT / "benchmark/afd/bench_decode.py"), "--device", "cpu"]
    command += ["--shape", "tiny", "--configs", names, "--batch", "4", "--context", "32"]
    command += ["--reps", "2", "--steps", "3", "--ahead", "1,0", "--ready-timeout", "400"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = results.load(out)["rows"]
    parts = [(found["configuration"], found["part"], found["ahead"]) for found in rows]
    assert parts == [
        ("afd:gloo:mb2", "all", 1),
        ("afd:gloo:mb2", "ffn", 1),
        ("afd:gloo:mb2", "all", 0),
        ("afd:gloo:mb1:2a1f", "all", 1),
        ("afd:gloo:mb1:2a1f", "ffn", 1),
        ("afd:gloo:mb1:2a1f", "all", 0),
        ("null:mb2", "attn", 1),
        ("null:mb2", "attn", 0),
        ("colocated:1", "all", 1),
        ("colocated:1", "all", 0),
    ]
    assert all(found["max_rows_per_expert"] >= 1 for found in rows)
    assert {found["routing"] for found in rows if found["part"] == "ffn"} == {"recorded"}
    assert not any(found["graph"] for found in rows)


def test_a_table_names_configurations():
    import bench_decode

    goal = [configurations.parse(name).connector for name in bench_decode.table("goal", ["nccl"])]
    assert goal == ["colocated", "colocated", "null", "null", "nccl", "nccl"]
    ablate = bench_decode.table("ablate", ["nccl", "deepep"])
    assert len({configurations.parse(name) for name in ablate}) == 6


# --- the resident batch --------------------------------------------------------------------------


def resident_of(name: str, context: int = 8192, shape: str = "Qwen3-235B-A22B-FP8") -> int:
    return resident.batch(
        parse(name), shape, shapes.config(shape), "auto", hardware.load("h200"), context
    )


def test_each_layout_has_the_batch_that_its_own_memory_holds():
    afd, narrow, wide = map(
        resident_of, ("afd:nvlink:mb1:6a2f", "colocated:dp4ep4", "colocated:dp8ep8")
    )
    assert afd > wide > narrow > 0
    assert resident_of("null:mb1") == afd
    assert 1.9 < resident_of("null:mb1", 4096) / afd < 2.1
    assert resident_of("afd:nvlink:mb2:6a2f") in (afd, afd - 1)


@pytest.mark.parametrize(
    ("name", "context", "what"),
    [
        ("colocated:tp2", 8192, "share one batch"),
        ("colocated:1", 8192, "220 GiB of weights leave no room on .* for 1 request"),
        ("null:mb2", 4_000_000, "for 2 request"),
    ],
)
def test_what_has_no_resident_batch_is_refused_by_name(name, context, what):
    with pytest.raises(ValueError, match=what) as raised:
        resident_of(name, context)
    assert name in str(raised.value)


def test_a_table_of_resident_batches_has_a_column_per_context():
    rows = [
        make_row(name, step_ms) | {"resident": True, "batch_per_rank": size, "context": 8192}
        for name, step_ms, size in (("afd:nccl:mb1", 9, 60), ("colocated:dp2ep2", 12, 30))
    ]
    lines = report._table("", [(8192, 0)], rows, report._step)
    assert lines[0] == "|  | resident, 8192 tokens |"
    assert "B=60" in lines[2] and "B=30" in lines[3]
