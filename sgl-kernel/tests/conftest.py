"""Set before CUDA starts, for the tests that let kernels of one process wait for each other."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "python"):
    sys.path.insert(0, str(folder))
# A kernel that is loaded when first used may have to wait for the GPU, on which one waits for it.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
# A hardware queue per stream, or a kernel that waits could stand before the one it waits for.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
