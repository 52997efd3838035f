"""What one GPU, and the domain that it sits in, can do. Every number has a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.planner import checks

# Lowest and highest value that can be right, to catch wrong units. The upper ends fit a rack.
_BOUNDS = {
    "memory_gb": (1.0, 5e4),
    "memory_gb_per_s": (10.0, 1e8),
    "bf16_tflops": (1.0, 1e6),
    "fp8_tflops": (1.0, 1e6),
    "link_gb_per_s": (0.1, 1e6),
    "domain_gpus": (1, 1e5),
    "host_gpus": (1, 1e3),
}


class Number(NamedTuple):
    """A value in the unit that its key names, and where it is from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One rank's share of a machine.

    Attributes:
        memory_bytes: device memory of one rank.
        memory_rate: bytes/s of that memory.
        bf16_rate, fp8_rate: dense FLOP/s.
        link_rate: bytes/s of one rank to the others of its domain, one direction.
        domain_gpus: ranks that reach each other at `link_rate`.
        host_gpus: ranks of one operating system.
        numbers: value and source of each number, by its key in the file.
    """

    name: str
    title: str
    memory_bytes: float
    memory_rate: float
    bf16_rate: float
    fp8_rate: float
    link_rate: float
    domain_gpus: int
    host_gpus: int
    numbers: Mapping[str, Number]

    def math_rate(self, weight_bytes: float) -> float:
        """Dense FLOP/s of a GEMM whose weights take `weight_bytes` each."""
        return self.fp8_rate if weight_bytes <= 1 else self.bf16_rate


def names() -> tuple[str, ...]:
    """Machines that the planner knows."""
    return tuple(_builtin())


def load(which: str) -> Hardware:
    """A machine by name, or from a JSON file of the same form as one entry of data/hardware.json.

    Raises:
        AFDConfigError: unknown name, unknown or missing key, a number without a source, or a
            number that cannot be right.
    """
    known = _builtin()
    if which in known:
        return _parse(which, known[which], f"hardware {which}")
    path = Path(which)
    if path.suffix != ".json":
        raise AFDConfigError(
            f"--hardware {which} is unknown; choose one of {', '.join(known)}, or a .json file"
        )
    return _parse(path.stem, checks.read_json(path, "--hardware"), f"--hardware {path}")


def by_device_name(device: str) -> Hardware | None:
    """The machine whose GPU calls itself `device`, for example "NVIDIA H200"; None if unknown."""
    found = [
        (len(text), name)
        for name, entry in _builtin().items()
        for text in entry["match"]
        if text in device
    ]
    # The longest match: "GB200" also contains "B200".
    return load(max(found)[1]) if found else None


def _builtin() -> Mapping[str, Any]:
    return checks.read_json(checks.DATA / "hardware.json", "planner data")


def _parse(name: str, entry: Mapping[str, Any], where: str) -> Hardware:
    checks.keys(where, entry, _BOUNDS, ("title", "match"))
    numbers: dict[str, Number] = {}
    for key, (low, high) in _BOUNDS.items():
        cell = checks.mapping(f"{where}: {key}", entry[key])
        checks.keys(f"{where}: {key}", cell, ("value", "source"), ())
        value = checks.number(f"{where}: {key}", cell["value"], low, high)
        if not isinstance(cell["source"], str) or not cell["source"].strip():
            raise AFDConfigError(f"{where}: {key} has no source; say where the number is from")
        numbers[key] = Number(value, cell["source"])
    known = {key: number.value for key, number in numbers.items()}
    if known["host_gpus"] > known["domain_gpus"]:
        raise AFDConfigError(f"{where}: host_gpus exceeds domain_gpus")
    return Hardware(
        name=name,
        title=str(entry.get("title", name)),
        memory_bytes=known["memory_gb"] * 1e9,
        memory_rate=known["memory_gb_per_s"] * 1e9,
        bf16_rate=known["bf16_tflops"] * 1e12,
        fp8_rate=known["fp8_tflops"] * 1e12,
        link_rate=known["link_gb_per_s"] * 1e9,
        domain_gpus=int(known["domain_gpus"]),
        host_gpus=int(known["host_gpus"]),
        numbers=numbers,
    )
