"""Write docs/known_failures.md: failures reported for other AFD systems, and our tests against them.

The rows stand in test/afd/known_failures.toml; which tests cover a row is read from their
`@pytest.mark.pain(row, ...)`. Imports no test. Run by `make docs`; exits with 1 if rows and marks
contradict each other.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "test"
ROWS = TESTS / "afd" / "known_failures.toml"
OUT = ROOT / "docs" / "known_failures.md"

MARK = "pain"
# Marks of tests that `make test` leaves out, and what the page says of them.
ELSEWHERE = {"gpu": "on GPUs", "long": "`make test-long`", "models": "`make test-models`"}
NOT_APPLICABLE, OPEN = "not applicable", "open"
KEYS = {"area", "title", "requirement", "status", "reason"}


class Test(NamedTuple):
    """A test as the page names it, and where it runs if not in `make test`."""

    name: str
    elsewhere: str


class Row(NamedTuple):
    number: int
    area: str
    title: str
    requirement: str
    status: str  # one of the two constants, or empty
    reason: str
    tests: tuple[Test, ...]

    @property
    def result(self) -> str:
        if self.status:
            return self.status
        gpus = any(ELSEWHERE["gpu"] in test.elsewhere for test in self.tests)
        return "covered on GPUs" if gpus else "covered"


class Contradiction(Exception):
    """All that is wrong with the rows and the marks, one line each."""


def marks(tests: Path) -> tuple[dict[int, list[Test]], list[str]]:
    """The tests of each row, in the order of file and line; and what is wrong with the marks."""
    found: dict[int, list[Test]] = {}
    wrong = []
    for path in sorted(tests.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(tests).as_posix().removeprefix("afd/")
        everywhere = _names(_module_marks(tree))
        used = set()
        for name, decorators in _tests(tree):
            calls = [node for node in decorators if _mark(node) == MARK]
            used |= {id(call) for call in calls}
            elsewhere = [
                text
                for mark, text in ELSEWHERE.items()
                if mark in everywhere | _names(iter(decorators))
            ]
            test = Test(f"{file}::{name}", ", ".join(elsewhere))
            for number in dict.fromkeys(n for call in calls for n in _numbers(call)):
                if number is None:
                    wrong.append(f"{test.name}: {MARK} takes numbers of rows")
                else:
                    found.setdefault(number, []).append(test)
        wrong += [
            f"{file}:{node.lineno}: {MARK} does not decorate a test"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute | ast.Call)
            and _mark(node) == MARK
            and id(node) not in used
            and not (isinstance(node, ast.Attribute) and _is_called(tree, node))
        ]
    return found, wrong


def _tests(tree: ast.Module) -> Iterator[tuple[str, list[ast.expr]]]:
    """Name and decorators of each test; a method has those of its class, too."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for inner in node.body:
                if _is_test(inner):
                    yield (
                        f"{node.name}::{inner.name}",
                        [*node.decorator_list, *inner.decorator_list],
                    )
        elif _is_test(node):
            yield node.name, node.decorator_list


def _is_test(node: ast.stmt) -> bool:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and node.name.startswith("test_")


def _module_marks(tree: ast.Module) -> Iterator[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
        ):
            yield from node.value.elts if isinstance(node.value, ast.List) else [node.value]


def _names(nodes: Iterator[ast.expr]) -> set[str]:
    return {_mark(node) for node in nodes}


def _mark(node: ast.expr) -> str:
    """The name in `pytest.mark.NAME` or `pytest.mark.NAME(...)`; empty for anything else."""
    if isinstance(node, ast.Call):
        node = node.func
    is_mark = (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
    )
    return node.attr if is_mark else ""


def _numbers(call: ast.expr) -> list[int | None]:
    """The rows that a mark names; None for what is no number, or if there is none."""
    if not isinstance(call, ast.Call) or not call.args or call.keywords:
        return [None]
    return [
        arg.value if isinstance(arg, ast.Constant) and type(arg.value) is int else None
        for arg in call.args
    ]


