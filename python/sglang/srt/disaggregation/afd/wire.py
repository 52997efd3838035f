"""In which dtype tokens travel to the FFN ranks, and which of upstream's MoE runners computes there.

Both roles ask here, so that they decide alike: from what was typed, from the checkpoint's config.json
and from the connector's facts. The handshake compares the outcome. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.afd import envs
from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.models import families, formats

if TYPE_CHECKING:
    from sglang.srt.disaggregation.afd.server_args import AFDServerArgs

AUTO, DEEP_GEMM, TRITON = "auto", "deep_gemm", "triton"
_SILU = ("silu", "swish")


def check(args: AFDServerArgs, connector: str) -> None:
    """Refuse a wire dtype or an MoE runner that cannot work, before any process starts.

    Raises:
        AFDConfigError: names the flag and the way out.
    """
    typed = args.afd_moe_runner_backend
    if expert_major(connector, fp8(args, connector)) and typed not in (
        AUTO,
        DEEP_GEMM,
        TRITON,
    ):
        raise AFDConfigError(
            f"--moe-runner-backend {typed} does not take rows that are sorted by expert, which "
            f"--afd-connector {connector} delivers; choose {AUTO}, {DEEP_GEMM} or {TRITON}, or "
            "--afd-connector nccl"
        )
    activation = _activation(_text(families.read_config(args)))
    if typed == DEEP_GEMM and activation not in _SILU:
        raise AFDConfigError(
            f"--moe-runner-backend {DEEP_GEMM} computes SiLU only, and the experts of --model-path "
            f"{args.model_path} have {activation}; choose {TRITON}"
        )


def fp8(args: AFDServerArgs, connector: str) -> bool:
    """True if tokens travel to the FFN ranks as FP8 with a scale per 128 values.

    Raises:
        AFDConfigError: --afd-wire-dtype fp8, and something is in the way.
    """
    if args.afd_wire_dtype == "bf16":
        return False
    obstacle = _obstacle(args, connector)
    if obstacle and args.afd_wire_dtype == "fp8":
        raise AFDConfigError(
            f"--afd-wire-dtype fp8 does not work here: {obstacle}; leave the flag out"
        )
    return not obstacle


def expert_major(connector: str, fp8: bool) -> bool:
    """True if FFN ranks get rows sorted by expert (`ExpertMajorBatch`); FP8 rows always are.

    Args:
        fp8: tokens travel as FP8.
    """
    info = registry.info(connector)
    return fp8 or info.expert_major or (info.benchmark_only and _null_is_expert_major())


def runner_backend(args: AFDServerArgs, connector: str, deep_gemm_works: bool) -> str:
    """--moe-runner-backend for the experts of an FFN rank: what was typed, else by connector.

    Rows that come sorted by expert fit DeepGEMM's masked GEMMs; for rows in the order of tokens
    upstream's own choice stands.

    Args:
        args: of the FFN rank, resolved by upstream.
        deep_gemm_works: it runs on this GPU and takes the model's dtype.
    """
    resolved: str = args.moe_runner_backend
    if args.afd_moe_runner_backend != AUTO:
        return resolved
    if expert_major(connector, fp8(args, connector)):
        config = families.read_config(args)
        fits = formats.is_block_fp8(args, config) or not formats.method(args, config)
        if deep_gemm_works and fits and _plain_silu(config):
            return DEEP_GEMM
    # Upstream's choice for some models; it takes the router's output in a form of its own.
    return TRITON if resolved == "triton_kernel" else resolved


def _obstacle(args: AFDServerArgs, connector: str) -> str:
    """Why tokens cannot travel as FP8; empty if they can."""
    if not _carries_fp8(connector):
        return f"--afd-connector {connector} carries the model's dtype only"
    config = families.read_config(args)
    if not formats.is_block_fp8(args, config):
        return f"--model-path {args.model_path} holds no experts in FP8 blocks of 128 x 128"
    if args.afd_moe_runner_backend not in (AUTO, DEEP_GEMM):
        return f"--moe-runner-backend {args.afd_moe_runner_backend} takes no FP8 tokens"
    if not _plain_silu(config):
        return f"--moe-runner-backend {DEEP_GEMM} lacks the activation of --model-path"
    if importlib.util.find_spec("deep_gemm") is None:
        return "the Python package deep_gemm is not installed"
    if not envs.flag(envs.DEEP_GEMM, True):
        return f"{envs.DEEP_GEMM}=0 switches DeepGEMM off"
    return ""


def _carries_fp8(connector: str) -> bool:
    info = registry.info(connector)
    return info.carries_fp8 and (not info.benchmark_only or _null_is_expert_major())


def _null_is_expert_major() -> bool:
    """A benchmark without a link chooses the form of what arrives."""
    return envs.text(envs.NULL_FORM) == "expert-major"


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json."""
    return config.get("text_config") or config


def _activation(text: dict[str, Any]) -> str:
    return str(text.get("hidden_act") or text.get("hidden_activation") or _SILU[0])


def _plain_silu(config: dict[str, Any]) -> bool:
    """SiLU without a clamp, as far as config.json says; `ffn/deep_gemm.py` asks the module."""
    text = _text(config)
    return _activation(text) in _SILU and text.get("swiglu_limit") is None
