"""Check docker/grafana/sglang-afd.json against Grafana's own types, of its Foundation SDK.

    .venv-lint/bin/python scripts/check_dashboard.py [FILE]

The SDK reads what it knows and drops the rest, so a field that does not come back is none of
Grafana's: misspelt, or in the wrong place. Run by `make lint-docker`, in the environment of its tools.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

DASHBOARD = Path(__file__).resolve().parent.parent / "docker" / "grafana" / "sglang-afd.json"


def lost(given: Any, kept: Any, path: str = "dashboard") -> Iterator[str]:
    """Where `kept` lacks a value of `given`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from lost(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(value, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given!r} became {kept!r}"


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DASHBOARD
    given = json.loads(path.read_text())
    register_default_plugins()
    kept = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(given)))
    unknown = list(lost(given, kept))
    for each in unknown:
        print(f"{path.name}: Grafana knows no {each}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
