"""An FFN rank builds its share with upstream's model class: shape, bytes, numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from served.models import tiny_model

# Upstream's parallel state is global to a process, so each rank is built in one of its own.
SCRIPT = """
import sys, torch
from safetensors import safe_open
from sglang.srt.server_args import ServerArgs
from sglang.srt.runtime_context import publish
from sglang.srt.disaggregation.afd.connector.base import ReceivedBatch, Transfer
from sglang.srt.disaggregation.afd.ffn.model_runner import FFNModelRunner
from sglang.srt.disaggregation.afd.models import weights
from sglang.srt.disaggregation.afd.topology import Topology

folder, ffn_ranks, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
args = ServerArgs(
    model_path=folder, device="cpu", dtype="float32", disaggregation_mode="afd", afd_ffn_ranks=ffn_ranks
).for_ffn_rank(rank)
publish(args, role="scheduler")
runner = FFNModelRunner(args, rank)
assert runner.shape == (3, 7, 128, 2), runner.shape
layers = runner.load()
owned = Topology(1, ffn_ranks, 7).expert_range(rank)
report = weights.report()
assert report.tensors_read == 3 * 3 * len(owned), report
assert report.bytes_read == 3 * 3 * len(owned) * 64 * 128 * 4, report
torch.manual_seed(rank)
x = torch.randn(6, 128)
ids = torch.randint(-1, len(owned), (6, 2), dtype=torch.int32)
ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], -1, ids[:, 1])
w = torch.rand(6, 2) * (ids >= 0)
with safe_open(folder + "/model.safetensors", "pt") as shard:
    for index, layer in enumerate(layers):
        got = layer(ReceivedBatch(transfer=Transfer(0, index, 0), hidden_RH=x, topk_ids_RK=ids,
                                  topk_weights_RK=w, rows_per_rank=(6,)))
        want = torch.zeros_like(x)
        for t, k in (ids >= 0).nonzero().tolist():
            def tensor(name):
                expert = owned.start + int(ids[t, k])
                return shard.get_tensor(f"model.layers.{index}.mlp.experts.{expert}.{name}.weight")
            hidden = torch.nn.functional.silu(tensor("gate_proj") @ x[t]) * (tensor("up_proj") @ x[t])
            want[t] += w[t, k] * (tensor("down_proj") @ hidden)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
print("FFN OK", runner.parameter_bytes())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("ffn") / "tiny", num_experts=7)


@pytest.mark.pain(62)
@pytest.mark.parametrize(
    ("ffn_ranks", "rank"), [pytest.param(1, 0, marks=pytest.mark.long), (3, 1)]
)
def test_share_of_an_ffn_rank(model, ffn_ranks, rank):
    command = [sys.executable, "-c", SCRIPT, str(model), str(ffn_ranks), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert "FFN OK" in done.stdout, done.stderr[-3000:]
