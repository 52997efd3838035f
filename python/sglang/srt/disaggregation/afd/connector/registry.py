"""The only list of connector names: what each one needs, and how to build it.

Imports neither torch nor a backend, so that argument checks stay cheap. A connector `x` that is
available is the module `connector/x.py`, which has `create_attn` and `create_ffn`.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from sglang.srt.disaggregation.afd.errors import AFDConfigError

if TYPE_CHECKING:
    from sglang.srt.disaggregation.afd.connector.base import AttnConnector, FFNConnector, LinkSpec
    from sglang.srt.disaggregation.afd.connector.loopback import LoopbackHub
    from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous


AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ConnectorInfo:
    """Facts of one connector that the configuration checks.

    Attributes:
        device: where its tensors live, "cpu" or "cuda", or "any".
        one_process: both roles must share a process, so no server can use it.
        benchmark_only: moves nothing, so answers are meaningless.
        expert_major: FFN ranks get rows sorted by expert (`ExpertMajorBatch`) in every dtype.
        carries_fp8: can send tokens as FP8 with scales (`LinkSpec.fp8`), and delivers those sorted.
        available: part of this version.
        package: a Python package that must be installed, none if empty.
    """

    name: str
    device: str
    description: str
    one_process: bool = False
    benchmark_only: bool = False
    expert_major: bool = False
    carries_fp8: bool = False
    available: bool = True
    package: str = ""

    @property
    def installed(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None


_CONNECTORS = {
    info.name: info
    for info in (
        ConnectorInfo(
            name="loopback",
            device="cpu",
            description="both roles in one process, plain torch; the executable specification",
            one_process=True,
        ),
        ConnectorInfo(
            name="gloo",
            device="cpu",
            description="CPU tensors over TCP; any network",
        ),
        ConnectorInfo(
            name="nccl",
            device="cuda",
            description="GPU tensors, point to point; any network",
        ),
        ConnectorInfo(
            name="deepep",
            device="cuda",
            description="DeepEP low-latency kernels over NVLink or RDMA",
            expert_major=True,
            carries_fp8=True,
            package="deep_ep",
        ),
        ConnectorInfo(
            name="nvlink",
            device="cuda",
            description="one-sided writes into symmetric memory over NVLink, one host",
            carries_fp8=True,
            package="sglang_afd_kernel",
        ),
        ConnectorInfo(
            name="null",
            device="any",
            description="moves nothing; each role runs alone, to be timed",
            benchmark_only=True,
            carries_fp8=True,
        ),
    )
}


# What `auto` takes. DeepEP must be asked for until serving over it is tested; its buffers also grow
# to gigabytes with the capacity.
_AUTO_CHOICE = {"cpu": "gloo", "cuda": "nccl"}


class _ConnectorModule(Protocol):
    """What an available connector's module offers."""

    def create_attn(
        self, spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous | LoopbackHub
    ) -> AttnConnector: ...

    def create_ffn(
        self, spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous | LoopbackHub
    ) -> FFNConnector: ...


def names() -> tuple[str, ...]:
    """Every connector name, also of those that this version lacks; not `auto`."""
    return tuple(_CONNECTORS)


def table() -> tuple[ConnectorInfo, ...]:
    """Facts of every connector, for the documentation."""
    return tuple(_CONNECTORS.values())


def available(device: str | None = None) -> tuple[str, ...]:
    """Names that a server of this version can use here, on `device` if given."""
    return tuple(
        info.name
        for info in _CONNECTORS.values()
        if info.available
        and info.installed
        and not info.one_process
        and not info.benchmark_only
        and device in (None, info.device)
    )


def info(name: str) -> ConnectorInfo:
    """Facts of an available connector.

    Raises:
        AFDConfigError: unknown, not part of this version, or without the package it needs.
    """
    found = _CONNECTORS.get(name)
    if found is None:
        raise AFDConfigError(
            f"--afd-connector {name} is unknown; choose {_either((AUTO, *available()))}"
        )
    if not found.available:
        raise AFDConfigError(
            f"--afd-connector {name} is not part of this version; choose {_either(available())}"
        )
    if not found.installed:
        raise AFDConfigError(
            f"--afd-connector {name} needs the Python package {found.package}, which is not "
            f"installed; install it, or choose {_either(available())}"
        )
    return found


def resolve_auto(device: str) -> str:
    """The connector that `--afd-connector auto` means on `device`, "cpu" or "cuda".

    Raises:
        AFDConfigError: this version has no connector for the device.
    """
    choice = _AUTO_CHOICE.get(device)
    if choice is None:
        choices = "; ".join(f"{name} ({_CONNECTORS[name].device})" for name in available())
        raise AFDConfigError(
            f"--afd-connector {AUTO} finds no connector for --device {device} in this version; "
            f"what exists: {choices}"
        )
    return choice


def create_attn(
    name: str, spec: LinkSpec, attn_rank: int, rendezvous: Rendezvous | LoopbackHub
) -> AttnConnector:
    """Build the attention side. Waits for all ranks of the link, at most `rendezvous.timeout_s`.

    Args:
        rendezvous: a `LoopbackHub` for loopback, else a `Rendezvous`.
    Raises:
        AFDConfigError: see `info`.
        DeadlineExceeded, PeerLost: not all ranks came.
    """
    return _module(name).create_attn(spec, attn_rank, rendezvous)


def create_ffn(
    name: str, spec: LinkSpec, ffn_rank: int, rendezvous: Rendezvous | LoopbackHub
) -> FFNConnector:
    """Build the FFN side; otherwise as `create_attn`."""
    return _module(name).create_ffn(spec, ffn_rank, rendezvous)


def _module(name: str) -> _ConnectorModule:
    return cast(_ConnectorModule, importlib.import_module(f"{__package__}.{info(name).name}"))


def _either(choices: tuple[str, ...]) -> str:
    return " or ".join(choices)
