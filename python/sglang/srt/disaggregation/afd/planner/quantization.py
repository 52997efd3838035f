"""Bytes per weight, from a checkpoint's quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import checks

_DTYPE_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
# Linear layers, routed experts. 4-bit blocks carry an 8-bit scale per 32 (MX) or 16 (NV) weights.
_METHOD_BITS = {
    "fp8": (8.0, 8.0),
    "fbgemm_fp8": (8.0, 8.0),
    "mxfp4": (16.0, 4.25),
    "modelopt_fp4": (16.0, 4.5),
}


def weight_bytes(
    where: str,
    config: Mapping[str, Any],
    quantized: Mapping[str, Any] | None,
    linear_bits: float | None,
    expert_bits: float | None,
) -> tuple[float, float]:
    """Bytes per weight of linear layers, and of routed experts.

    Args:
        where: the model, in errors.
        quantized: the quantization_config, if there is one.
        linear_bits, expert_bits: what the user typed, which wins.
    Raises:
        AFDConfigError: a method that is not known, unless both widths were typed.
    """
    if linear_bits is None or expert_bits is None:
        linear, expert = _bits(where, config, quantized)
        linear_bits = linear if linear_bits is None else linear_bits
        expert_bits = expert if expert_bits is None else expert_bits
    checks.number("--linear-bits", linear_bits, 2, 32)
    checks.number("--expert-bits", expert_bits, 2, 32)
    return linear_bits / 8, expert_bits / 8


def _bits(
    where: str, config: Mapping[str, Any], quantized: Mapping[str, Any] | None
) -> tuple[float, float]:
    if not quantized:
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
        if name not in _DTYPE_BITS:
            raise AFDConfigError(
                f"{where}: dtype {name} is unknown; give --linear-bits and --expert-bits"
            )
        return _DTYPE_BITS[name], _DTYPE_BITS[name]
    method = str(quantized.get("quant_method", ""))
    if method in ("gptq", "awq") and quantized.get("bits"):
        bits = checks.number(f"{where}: quantization_config.bits", quantized["bits"], 2, 16)
        return bits, bits
    if method not in _METHOD_BITS:
        raise AFDConfigError(
            f"{where}: quantization_config.quant_method {method!r} is unknown; "
            "give --linear-bits and --expert-bits"
        )
    return _METHOD_BITS[method]
