"""Checks of what people type into the planner and its files. Every error names the key."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sglang.srt.disaggregation.afd.errors import AFDConfigError

DATA = Path(__file__).resolve().parent / "data"


def number(where: str, value: Any, low: float, high: float, unit: str = "") -> float:
    """`value` as a float within [low, high].

    Args:
        where: the flag or the key, as the user knows it.
        unit: shown in the error.
    Raises:
        AFDConfigError: not a number, not finite, or outside. The bounds are wide: what they catch
            is a wrong unit or a slip of a decimal point.
    """
    # bool is an int in Python, and never meant here.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AFDConfigError(f"{where} is {value!r}, must be a number")
    if not math.isfinite(value) or not low <= value <= high:
        raise AFDConfigError(
            f"{where} is {value:g}, must be from {low:g} to {high:g}{' ' + unit if unit else ''}"
        )
    return float(value)


def count(where: str, value: Any, low: int = 1, high: int = 10**7) -> int:
    """`value` as an int within [low, high].

    Raises:
        AFDConfigError
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise AFDConfigError(f"{where} is {value!r}, must be a whole number")
    if not low <= value <= high:
        raise AFDConfigError(f"{where} is {value}, must be from {low} to {high}")
    return value


def keys(
    where: str, given: Collection[str], needed: Collection[str], optional: Collection[str]
) -> None:
    """Refuse missing and unknown keys: a misspelt key would silently keep a default.

    Raises:
        AFDConfigError
    """
    unknown = sorted(set(given) - set(needed) - set(optional))
    if unknown:
        known = ", ".join(sorted({*needed, *optional}))
        raise AFDConfigError(f"{where}: unknown key {unknown[0]!r}; known are {known}")
    missing = sorted(set(needed) - set(given))
    if missing:
        raise AFDConfigError(f"{where}: key {missing[0]!r} is missing")


def mapping(where: str, value: Any) -> Mapping[str, Any]:
    """`value` if it is a JSON object.

    Raises:
        AFDConfigError
    """
    if not isinstance(value, dict):
        raise AFDConfigError(f"{where} is a {type(value).__name__}, must be a JSON object")
    return value


def read_json(path: Path, flag: str) -> Mapping[str, Any]:
    """The JSON object in a file that the user named with `flag`.

    Raises:
        AFDConfigError: no such file, not JSON, or no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AFDConfigError(
            f"{flag} {path}: cannot be read ({error}); name a JSON file"
        ) from error
    try:
        return mapping(f"{flag} {path}", json.loads(text))
    except json.JSONDecodeError as error:
        raise AFDConfigError(f"{flag} {path} is not JSON: {error}") from error
