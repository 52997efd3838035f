"""What AFD knows about upstream's model families, by architecture as config.json names it.

Results of tests are not typed here: `verified.py` is generated from them. Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.models import formats, verified

if TYPE_CHECKING:
    from sglang.srt.disaggregation.afd.server_args import AFDServerArgs

logger = logging.getLogger(__name__)

# Upstream's model has an expert-parallel branch that computes what its usual branch does, and an
# attention that knows DP ranks. It runs in its DP-attention form, and two microbatches may overlap
# where it has the operations for it. Every other model runs as if its rank were alone in the
# world: each attention rank holds all but the experts, and nothing of it is sharded.
WITH_DP_FORM = frozenset(
    {
        "BailingMoEForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
# Of these, the ones whose expert-parallel branch multiplies by the routed scaling factor. On a GPU
# upstream's kernel for one rank would do it again; on a CPU it does not.
SCALES_ITSELF = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
    }
)
_OWN_KERNEL = "its experts are tensors of their own with a kernel call, not upstream's FusedMoE"
# Attention ranks would keep these experts, and FFN ranks would find none.
WITHOUT_FUSED_MOE = {
    "AfmoeForCausalLM": _OWN_KERNEL,
    "DbrxForCausalLM": _OWN_KERNEL,
    "DeepseekForCausalLM": _OWN_KERNEL,
    "QuantMixtralForCausalLM": "its experts are a list of separate modules, not upstream's FusedMoE",
    "UnlimitedOCRForCausalLM": _OWN_KERNEL,
    "XverseMoeForCausalLM": _OWN_KERNEL,
}
# A step plan has one transfer per layer, whatever the tokens are.
TWO_EXPERT_MODULES = {
    "Ernie4_5_VLMoeForConditionalGeneration": "a layer has two expert modules, one for text and one "
    "for images, and its tokens decide which of them run",
}
REFUSED = {**WITHOUT_FUSED_MOE, **TWO_EXPERT_MODULES}
# A prompt that is split between two microbatches would be another prompt to them.
_LOOKS_AHEAD = "its attention looks ahead within a prompt"
_NOT_SPLIT = "upstream's two-batch overlap does not take its attention backend"
ONE_MICROBATCH = {
    "LLaDA2MoeModelLM": _LOOKS_AHEAD,
    "MiniMaxM3SparseForCausalLM": _NOT_SPLIT,
    "MiniMaxM3SparseForConditionalGeneration": _NOT_SPLIT,
    "SDARMoeForCausalLM": _LOOKS_AHEAD,
}


def read_config(args: AFDServerArgs) -> dict[str, Any]:
    """The checkpoint's config.json, empty if there is none to be read."""
    local = Path(args.model_path) / "config.json"
    if local.is_file():
        config: dict[str, Any] = json.loads(local.read_text())
        return config
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(args.model_path, revision=args.revision)
    except (OSError, ValueError):
        return {}  # upstream says better what is wrong with the path
    return config


def architecture(config: dict[str, Any]) -> str:
    """First architecture that config.json names, or empty."""
    names = config.get("architectures") or [""]
    return str(names[0])


def has_dp_form(args: AFDServerArgs) -> bool:
    """True if attention ranks run upstream's DP-attention form of the model."""
    name = architecture(read_config(args))
    return args.model_impl != "transformers" and name in WITH_DP_FORM


def scales_itself(args: AFDServerArgs) -> bool:
    """True if attention ranks multiply expert outputs by the routed scaling factor."""
    return has_dp_form(args) and architecture(read_config(args)) in SCALES_ITSELF


def check(args: AFDServerArgs, microbatches: int) -> None:
    """Refuse an architecture or a format that cannot work, by name; warn of what no test covers.

    Raises:
        AFDConfigError: names the architecture, the reason and the way out.
    """
    config = read_config(args)
    name = architecture(config)
    reason = REFUSED.get(name)
    if reason is not None:
        raise AFDConfigError(
            f"--model-path {args.model_path} is a {name}, which --disaggregation-mode afd does not "
            f"serve: {reason}. Serve it without the flag; docs/models.md lists what AFD serves"
        )
    formats.check(args, config)
    if microbatches == 2 and name in ONE_MICROBATCH:
        raise AFDConfigError(
            f"--afd-microbatches 2 does not work with a {name}: {ONE_MICROBATCH[name]}; leave the flag out"
        )
    if microbatches == 2 and args.model_impl == "transformers":
        raise AFDConfigError(
            "--afd-microbatches 2 does not work with --model-impl transformers: its layers are not "
            "told which half of a batch they see; drop one of them"
        )
    shown = verified.EQUAL_WITH_TWO_MICROBATCHES if microbatches == 2 else verified.EQUAL
    if name and name not in shown:
        logger.warning(
            "AFD: no test compares %s, --afd-microbatches %d, with colocated serving; docs/models.md "
            "lists the %d architectures that are compared. Check its answers before you rely on them",
            name,
            microbatches,
            len(shown),
        )
