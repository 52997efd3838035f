"""Lets tests import what stands beside the benchmark programs, as they do themselves, and the
generators of pages."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "benchmark" / "afd"), str(ROOT / "scripts")]
