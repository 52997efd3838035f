"""Runs in a process of its own: experts of one FFN rank on a GPU against FP32.

Arguments: folder, quantisation ("fp8" or "bf16"), MoE runner, FFN ranks, rank. Prints a line per
case, and `EXPERTS OK` if all held. Upstream's parallel state is global, hence the process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from sglang.srt.disaggregation.afd.connector.base import (
    ExpertMajorBatch,
    LinkSpec,
    ReceivedBatch,
    Transfer,
)
from sglang.srt.disaggregation.afd.ffn import deep_gemm
from sglang.srt.disaggregation.afd.ffn.experts import LocalExperts
from sglang.srt.disaggregation.afd.ffn.model_runner import FFNModelRunner
from sglang.srt.disaggregation.afd.topology import Topology

E4M3, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128
HIDDEN, INNER, EXPERTS, TOPK, CAPACITY = 512, 256, 7, 2, 300
# Of a row's error, relative to its norm. The same roundings in plain torch reach 0.037 (FP8 between
# the GEMMs), 0.085 (of the rows too) and 0.0076 (BF16); another expert's row is off by 1.4.
FP8_BOUND, REQUANTISED_BOUND, BF16_BOUND = 0.06, 0.13, 0.015


def write_config(folder: Path, quantisation: str) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 320,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if quantisation == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def blocks_to_fp8(weight_ENK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = weight_ENK.shape
    blocks = weight_ENK.view(experts, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((2, 4), keepdim=True) / LARGEST
    return (blocks / scale).view_as(weight_ENK).to(E4M3), scale[:, :, 0, :, 0]


def blocks_to_fp32(weight_ENK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return weight_ENK.float() * wide


def rows_to_fp8(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 rows, and scales that are column-major in their last two dimensions."""
    groups = hidden.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1) / LARGEST
    packed = (groups / scale[..., None]).flatten(-2).to(E4M3)
    return packed, scale.mT.contiguous().mT


