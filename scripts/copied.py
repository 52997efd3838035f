"""Fails when this tree repeats a passage of the installed SGLang.

A passage is `--lines` lines that follow one another in both files once indentation, blank lines,
comments, imports and lines with little on them are set aside. Each one is printed with both places.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SUFFIXES = {".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".sh"}
OURS = PurePosixPath("sglang/srt/disaggregation/afd")
SHORTEST_LINE = 12

Passage = tuple[str, ...]


def substance(path: Path) -> list[tuple[int, str]]:
    """Line number and stripped text of each line that says something."""
    kept = []
    for number, raw in enumerate(
        path.read_text(encoding="utf-8", errors="replace").splitlines(), 1
    ):
        text = raw.strip()
        boilerplate = text.startswith(("#", "//", "import ", "from ", "@", '"""'))
        if len(text) >= SHORTEST_LINE and not boilerplate:
            kept.append((number, text))
    return kept


def passages(path: Path, length: int) -> Iterator[tuple[int, Passage]]:
    """Every run of `length` lines of substance, with the number of its first line."""
    kept = substance(path)
    for start in range(len(kept) - length + 1):
        run = kept[start : start + length]
        yield run[0][0], tuple(text for _, text in run)


def tree_files(root: Path) -> list[Path]:
    """Our files: those that git tracks or would track, so that environments and builds stay out."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        candidates = [root / name for name in listed.split("\0") if name]
    else:  # an unpacked source archive
        tops = ("python", "test", "examples", "scripts", "benchmark", "sgl-kernel")
        candidates = [path for top in tops for path in (root / top).rglob("*")]
    return [path for path in candidates if path.suffix in SUFFIXES and path.is_file()]


def upstream_files() -> list[Path]:
    """Files of the distribution `sglang`, without what our own package lays beside them."""
    entries = importlib.metadata.files("sglang") or []
    wanted = (f for f in entries if f.suffix in SUFFIXES and not f.is_relative_to(OURS))
    return [path for path in (Path(str(f.locate())) for f in wanted) if path.is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=5, help="length of a passage (5)")
    args = parser.parse_args()

    root = Path(__file__).resolve().parent.parent
    ours: dict[Passage, list[tuple[Path, int]]] = defaultdict(list)
    for path in tree_files(root):
        for number, passage in passages(path, args.lines):
            ours[passage].append((path, number))

    theirs = upstream_files()
    if not theirs:
        print("copied.py: the installed SGLang lists no files; run `make install`", file=sys.stderr)
        return 2
    hits = 0
    for path in theirs:
        for number, passage in passages(path, args.lines):
            for mine, at in ours.get(passage, ()):
                hits += 1
                print(f"{mine.relative_to(root)}:{at} repeats {path}:{number}")
    print(f"copied.py: {hits} passage(s) shared with {len(theirs)} files of SGLang")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
