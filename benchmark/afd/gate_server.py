"""`python -m sglang.launch_server` for the gate: `gate_server.py [flags of the server]`.

A process that is spawned runs the main module of its parent first, so what stands at the top here
also runs in every rank: the path of `gate_forced`, and the fault that AFD_GATE_FAULT names.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

FAULT = "AFD_GATE_FAULT"

if os.environ.get(FAULT):
    import gate_faults

    gate_faults.install(os.environ[FAULT])

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
