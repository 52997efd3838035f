"""Which formats of expert weights AFD serves, by the method that the checkpoint names.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.models import verified

if TYPE_CHECKING:
    from sglang.srt.disaggregation.afd.server_args import AFDServerArgs

logger = logging.getLogger(__name__)

_BLOCK = 128

# What the FFN ranks' loading and grouped GEMM are made for.
SERVED = {
    "": "unquantised (FP32, BF16, FP16)",
    "fp8": "FP8, in blocks or whole tensors; needs a GPU",
}
# Upstream loads these, and its modules would do so here. `verified.FORMATS` has those that a run on
# GPUs has shown; the others are refused.
UNTESTED = {
    "compressed-tensors": "per-channel FP8; INT8 and packed formats are untested",
    "modelopt": "formats of ModelOpt",
    "modelopt_fp8": "FP8 of ModelOpt",
    "modelopt_fp4": "NVFP4",
    "mxfp4": "MXFP4",
    "modelopt_mixed": "several formats of ModelOpt",
    "nvfp4_online": "NVFP4, made while loading",
    "petit_nvfp4": "NVFP4",
    "mxfp8": "MXFP8",
    "mxfp_w4a8": "MXFP4 weights, MXFP8 activations",
    "awq": "AWQ",
    "awq_marlin": "AWQ",
    "gptq": "GPTQ",
    "gptq_marlin": "GPTQ",
    "auto-round": "AutoRound",
    "auto-round-int8": "INT8",
    "blockwise_int8": "INT8 in blocks",
    "w4afp8": "INT4 weights, FP8 activations",
    "moe_wna16": "INT8 and INT4 weights",
    "w8a8_int8": "INT8",
    "w8a8_fp8": "per-channel FP8",
    "quark": "Quark",
    "quark_mxfp4": "MXFP4",
    "quark_int4fp8_moe": "INT4 weights, FP8 activations",
    "modelslim": "formats of Ascend NPUs",
    "humming": "formats of Humming",
    "bitsandbytes": "bitsandbytes",
    "gguf": "GGUF",
}


def method(args: AFDServerArgs, config: dict[str, Any]) -> str:
    """Quantisation method of the flag, else of config.json; empty for none."""
    if args.quantization not in (None, "unquant"):
        return str(args.quantization)
    quantization = config.get("quantization_config") or {}
    return str(quantization.get("quant_method") or "")


def is_block_fp8(args: AFDServerArgs, config: dict[str, Any]) -> bool:
    """True if the checkpoint holds experts as FP8 with a scale per 128 x 128 block."""
    quantization = config.get("quantization_config") or {}
    return method(args, config) == "fp8" and list(quantization.get("weight_block_size") or ()) == [
        _BLOCK,
        _BLOCK,
    ]


def _is_as_shown(name: str, config: dict[str, Any]) -> bool:
    """Of compressed-tensors, which is many formats, per-channel FP8 is what ran."""
    quantization = config.get("quantization_config") or {}
    return name != "compressed-tensors" or quantization.get("format") == "float-quantized"


def check(args: AFDServerArgs, config: dict[str, Any]) -> None:
    """Refuse a format that nobody tried, unless the user wants to.

    Raises:
        AFDConfigError: names the format and the way out.
    """
    name = method(args, config)
    if name in SERVED or (name in verified.FORMATS and _is_as_shown(name, config)):
        return
    text = (
        f"--model-path {args.model_path} holds experts as {name} ({UNTESTED.get(name, 'unknown')})"
    )
    if args.afd_allow_untested:
        logger.warning(
            "AFD: %s, which no test covers; check the answers before you rely on them", text
        )
        return
    raise AFDConfigError(
        f"{text}, which is untested with --disaggregation-mode afd; use an unquantised or FP8 "
        "checkpoint, serve this one without the flag, or add --afd-allow-untested to try"
    )
