"""Several ranks on one GPU, so that every topology runs on a host with few: SGLANG_AFD_SHARE_GPUS=1.

For tests, not for service. Ranks take the GPUs in turn and share their memory and their time: a GPU
goes from one rank to another every few milliseconds. CUDA's Multi-Process Service would run them at
once, but in one context, where the first load of a kernel by one rank waits for the kernels of all,
and so for ever where one of them waits for that rank.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import torch

from sglang.srt.disaggregation.afd import envs

logger = logging.getLogger(__name__)


def wanted() -> bool:
    return envs.flag(envs.SHARE_GPUS)


def share_if_fewer(num_ranks: int) -> None:
    """For tests and benchmarks: let this process's ranks share GPUs if there are fewer than ranks."""
    if 0 < torch.cuda.device_count() < num_ranks:
        envs.set_default(envs.SHARE_GPUS, "1")


def device_of(gpu_id: int) -> int:
    """The device of the rank that would have `gpu_id` where each has its own."""
    count = torch.cuda.device_count() if wanted() else 0
    return gpu_id % count if count else gpu_id


def enter() -> None:
    """Before this process joins a group of ranks: let several of them be on one device.

    NCCL takes a device once per host, so every rank says that it is a host of its own; what it sends
    then goes over the loopback interface.
    """
    if not wanted():
        return
    envs.put(envs.NCCL_HOST_ID, f"{socket.gethostname()}-{os.getpid()}")
    for name, value in envs.SHARED_GPU.items():
        envs.set_default(name, value)
    logger.warning("%s: ranks share GPUs; times mean nothing", envs.SHARE_GPUS)


def init_scheduler(
    orig: Any, scheduler: Any, server_args: Any, port_args: Any, gpu_id: int, *args: Any, **kw: Any
) -> None:
    """AROUND `Scheduler.__init__`: the attention rank's device."""
    if server_args.afd_enabled and wanted():
        enter()
        gpu_id = device_of(gpu_id)
        # It maps the memory of GPUs that it takes for different ones.
        server_args.override("afd", disable_custom_all_reduce=True)
    orig(scheduler, server_args, port_args, gpu_id, *args, **kw)
