"""A results file: what was run, where, and its rows."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "sglang", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm", "deep_ep")


def write(path: Path, bench: str, rows: list[dict[str, Any]]) -> None:
    """Write all rows so far; whole or not at all, so that a time-out loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "bench": bench,
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "versions": _versions(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": rows,
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def commit() -> str:
    """Of the checkout that holds this file; AFD_COMMIT names it for a copy without its history."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return os.environ.get("AFD_COMMIT") or found.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["driver"] = _driver()
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = str(torch.__version__) if package == "torch" else "unknown"
    return versions


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.split("\n", 1)[0].strip()
