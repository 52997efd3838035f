"""Write docs/errors.md: every message of an AFD error, read from the sources. Run by `make docs`.

Looks for calls of the classes of errors.py and their subclasses, raised at once or handed on.
Imports nothing of the package, so it runs anywhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "sglang" / "srt" / "disaggregation" / "afd"
OUT = ROOT / "docs" / "errors.md"
BASE = "AFDError"

# Class by class: whom it concerns and what to do if the message itself does not say it.
WHAT_TO_DO = {
    "AFDConfigError": "Nothing was started. Change what the message names, and start again.",
    "PatchError": (
        "The installed SGLang is not the one that this version was written for. Reinstall under "
        "`constraints.txt` (`make install`) and remove other plugins that change SGLang."
    ),
    "HandshakeRefused": (
        "Two ranks were started with different models, versions or flags. Give both commands the "
        "same ones. Nothing was served."
    ),
    "PeerLost": (
        "Another rank ended or went silent. Its own log, or the text behind the colon, says why. "
        "The server ends and can be started again."
    ),
    "DeadlineExceeded": (
        "A peer is stuck, or slower than the limit. Look at its log. If it is only slow, raise "
        "`--afd-load-timeout` (start) or `--afd-peer-timeout` (serving)."
    ),
    "CapacityExceeded": (
        "Raise `--afd-max-tokens-per-rank`. The message comes before anything was sent; if it "
        "names a plan, it is a defect: please report it with the log of attention rank 0."
    ),
    "PlanMismatch": (
        "The two pools do not run the same step. That is a defect, or a foreign process on the "
        "port: please report it with the logs of both ranks and `SGLANG_AFD_LOG_PLANS=1`."
    ),
    "AFDError": "A defect, or a call in the wrong order by other code. Please report it with the log.",
    "Refused": "Status 400: the request is not served in AFD mode. The message says what is instead.",
}

# A message without a way out of its own, by a part of it.
WAYS_OUT = {
    "cannot be reached from this host": "check the address, the route and firewalls",
    "finds no connector for": "run on a CPU or on CUDA GPUs",
    "unknown host": "name a host that this machine can resolve, or an address",
    "is not a member here": "give the same `--afd-attn-ranks` and `--afd-ffn-ranks` to every command",
    "not sent in": "the process is overloaded or ends; look further up in its log",
    "no heartbeat for": "look at that rank's log; if it is only slow, raise `--afd-peer-timeout`",
    "dispatched twice without combine": "a defect: please report model and flags",
    "{flag} auto: {reasons}": "the planner found no layout; type both numbers",
    "the plan allows": "a defect: please report it with both logs",
    "announced too few rounds": "a defect: please report it with both logs",
    "instead of {": "something else talks to this port, or the versions differ",
}
_ENDS_WITH_ADVICE = re.compile(
    r"(?:[;:.,] ?|, or |and |, so )(?:at least|raise|lower|drop|leave|choose|install|reinstall|set|unset|use|"
    r"give|name|type|run|start|serve|add|change|update|check|look|see|switch|describe|convert|"
    r"measure|take|copy|does a firewall|the peer|for example|NCCL_DEBUG)|must be|\{way_out\}|needs ",
    re.IGNORECASE,
)


class Entry(NamedTuple):
    """One place that makes an error."""

    kind: str
    file: str
    where: str  # function or method
    messages: tuple[str, ...]


class Module(NamedTuple):
    name: str
    tree: ast.Module


def modules() -> list[Module]:
    paths = sorted(path for path in PACKAGE.rglob("*.py"))
    return [
        Module(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())) for path in paths
    ]


def error_classes(found: list[Module]) -> dict[str, str]:
    """Docstring by name, of `BASE` and every class below it, in order of definition."""
    classes = {
        node.name: ([base.id for base in node.bases if isinstance(base, ast.Name)], node)
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }

    def is_ours(name: str) -> bool:
        return name == BASE or (name in classes and any(is_ours(base) for base in classes[name][0]))

    return {
        name: " ".join((ast.get_docstring(node) or "").split())
        for name, (_, node) in classes.items()
        if is_ours(name)
    }


def entries(found: list[Module]) -> Iterator[Entry]:
    kinds = error_classes(found)
    for module in found:
        functions = {
            node.name: node for node in module.tree.body if isinstance(node, ast.FunctionDef)
        }
        for where, scope in _scopes(module.tree):
            for node in _own_nodes(scope):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in kinds
                    and node.args
                ):
                    messages = _texts(node.args[0], scope, functions)
                    yield Entry(node.func.id, module.name, where, tuple(messages))


def _scopes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every function with its dotted name, nested ones by the name of the outermost."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child

    yield from walk(tree, "")


def _own_nodes(scope: ast.AST) -> list[ast.stmt | ast.expr]:
    """All statements and expressions of a function, in the order of the source."""
    nodes = [node for node in ast.walk(scope) if isinstance(node, ast.stmt | ast.expr)]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def _texts(node: ast.expr, scope: ast.AST, functions: dict[str, ast.FunctionDef]) -> list[str]:
    """What an expression can say: names are followed to their assignments, calls to returns."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, scope, functions), *_texts(node.orelse, scope, functions)]
    if isinstance(node, ast.Name):
        values = [
            assign.value
            for assign in _own_nodes(scope)
            if isinstance(assign, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == node.id for t in assign.targets)
        ]
        if values:
            return [text for value in values for text in _texts(value, scope, functions)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        called = functions.get(node.func.id)
        if called is not None:
            returns = [n.value for n in _own_nodes(called) if isinstance(n, ast.Return) and n.value]
            return [text for value in returns for text in _texts(value, called, functions)]
    return [_template(node)]


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + _short(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "{" + _short(node) + "}"


def _short(node: ast.expr) -> str:
    """The placeholder of an expression: its last name, which is what a reader can guess from."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _short(node.value)
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return _short(node.args[0]) if name == "join" and node.args else _short(node.func)
    if isinstance(node, ast.BinOp):
        return _short(node.left)
    return "..."


def _cell(message: str) -> str:
    """A message as code in a table cell."""
    text = re.sub(r"\s+", " ", message).replace("`", "'").replace("|", "\\|")
    return f"`{text}`"


def _way_out(message: str) -> str:
    if message == "{reason}":
        return "what the leader answered: one of the other messages"
    for part, advice in WAYS_OUT.items():
        if part in message:
            return advice
    return "in the message" if _ENDS_WITH_ADVICE.search(message) else "as above"


def _table(rows: list[Entry]) -> list[str]:
    lines = ["| message | what to do | from |", "|---|---|---|"]
    told = set()
    for row in rows:
        for message in row.messages:
            if (message, row.file) not in told:
                told.add((message, row.file))
                lines.append(
                    f"| {_cell(message)} | {_way_out(message)} | `{row.file}`, `{row.where}` |"
                )
    return lines


def text() -> str:
    found = modules()
    kinds = error_classes(found)
    rows = list(entries(found))
    lines = [
        "# Error messages",
        "",
        "Generated by `scripts/gen_errors.py` from the sources: every error that AFD makes, by class.",
        '`{...}` stands for a value. "As above" is the sentence above the table.',
        "[Troubleshooting](troubleshooting.md) starts from symptoms.",
        "",
        "Refusals of SGLang's own flags, one per flag, are listed in [Flags](flags.md#upstream-flags-"
        "that-afd-does-not-serve).",
    ]
    for kind, meaning in sorted(kinds.items(), key=lambda item: item[0] == BASE):
        own = [row for row in rows if row.kind == kind]
        serving = [row for row in own if not row.file.startswith("planner/")]
        planning = [row for row in own if row.file.startswith("planner/")]
        if serving:
            advice = WHAT_TO_DO.get(kind, "Look at the log of the rank that the message names.")
            lines += ["", f"## {kind}", "", meaning, "", advice, "", *_table(serving)]
        if planning:
            lines += [
                "",
                f"## {kind} of the planner",
                "",
                "One line and exit code 2. Change the flag or the key that it names.",
                "",
                *_table(planning),
            ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    OUT.write_text(text())