def _is_called(tree: ast.Module, attribute: ast.Attribute) -> bool:
    return any(isinstance(node, ast.Call) and node.func is attribute for node in ast.walk(tree))


def rows(file: Path = ROWS, tests: Path = TESTS) -> list[Row]:
    """All rows with their tests.

    Raises:
        Contradiction
    """
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    areas: dict[str, str] = content.pop("areas")
    found, wrong = marks(tests)
    made = []
    for key, fields in content.items():
        row = Row(
            int(key),
            fields.get("area", ""),
            fields.get("title", ""),
            fields.get("requirement", ""),
            fields.get("status", ""),
            fields.get("reason", ""),
            tuple(found.pop(int(key), [])),
        )
        wrong += [f"row {key}: {text}" for text in _problems(row, set(fields), areas)]
        made.append(row)
    numbers = [row.number for row in made]
    if numbers != list(range(1, len(made) + 1)):
        wrong.append(f"rows must be numbered from 1 in order, and are {numbers}")
    wrong += [
        f"{test.name}: row {number} does not exist"
        for number, tests_of_it in sorted(found.items())
        for test in tests_of_it
    ]
    if wrong:
        raise Contradiction("\n".join(wrong))
    order = list(areas)
    return sorted(
        (row._replace(area=areas[row.area]) for row in made),
        key=lambda row: (order.index(content[str(row.number)]["area"]), row.number),
    )


def _problems(row: Row, keys: set[str], areas: dict[str, str]) -> Iterator[str]:
    if unknown := keys - KEYS:
        yield f"unknown key {', '.join(sorted(unknown))}"
    if row.area not in areas:
        yield f"area {row.area!r} is not in [areas]"
    if not row.title or not row.requirement:
        yield "needs a title and a requirement"
    if row.status not in ("", NOT_APPLICABLE, OPEN):
        yield f"status {row.status!r} must be {NOT_APPLICABLE!r} or {OPEN!r}"
    if bool(row.status) != bool(row.reason):
        yield "status and reason go together"
    if row.status == NOT_APPLICABLE and row.tests:
        yield f"is {NOT_APPLICABLE}, and {row.tests[0].name} covers it"
    if not row.status and not row.tests:
        yield f"has neither a status nor a test with @pytest.mark.{MARK}({row.number})"


def _status(row: Row) -> str:
    tests = "<br>".join(
        f"`{test.name}`" + (f" ({test.elsewhere})" if test.elsewhere else "") for test in row.tests
    )
    if not row.status:
        return f"covered by:<br>{tests}"
    text = f"{row.status}: {row.reason}"
    return f"{text}<br>What is tested of it:<br>{tests}" if tests else text


def text(file: Path = ROWS, tests: Path = TESTS) -> str:
    """The page.

    Raises:
        Contradiction
    """
    table = rows(file, tests)
    count = [row.result for row in table].count
    lines = [
        "# Known failures of other systems",
        "",
        "Generated by `scripts/gen_known_failures.py` from `test/afd/known_failures.toml` and the",
        "`@pytest.mark.pain(row)` of the tests.",
        "",
        f"These are {len(table)} failures reported for other AFD systems and for the parts that they are",
        "built of, or wishes of their users. Each row says what follows for this project, and which",
        "tests turn red if the failure comes here. Files of tests are below `test/afd/`.",
        "",
        "| status | rows |",
        "|---|---|",
        f"| covered by tests that need no GPU | {count('covered')} |",
        f"| covered, in part or only by tests that need GPUs | {count('covered on GPUs')} |",
        f"| not applicable: this system lacks the part that failed | {count(NOT_APPLICABLE)} |",
        f"| open: something is missing | {count(OPEN)} |",
    ]
    area = ""
    for row in table:
        if row.area != area:
            area = row.area
            lines += ["", f"## {area}", "", "| row | failure | requirement | status |"]
            lines.append("|---|---|---|---|")
        lines.append(f"| {row.number} | {row.title} | {row.requirement} | {_status(row)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    try:
        OUT.write_text(text(), encoding="utf-8")
    except Contradiction as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
