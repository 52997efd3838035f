"""Every environment variable that AFD reads or sets, in one place, parsed strictly.

Nobody has to set one. Ours start with `SGLANG_AFD_`; the others belong to upstream and get a
value only where the user gave none.
"""

from __future__ import annotations

import os

from sglang.srt.disaggregation.afd.errors import AFDConfigError

USE_CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
CPU_THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
RUST_SERVER = "SGLANG_RUST_SERVER"
SKIP_ALL_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
OMP_WAIT_POLICY = "OMP_WAIT_POLICY"
SIMULATE_UNIFORM = "SGLANG_SIMULATE_UNIFORM_EXPERTS"
SIMULATE_ROUND_ROBIN = "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
MESSAGE_QUEUE_BROADCASTER = "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
PROMETHEUS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
DEEP_GEMM = "SGLANG_ENABLE_JIT_DEEPGEMM"
DEEP_GEMM_PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"
LOG_PLANS = "SGLANG_AFD_LOG_PLANS"
BENCHMARK = "SGLANG_AFD_BENCHMARK"
SHARE_GPUS = "SGLANG_AFD_SHARE_GPUS"
NCCL_HOST_ID = "NCCL_HOSTID"
# What else ranks that share a GPU want: NCCL over loopback, memory of a peer on the same device.
SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
NVLINK_BLOCKS = "SGLANG_AFD_NVLINK_BLOCKS"
NULL_FORM = "SGLANG_AFD_NULL_FORM"
NULL_ARRIVALS = "SGLANG_AFD_NULL_ARRIVALS"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def flag(name: str, default: bool = False) -> bool:
    """A boolean variable; anything but the usual spellings is an error, not a default."""
    value = os.environ.get(name)
    if value is None:
        return default
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise AFDConfigError(f"{name}={value!r} is not a boolean; use 1 or 0")


def integer(name: str) -> int | None:
    """A whole number above zero, None if unset."""
    value = os.environ.get(name, "")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise AFDConfigError(f"{name}={value!r} is not a whole number above zero")
    return int(value)


def text(name: str) -> str:
    """A variable's value, empty if unset."""
    return os.environ.get(name, "")


def set_default(name: str, value: str) -> None:
    """Give an upstream variable a value, for this process and its children, if it has none."""
    os.environ.setdefault(name, value)


def put(name: str, value: str) -> None:
    """Give a variable a value, for this process and its children, whatever it had."""
    os.environ[name] = value


def drop(name: str) -> None:
    """Take a variable out of this process and its children."""
    os.environ.pop(name, None)


def usable_cores() -> list[int]:
    """Ids of the cores that this process may run on, ascending."""
    return sorted(os.sched_getaffinity(0))
