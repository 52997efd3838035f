"""Entry point: `python -m sglang.srt.disaggregation.afd.planner`, or this folder as a script.

`python -m` imports the package `sglang` first, and with it PyTorch. Started by its path, as in
`python .../afd/planner plan ...`, nothing of SGLang is imported but the planner.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

_NAMES = ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.afd")


def _stand_ins() -> None:
    """Put empty packages with the right search paths in the place of the planner's parents."""
    folder = Path(__file__).resolve().parent
    # The folder of the script is on the path; its files would be found as top-level modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    for level, name in zip(range(4, 0, -1), _NAMES, strict=True):
        package = ModuleType(name)
        package.__path__ = [str(folder.parents[level - 1])]
        sys.modules[name] = package


if __name__ == "__main__":
    if not __package__:
        _stand_ins()
    from sglang.srt.disaggregation.afd.planner import cli

    sys.exit(cli.main(sys.argv[1:]))
