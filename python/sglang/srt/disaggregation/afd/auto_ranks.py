"""`--afd-attn-ranks auto` and `--afd-ffn-ranks auto`: asks the planner about this host's GPUs.

The only file beside the planner that imports it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.errors import AFDConfigError

if TYPE_CHECKING:
    from sglang.srt.disaggregation.afd.server_args import AFDServerArgs

logger = logging.getLogger(__name__)

AUTO = "auto"
# Planned for if --context-length is not given: the models' own limit would leave few requests.
DEFAULT_CONTEXT = 8192
_PLANNER = "python -m sglang.srt.disaggregation.afd.planner plan"


class Gpus(NamedTuple):
    """GPUs that the server may use, by the name that they give themselves."""

    number: int
    name: str


def resolve(args: AFDServerArgs) -> None:
    """Replace "auto" in the two rank counts by the planner's choice, for all GPUs of this host.

    Raises:
        AFDConfigError: no GPU here, several hosts, an unknown GPU, or nothing fits.
    """
    typed = {"--afd-attn-ranks": args.afd_attn_ranks, "--afd-ffn-ranks": args.afd_ffn_ranks}
    flag = next((name for name, value in typed.items() if value == AUTO), None)
    if flag is None:
        return
    if args.afd_role != "all":
        raise AFDConfigError(
            f"{flag} auto plans one host, and --afd-role is {args.afd_role}; type the numbers that "
            f"`{_PLANNER}` prints"
        )
    gpus = Gpus(0, "") if args.device == "cpu" else visible_gpus(args)
    if gpus.number < 2:
        raise AFDConfigError(
            f"{flag} auto divides this host's GPUs between the pools, and {gpus.number} can be "
            "used; on CPU, or with other devices, type both numbers, for example "
            "--afd-attn-ranks 2 --afd-ffn-ranks 1"
        )
    attn_ranks, ffn_ranks = choose(args, gpus, flag)
    args.afd_attn_ranks, args.afd_ffn_ranks = attn_ranks, ffn_ranks


def choose(args: AFDServerArgs, gpus: Gpus, flag: str) -> tuple[int, int]:
    """M and N for these GPUs.

    Raises:
        AFDConfigError: see `resolve`.
    """
    from sglang.srt.disaggregation.afd.planner import estimate, hardware, models, plan

    machine = hardware.by_device_name(gpus.name)
    if machine is None:
        raise AFDConfigError(
            f"{flag} auto: the planner has no numbers for {gpus.name!r}; describe it in a file for "
            f"`{_PLANNER} --hardware FILE.json`, or type the number"
        )
    bits = 8.0 if args.quantization == "fp8" else None
    kv_bits = 8.0 if str(args.kv_cache_dtype).startswith("fp8") else None
    shape = models.parse(
        model_config(args), args.model_path, bits, bits, kv_bits, flag="--model-path"
    )
    context = args.context_length or min(DEFAULT_CONTEXT, shape.max_context or DEFAULT_CONTEXT)
    connector = args.afd_connector
    request = plan.Request(
        gpus=gpus.number,
        context=context,
        connectors=(registry.resolve_auto("cuda") if connector == AUTO else connector,),
        microbatches=(2,) if args.afd_microbatches == "2" else (1,),
        attn_ranks=_given(args.afd_attn_ranks),
        ffn_ranks=_given(args.afd_ffn_ranks),
        whole=True,
    )
    cost = estimate.Cost(model=shape, hardware=machine, estimates=estimate.load())
    made = plan.make(cost, request)
    if made.best is None:
        raise AFDConfigError(f"{flag} auto: {made.reasons[0]}")
    logger.info(
        "AFD planner: %s for %d x %s at context %d, about %.0f tokens/s per GPU",
        made.best.name,
        gpus.number,
        machine.title,
        context,
        made.best.throughput,
    )
    for reason in made.reasons:
        logger.warning("AFD planner advises against AFD here: %s", reason)
    return made.best.attn_ranks, made.best.ffn_ranks


def visible_gpus(args: AFDServerArgs) -> Gpus:
    """CUDA devices from --base-gpu-id on, in steps of --gpu-id-step."""
    import torch

    if not torch.cuda.is_available():
        return Gpus(0, "")
    ids = range(args.base_gpu_id, torch.cuda.device_count(), args.gpu_id_step)
    return Gpus(len(ids), torch.cuda.get_device_name(ids[0]) if ids else "")


def model_config(args: AFDServerArgs) -> dict[str, Any]:
    """The checkpoint's config.json, from disk or from the hub."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(args.model_path, revision=args.revision)
    return dict(config)


def _given(ranks: int | str) -> int | None:
    return None if ranks == AUTO else int(ranks)
