"""Rules on the source that no linter knows: direction of imports, docstrings, environment, excepts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = "sglang.srt.disaggregation.afd"
PACKAGE = Path(__file__).resolve().parents[2] / "python" / Path(*ROOT.split("."))
FILES = sorted(PACKAGE.rglob("*.py"))

# The pure files, and what they may import beyond the standard library and msgspec.
PURE = {
    "errors.py": set(),
    "topology.py": {f"{ROOT}.errors"},
    "messages.py": {f"{ROOT}.errors", f"{ROOT}.topology"},
    "plan.py": {f"{ROOT}.errors", f"{ROOT}.topology", f"{ROOT}.messages"},
}
# The first part of a path and the parts of our package that it must not import.
FORBIDDEN = {
    "connector": {"attention", "ffn"},
    "attention": {"ffn"},
    "ffn": {"attention"},
    "metrics": {"attention", "ffn", "status", "trace"},
    "trace": {"attention", "ffn", "status"},
    "status": {"attention", "ffn", "metrics", "trace"},
}
# Beside itself, the planner is known to the file that resolves "auto" rank counts with it.
ASKS_PLANNER = {"planner", "auto_ranks.py"}
# Only these files touch the process environment: ours is parsed in one, and the bootstrap sets
# what upstream reads before it is imported.
ENVIRONMENT = {"envs.py", "cpu.py"}


def short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that the file imports, at any depth.

    `from a import b` yields `a.b`, which is right for a module and one name too long for the rest.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_there_is_something_to_check() -> None:
    assert {"errors.py", "topology.py", "connector/base.py"} <= {short(path) for path in FILES}


@pytest.mark.parametrize("name", PURE)
def test_pure_files_need_neither_torch_nor_sglang(name: str) -> None:
    path = PACKAGE / name
    if not path.exists():
        pytest.skip(f"{name} is not written yet")
    wrong = [
        f"{name}:{line} imports {target}"
        for line, target in imports(path)
        if within(target, "torch")
        or within(target, "sglang")
        and not any(within(target, allowed) for allowed in PURE[name])
    ]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_point_one_way(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0]
    forbidden = FORBIDDEN.get(part, set()) | (set() if part in ASKS_PLANNER else {"planner"})
    wrong = [
        f"{short(path)}:{line} imports {target}"
        for line, target in imports(path)
        if any(within(target, f"{ROOT}.{other}") for other in forbidden)
    ]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=short)
def test_module_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{short(path)} does not say what it owns"
    first = docstring.splitlines()[0]
    assert len(first) < 100, (
        f"{short(path)}: first line of the docstring has {len(first)} characters"
    )


@pytest.mark.parametrize("path", FILES, ids=short)
def test_environment_is_read_in_one_place(path: Path) -> None:
    if path.name in ENVIRONMENT:
        return
    names = {"environ", "getenv", "putenv", "unsetenv", "environb"}
    wrong = [
        f"{short(path)}:{node.lineno} uses os.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    wrong += [
        f"{short(path)}:{line} imports {target}"
        for line, target in imports(path)
        if target in {f"os.{name}" for name in names}
    ]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=short)
def test_no_exception_is_swallowed(path: Path) -> None:
    wrong = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ExceptHandler):
            continue
        at = f"{short(path)}:{node.lineno}"
        if node.type is None:
            wrong.append(f"{at}: bare except")
        elif all(isinstance(step, ast.Pass) for step in node.body):
            wrong.append(f"{at}: except that only passes")
    assert not wrong
