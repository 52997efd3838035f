"""Plans Qwen3-235B on eight H200s and on a GB200 NVL72: no GPU, no weights, a few seconds.

    python examples/plan_qwen3_235b.py             # both plans, then what a faster link changes
    python examples/plan_qwen3_235b.py --context 32768

The planner is started by its path, so that neither SGLang nor PyTorch is imported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLANNER = ROOT / "python" / "sglang" / "srt" / "disaggregation" / "afd" / "planner"
MODEL = "Qwen3-235B-A22B-FP8"
# Not a connector of this version: what rack-scale kernels would have to reach.
FAST_LINK = (
    *("--set", "nccl.round_trip_us=9"),
    *("--set", "nccl.rank_us=1"),
    *("--set", "nccl.link_share=0.6"),
)


def plan(title: str, *arguments: str) -> int:
    """Run the planner's `plan` under a heading and return its exit code."""
    print(f"\n=== {title}\n", flush=True)
    command = [sys.executable, str(PLANNER), "plan", "--model", MODEL, *arguments]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", default="16384", help="tokens per request; default 16384")
    context = ("--context", parser.parse_args().context)
    nccl = ("--connector", "nccl")
    rack = ("--hardware", "gb200-nvl72", "--gpus", "72")
    return max(
        plan("8 x H200", "--hardware", "h200", "--gpus", "8", *context, *nccl),
        plan("GB200 NVL72, connector nccl", *rack, *context, *nccl),
        plan("GB200 NVL72, a link like FastAFD's", *rack, *context, *nccl, *FAST_LINK),
    )


if __name__ == "__main__":
    sys.exit(main())
