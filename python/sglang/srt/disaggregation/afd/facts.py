"""What a rank says about itself in the handshake: read from configurations, never from weights."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.disaggregation.afd.config import AFDConfig
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.messages import PROTOCOL, Facts, Ready

_INDEX = "model.safetensors.index.json"
# Written by the library that saved the checkpoint, or by the path it was opened from.
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "name_or_path"})


class ExpertShape(NamedTuple):
    """The shape that all MoE layers share."""

    moe_layers: int
    num_experts: int
    hidden_size: int
    topk: int


def expert_shape(
    layer_configs: list[Any], model_config: Any, model_path: str, num_experts: int | None = None
) -> ExpertShape:
    """The common shape of upstream's `MoeRunnerConfig`s, one per MoE layer.

    Args:
        num_experts: overrides the configs' value (FFN ranks round theirs up to whole slots).
    Raises:
        AFDConfigError: no MoE layer, or layers that differ.
    """
    if not layer_configs:
        raise AFDConfigError(
            f"--model-path {model_path} has no routed experts that AFD can move "
            f"(architecture {', '.join(model_config.hf_config.architectures or ['unknown'])}); "
            "serve it without --disaggregation-mode afd"
        )
    shapes = {
        ExpertShape(
            len(layer_configs),
            num_experts or config.num_experts,
            config.hidden_size,
            config.top_k or getattr(model_config.hf_text_config, "num_experts_per_tok", 1),
        )
        for config in layer_configs
    }
    if len(shapes) > 1:
        raise AFDConfigError(
            f"--model-path {model_path}: MoE layers differ in shape ({sorted(shapes)}), which the "
            "connectors do not support; serve it without --disaggregation-mode afd"
        )
    return shapes.pop()


def collect(
    settings: AFDConfig, shape: ExpertShape, model_config: Any, capacity: int, fp8: bool
) -> Facts:
    """Everything that both roles must agree on; `capacity` 0 takes the leader's, `fp8` is `wire`'s."""
    dtype = str(model_config.dtype).removeprefix("torch.")
    return Facts(
        protocol=PROTOCOL,
        afd_version=_version("sglang-afd"),
        sglang_version=_version("sglang"),
        model_digest=model_digest(model_config),
        moe_layers=shape.moe_layers,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        topk=shape.topk,
        dtype=dtype,
        wire_dtype="float8_e4m3fn" if fp8 else dtype,
        capacity=capacity,
        microbatches=settings.microbatches,
        connector=settings.connector,
        attn_ranks=settings.attn_ranks,
        ffn_ranks=settings.ffn_ranks,
    )


def model_digest(model_config: Any) -> str:
    """16 hex digits over the checkpoint's config.json and, where there is one, its tensor index.

    Read from disk, since upstream adjusts its configuration object by role and device. Equal for
    copies of one checkpoint from which a role's unneeded shards were removed.
    """
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(
        model_config.model_path, revision=model_config.revision
    )
    digest = hashlib.sha256()
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    index = Path(model_config.model_path) / _INDEX
    if index.is_file():
        digest.update(json.dumps(json.loads(index.read_text()), sort_keys=True).encode())
    return digest.hexdigest()[:16]


def rank_row(ready: Ready, moe_layers: int) -> dict[str, Any]:
    """One rank as /server_info shows it; bytes are of parameters and of checkpoint tensors."""
    return {
        "role": ready.role,
        "rank": ready.rank,
        "param_bytes": ready.param_bytes,
        "checkpoint_bytes": ready.checkpoint_bytes,
        "tensors_read": ready.tensors_read,
        "tensors_skipped": ready.tensors_skipped,
        "moe_layers": moe_layers,
        "device": ready.device,
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