class Bench:
    """The layer, and what it should compute."""

    def __init__(self, layer: LocalExperts, owned: int, fp8: bool) -> None:
        self.layer, self.fp8, self.owned = layer, fp8, owned
        module = layer.module
        generator = torch.Generator("cuda").manual_seed(1)
        self.slots = len(module.w13_weight)
        self.weights = []
        for name in ("w13_weight", "w2_weight"):
            held = getattr(module, name).data
            values = torch.randn(held.shape, generator=generator, device="cuda")
            values *= held.shape[-1] ** -0.5 * 1.5
            # Blocks of different size, so that a scale in the wrong place shows.
            values[:, BLOCK:] *= 3.0
            if fp8:
                scales = getattr(module, f"{name}_scale_inv").data
                packed, scale = blocks_to_fp8(values)
                held.copy_(packed)
                assert scales.shape == scale.shape, (scales.shape, scale.shape)
                scales.copy_(scale)
                held[owned:].view(torch.uint8).fill_(0x7F)  # empty slots: not a number
                self.weights.append(blocks_to_fp32(packed, scale))
            else:
                held.copy_(values)
                self.weights.append(held.float())
                held[owned:].fill_(float("nan"))

    def want(self, rows_RH: torch.Tensor, expert: int) -> torch.Tensor:
        w13, w2 = self.weights[0][expert], self.weights[1][expert]
        gate, up = (rows_RH.float() @ w13.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w2.T

    def batch(self, counts: list[int], length: int, wire_fp8: bool, seed: int) -> ExpertMajorBatch:
        """Rows beyond the counts are not numbers, nor are their scales."""
        assert len(counts) == self.slots
        generator = torch.Generator("cuda").manual_seed(seed)
        hidden = torch.randn(self.slots, length, HIDDEN, generator=generator, device="cuda")
        hidden *= torch.rand(self.slots, length, 1, generator=generator, device="cuda") + 0.1
        hidden = hidden.to(torch.bfloat16)
        scales = None
        if wire_fp8:
            hidden, scales = rows_to_fp8(hidden)
        for expert, count in enumerate(counts):
            beyond = hidden[expert, count:]
            if wire_fp8:
                beyond.view(torch.uint8).fill_(0x7F)
                scales[expert, count:] = float("nan")
            else:
                beyond.fill_(float("nan"))
        return ExpertMajorBatch(
            transfer=Transfer(0, 0, 0),
            hidden_ELH=hidden,
            scales_ELG=scales,
            rows_per_expert_E=torch.tensor(counts, dtype=torch.int32, device="cuda"),
            expected_rows=max(1, -(-sum(counts) // self.slots)),
        )

    def check(self, batch: ExpertMajorBatch, out: torch.Tensor) -> None:
        assert out.shape == batch.hidden_ELH.shape and out.dtype == torch.bfloat16, out.shape
        bound = FP8_BOUND if self.fp8 else BF16_BOUND
        if self.fp8 and batch.scales_ELG is None:
            bound = REQUANTISED_BOUND
        for expert, count in enumerate(batch.rows_per_expert_E.tolist()):
            if count == 0:
                continue
            rows = batch.hidden_ELH[expert, :count].float()
            if batch.scales_ELG is not None:
                rows *= batch.scales_ELG[expert, :count].repeat_interleave(BLOCK, 1)
            want, got = self.want(rows, expert), out[expert, :count].float()
            error = (got - want).norm(dim=1) / want.norm(dim=1)
            worst = error.max().item()
            assert worst < bound, (
                f"expert {expert}: row {error.argmax()} of {count} is off by {worst}"
            )

    @torch.inference_mode()
    def run(self, batch: ExpertMajorBatch) -> torch.Tensor:
        return self.layer(batch)


def bits(batch: ExpertMajorBatch) -> list[torch.Tensor]:
    found = [batch.hidden_ELH.view(torch.uint8), batch.rows_per_expert_E]
    if batch.scales_ELG is not None:
        found.append(batch.scales_ELG.mT.view(torch.int32))
    return [each.clone() for each in found]


def counts_for(bench: Bench, length: int) -> dict[str, list[int]]:
    empty = [0] * (bench.slots - bench.owned)
    odd = [1, 0, 37, length, 3, 0, min(65, length)]
    return {
        "odd counts": [min(each, length) for each in odd[: bench.owned]] + empty,
        "nothing": [0] * bench.slots,
        "one expert has all": [0] * (bench.owned - 1) + [length, *empty],
        "full": [length] * bench.owned + empty,
        "last rows of neighbours": [length - 1] * bench.owned + empty,
    }


def eager(bench: Bench, length: int, wire_fp8: bool) -> None:
    for seed, (name, counts) in enumerate(counts_for(bench, length).items()):
        batch = bench.batch(counts, length, wire_fp8, seed)
        before = bits(batch)
        where = batch.hidden_ELH.data_ptr(), batch.hidden_ELH.untyped_storage().nbytes()
        out = bench.run(batch)
        torch.cuda.synchronize()
        after = bits(batch)
        assert where == (batch.hidden_ELH.data_ptr(), batch.hidden_ELH.untyped_storage().nbytes())
        assert all(map(torch.equal, before, after)), f"{name}: the batch was written over"
        try:
            bench.check(batch, out)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def graph(bench: Bench, length: int, wire_fp8: bool, warm: bool) -> None:
    """Captured once, replayed with other rows and counts. `warm`: an eager call goes before."""
    counts = list(counts_for(bench, length).values())
    batch = bench.batch(counts[0], length, wire_fp8, seed=10)
    if warm:
        bench.run(batch)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = bench.run(batch)
    for seed, each in enumerate(counts, start=20):
        other = bench.batch(each, length, wire_fp8, seed)
        object.__setattr__(other, "expected_rows", batch.expected_rows)  # the same kernels
        batch.hidden_ELH.view(torch.uint8).copy_(other.hidden_ELH.view(torch.uint8))
        if wire_fp8:
            batch.scales_ELG.copy_(other.scales_ELG)
        batch.rows_per_expert_E.copy_(other.rows_per_expert_E)
        captured.replay()
        torch.cuda.synchronize()
        bench.check(other, out)
        first = out.clone()
        captured.replay()
        torch.cuda.synchronize()
        for expert, count in enumerate(each):
            assert torch.equal(first[expert, :count], out[expert, :count]), "replays differ"
        direct = bench.run(other)
        for expert, count in enumerate(each):
            assert torch.equal(direct[expert, :count], out[expert, :count]), "graph against eager"


def rows_in_order_of_tokens(bench: Bench) -> None:
    """What connector nccl delivers: entries of -1, rows without an expert, in a graph too."""
    generator = torch.Generator("cuda").manual_seed(5)
    for num_rows in (1, 33, 200):
        hidden = torch.randn(num_rows, HIDDEN, generator=generator, device="cuda").bfloat16()
        score = torch.rand(num_rows, bench.owned, generator=generator, device="cuda")
        weights, ids = score.topk(TOPK, dim=1)
        ids = ids.int()
        ids[::3, 0] = -1
        ids[::6] = -1
        weights = weights.masked_fill(ids < 0, 0.0).contiguous()
        batch = ReceivedBatch(
            transfer=Transfer(0, 0, 0),
            hidden_RH=hidden,
            topk_ids_RK=ids,
            topk_weights_RK=weights,
            rows_per_rank=(num_rows,),
        )
        want = torch.zeros(num_rows, HIDDEN, device="cuda")
        for expert in range(bench.owned):
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            want += share * bench.want(hidden, expert)
        before = hidden.clone()
        with torch.inference_mode():
            eager_out = bench.layer(batch).clone()
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                graph_out = bench.layer(batch)
            captured.replay()
        torch.cuda.synchronize()
        assert batch.hidden_RH.shape == before.shape and torch.equal(batch.hidden_RH, before)
        bound = REQUANTISED_BOUND if bench.fp8 else BF16_BOUND
        for name, out in (("eager", eager_out), ("graph", graph_out)):
            alone = (ids < 0).all(1)
            assert not out[alone].any(), (
                f"{name}, {num_rows} rows: a row without expert is not zero"
            )
            error = (out.float() - want)[~alone].norm(dim=1) / want[~alone].norm(dim=1)
            assert error.numel() == 0 or error.max() < bound, (
                f"{name}, {num_rows} rows: {error.max()}"
            )


def kernels() -> set[str]:
    """One folder of DeepGEMM's cache for each."""
    folder = Path(os.environ["SGLANG_DG_CACHE_DIR"])
    return {path.name for path in folder.rglob("kernel.*") if path.is_dir()}


def compiled_ahead(bench: Bench, ffn_ranks: int, wire_fp8: bool) -> None:
    """No number of expected rows within the capacity needs a kernel that `compile_ahead` left out."""
    spec = LinkSpec(
        topology=Topology(2, ffn_ranks, EXPERTS),
        hidden_size=HIDDEN,
        topk=TOPK,
        dtype=torch.bfloat16,
        capacity=CAPACITY,
        timeout_s=1,
        fp8=wire_fp8,
    )
    deep_gemm.compile_ahead([bench.layer], spec)
    before = kernels()
    print("KERNELS", len(before), flush=True)
    assert before, "no compiled kernel was found: does the cache lie elsewhere?"
    batch = bench.batch([0] * bench.slots, 128, wire_fp8, seed=0)
    for expected in range(1, -(-2 * CAPACITY * TOPK // EXPERTS) + 1):
        object.__setattr__(batch, "expected_rows", expected)
        bench.run(batch)
    torch.cuda.synchronize()
    assert kernels() == before, f"compiled later: {sorted(kernels() - before)}"


def main() -> None:
    folder, quantisation, runner_name, ffn_ranks, rank = sys.argv[1:]
    fp8 = quantisation == "fp8"
    write_config(Path(folder), quantisation)

    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    torch.cuda.set_device(0)
    args = ServerArgs(
        model_path=folder,
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        disaggregation_mode="afd",
        afd_ffn_ranks=int(ffn_ranks),
        afd_connector="nccl",
        moe_runner_backend=runner_name,
        skip_tokenizer_init=True,
    ).for_ffn_rank(int(rank))
    publish(args, role="scheduler")
    runner = FFNModelRunner(args, int(rank))
    (layer,) = runner.load()
    assert layer.is_masked == (runner_name == "deep_gemm"), layer.module.quant_method
    topology = Topology(1, int(ffn_ranks), EXPERTS)
    bench = Bench(layer, len(topology.expert_range(int(rank))), fp8)
    assert bench.slots == topology.slots_per_rank
    cases: dict[str, Callable[[], None]] = {}
    for wire_fp8 in (True, False) if fp8 and layer.is_masked else (False,):
        wire = "FP8" if wire_fp8 else "BF16"
        if layer.is_masked:
            cases[f"{wire} rows, compiled ahead"] = lambda w=wire_fp8: compiled_ahead(
                bench, int(ffn_ranks), w
            )
            cases[f"{wire} rows, captured without an eager call"] = lambda w=wire_fp8: graph(
                bench, 256, w, warm=False
            )
        for length in (128, 256, 52):
            cases[f"{wire} rows, room {length}, eager"] = lambda w=wire_fp8, n=length: eager(
                bench, n, w
            )
            cases[f"{wire} rows, room {length}, graph"] = lambda w=wire_fp8, n=length: graph(
                bench, n, w, warm=True
            )
    cases["rows in order of tokens"] = lambda: rows_in_order_of_tokens(bench)
    failed = 0
    for name, case in cases.items():
        try:
            case()
        except Exception:  # noqa: BLE001 - all cases are told in one run
            failed += 1
            print(f"FAILED {name}: {traceback.format_exc(limit=-3)}", flush=True)
        else:
            print(f"passed {name}", flush=True)
    print("EXPERTS FAILED" if failed else "EXPERTS OK", failed, "of", len(cases), flush=True)


if __name__ == "__main__":
    main()
