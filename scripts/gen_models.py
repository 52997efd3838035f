"""Write docs/models.md and models/verified.py of the package. Run by `make docs`.

The architectures and their expert blocks are read from upstream's model files, which are parsed and
not imported; what was shown is read from test/results/models.json, which `make test-models` writes,
and from test/results/models_gpu.json, from test/afd/models/test_gpu.py on a host with GPUs.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.disaggregation.afd.models import families, formats
from sglang.srt.disaggregation.afd.patches import UPSTREAM_VERSION

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "test" / "results" / "models.json"
GPU_RESULTS = RESULTS.with_name("models_gpu.json")
OUT = ROOT / "docs" / "models.md"
VERIFIED = ROOT / "python/sglang/srt/disaggregation/afd/models/verified.py"
PACKAGE = "sglang.srt.models"
_DRAFT = re.compile(r"NextN|MTP|Eagle|DSpark")
# Compared by test/afd/gpu, which has no JSON.
WITH_GRAPHS = frozenset({"Qwen3MoeForCausalLM"})
_MAKERS = {"FusedMoE", "get_moe_impl_class"}
_OWN_KERNELS = {"fused_moe", "fused_experts"}


class Name(NamedTuple):
    """A class of upstream's models: module below the package, and its name there."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass
class Module:
    """What one file of upstream says: its own names, where others come from, its entry classes."""

    nodes: dict[str, ast.stmt] = field(default_factory=dict)  # classes, functions, variables
    imports: dict[str, Name] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # modules that it imports as a whole
    entries: list[str] = field(default_factory=list)


# --- upstream's files --------------------------------------------------------------------------


def read_upstream() -> dict[str, Module]:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent.joinpath(*PACKAGE.split(".")[1:])
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        modules[name] = _read(ast.parse(path.read_text("utf-8-sig")))
    return modules


def _read(tree: ast.Module) -> Module:
    found = Module()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
            node.level == 1 or (node.module or "").startswith(PACKAGE + ".")
        ):
            origin = (node.module or "").removeprefix(PACKAGE + ".")
            for alias in node.names:
                found.imports[alias.asname or alias.name] = Name(origin, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith(PACKAGE + "."):
                    found.aliases[alias.asname] = alias.name.removeprefix(PACKAGE + ".")
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            found.nodes[statement.name] = statement
        elif isinstance(statement, ast.Assign) and _target(statement) != "EntryClass":
            found.nodes[_target(statement)] = statement
        elif isinstance(statement, ast.Assign):
            values = statement.value
            items = values.elts if isinstance(values, ast.List | ast.Tuple) else [values]
            found.entries += [item.id for item in items if isinstance(item, ast.Name)]
    return found


def _target(statement: ast.Assign) -> str:
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def names_in(node: ast.AST, module: Module) -> set[Name | str]:
    """Names that stand below `node`: plain ones as text, `alias.name` resolved."""
    names: set[Name | str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            origin = module.aliases.get(part.value.id)
            if origin is not None:
                names.add(Name(origin, part.attr))
    return names


def _called(node: ast.AST) -> set[str]:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)}


def blocks_of(modules: dict[str, Module], start: Name) -> list[tuple[Name, bool]]:
    """Classes reachable from an entry class that make experts; True if upstream's FusedMoE."""
    seen: set[Name] = set()
    todo, found = [start], []
    while todo:
        current = todo.pop(0)
        module = modules.get(current.module)
        if current in seen or module is None:
            continue
        seen.add(current)
        node = module.nodes.get(current.name)
        if node is None:
            if current.name in module.imports:
                todo.append(module.imports[current.name])
            continue
        names, makes = _facts_of(node, module)
        if makes is not None:
            found.append((current, makes))
        for name in sorted(names, key=str):
            if isinstance(name, Name):
                todo.append(name)
            elif name in module.nodes:
                todo.append(Name(current.module, name))
            elif name in module.imports:
                todo.append(module.imports[name])
    return sorted(found)


_facts: dict[int, tuple[set[Name | str], bool | None]] = {}


def _facts_of(node: ast.stmt, module: Module) -> tuple[set[Name | str], bool | None]:
    """Names below a node, and whether it makes experts as `FusedMoE`, in another way, or none; most
    nodes are reached from many entry classes."""
    if id(node) not in _facts:
        names, makes = names_in(node, module), None
        if isinstance(node, ast.ClassDef):
            if _called(node) & _MAKERS:
                makes = True
            elif names & _OWN_KERNELS or _has_expert_list(node):
                makes = False
        _facts[id(node)] = names, makes
    return _facts[id(node)]


def _has_expert_list(node: ast.AST) -> bool:
    """`self.experts = nn.ModuleList(...)`: one module per expert."""
    for statement in ast.walk(node):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        target, func = statement.targets[0], statement.value.func
        is_experts = isinstance(target, ast.Attribute) and target.attr == "experts"
        if is_experts and isinstance(func, ast.Attribute) and func.attr == "ModuleList":
            return True
    return False


def architectures(modules: dict[str, Module]) -> dict[str, list[tuple[Name, bool]]]:
    """Every architecture that upstream registers and that has routed experts, with its blocks."""
    found = {}
    for name, module in modules.items():
        for entry in module.entries:
            blocks = blocks_of(modules, Name(name, entry))
            if blocks:
                found[entry] = blocks
    return dict(sorted(found.items()))


# --- results -----------------------------------------------------------------------------------


@dataclass
class Shown:
    """What the tests of one architecture said."""

    passed: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    broken: list[dict[str, Any]] = field(default_factory=list)  # ended before they compared
    error: str = ""  # upstream's own, where it cannot run the family on a CPU
    gpu_error: str = ""  # and on a GPU

    @property
    def is_equal(self) -> bool:
        return bool(self.passed) and not self.failed


def read_results(path: Path = RESULTS, gpu_path: Path = GPU_RESULTS) -> dict[str, Shown]:
    """By architecture; tests that are about a format of expert weights are not among them."""
    shown: dict[str, Shown] = defaultdict(Shown)
    for on_gpu, test in [
        *((False, test) for test in _tests(path)),
        *((True, test) for test in _tests(gpu_path)),
    ]:
        if "architecture" not in test or test.get("methods"):
            continue
        if test.get("format") and "error" in test and not on_gpu:
            continue
        entry = shown[test["architecture"]]
        if "error" in test:
            if on_gpu:
                entry.gpu_error = test["error"]
            else:
                entry.error = test["error"]
        elif test["outcome"] == "passed":
            entry.passed.append(test)
        elif test["outcome"] != "skipped":
            (entry.failed if "positions" in test or not on_gpu else entry.broken).append(test)
    return shown


def _tests(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["tests"].values()) if path.is_file() else []


def formats_shown(path: Path = GPU_RESULTS) -> dict[str, dict[str, Any]]:
    """The test of each method in `models/formats.py` that was run on GPUs."""
    return {method: test for test in _tests(path) for method in test.get("methods", "").split()}


class Status(NamedTuple):
    word: str
    note: str


def status_of(name: str, blocks: list[tuple[Name, bool]], shown: dict[str, Shown]) -> Status:
    own = shown.get(name, Shown())
    if name in families.REFUSED:
        return Status("refused", families.REFUSED[name])
    if _DRAFT.search(name):
        return Status("refused", "a draft model; AFD serves no speculative decoding")
    if own.is_equal:
        return Status("equal", "")
    if own.failed:
        return Status("differs", "; ".join(sorted({t["topology"] for t in own.failed})))
    if own.broken:
        return Status("not compared", "its last test ended before it compared")
    if own.error:
        on_gpu = f"; upstream on a GPU: `{own.gpu_error}`" if own.gpu_error else ""
        return Status("needs GPU", f"upstream on CPU: `{own.error}`{on_gpu}")
    equal = sorted({other for other, entry in shown.items() if entry.is_equal})
    return Status("not compared", _same_block(blocks, equal))


_BLOCKS: dict[str, list[tuple[Name, bool]]] = {}


def _same_block(blocks: list[tuple[Name, bool]], equal: list[str]) -> str:
    ours = {block for block, _ in blocks}
    same = [name for name in equal if ours & {block for block, _ in _BLOCKS.get(name, [])}]
    return f"same block as {same[0]}" if same else ""


# --- pages -------------------------------------------------------------------------------------


def page(found: dict[str, list[tuple[Name, bool]]], shown: dict[str, Shown]) -> str:
    _BLOCKS.update(found)
    by_block: dict[str, list[str]] = defaultdict(list)
    for name, blocks in found.items():
        by_block[", ".join(f"`{block}`" for block, _ in blocks)].append(name)
    equal_blocks = _equal_blocks(shown, found)
    dates, commits, seconds = _run_facts()
    lines = [
        "# Models",
        "",
        f"Generated by `scripts/gen_models.py` from the model files of sglang {UPSTREAM_VERSION} and",
        "from `test/results/models.json`. It lists every architecture that upstream registers and that",
        "has routed experts, grouped by the class that holds them.",
        "",
        f"**{len(found)} architectures, {len(by_block)} groups, {len(equal_blocks)} distinct expert "
        "blocks equal to colocated.**",
        "",
        "*Equal*: a tiny random checkpoint in the family's published layout, with the family's own",
        "traits, served by upstream alone and by AFD, FP32 on CPU (upstream's Triton kernels in Triton's",
        "interpreter): every log probability of given sequences within 1e-4, the same greedy tokens,",
        "and each role read only its tensors. 2A1F means two attention ranks and one FFN rank.",
        "On GPUs (1A1F, BF16 or 16-bit activations) the mean difference of log probabilities is at most",
        "1.5 times that of the colocated server between one sequence at a time and all at once, or 0.02.",
        "*Not compared*: nothing is known to be in the way; the server warns. *Needs GPU*: upstream",
        "itself cannot run the family on a CPU, so nothing could be compared there. *Refused*: the",
        "server ends with the reason.",
        "",
        "*Attention* says how the attention ranks run the model: `DP`, upstream's DP-attention form, or",
        "`whole`, every rank a whole copy of all but the experts, as if it were alone, which works for",
        "models without such a form. *Graphs*: decode steps were CUDA graphs on both roles and gave the",
        "same tokens.",
        "",
        f"Run on {dates}, commit {commits}; all of it takes {seconds // 60} min on two cores "
        "(`make test-models`).",
        *_gpu_facts(),
        "",
        "| architecture | status | attention | equal with | microbatches | graphs | format | where "
        "| positions | largest difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for block in sorted(by_block):
        lines.append(f"| **{block}** | | | | | | | | | |")
        lines += [_row(name, found[name], shown) for name in sorted(by_block[block])]
    return "\n".join(lines + _formats()) + "\n"


def _row(name: str, blocks: list[tuple[Name, bool]], shown: dict[str, Shown]) -> str:
    status = status_of(name, blocks, shown)
    word = f"{status.word}: {status.note}" if status.note else status.word
    if status.word == "refused":
        return f"| {name} | {word} | | | | | | | | |"
    attention = "DP" if name in families.WITH_DP_FORM else "whole"
    tests = shown[name].passed if name in shown else []
    if not tests:
        return f"| {name} | {word} | {attention} | | | | | | | |"
    equal = ", ".join(sorted({t["topology"].partition("-")[0] for t in tests}))
    overlap = "1, 2" if any("mb2" in t["topology"] for t in tests) else "1"
    graphs = "yes" if name in WITH_GRAPHS or any(t.get("graphs") for t in tests) else "not run"
    kinds = ", ".join(sorted({t["format"] for t in tests}))
    where = ", ".join(sorted({t["device"] for t in tests}))
    positions = sum(t["positions"] for t in tests)
    # CPU and GPU differences are of other orders; one that was seen on both counts as on a CPU.
    exact = [t for t in tests if t["device"] == "CPU"] or tests
    largest = max(float(t["largest"]) for t in exact)
    return (
        f"| {name} | {word} | {attention} | {equal} | {overlap} | {graphs} | {kinds} | {where} "
        f"| {positions} | {largest:.0e} |"
    )


def _equal_blocks(shown: dict[str, Shown], found: dict[str, list[tuple[Name, bool]]]) -> set[str]:
    """As the model says it; a GPU test cannot look into its server, and the files say it."""
    return {
        test.get("block") or str(found[name][0][0])
        for name, entry in shown.items()
        if entry.is_equal
        for test in entry.passed
    }


def _run_facts() -> tuple[str, str, int]:
    if not RESULTS.is_file():
        return "never", "none", 0
    tests = json.loads(RESULTS.read_text())["tests"].values()
    dates, commits = (", ".join(sorted({t[key] for t in tests})) for key in ("date", "commit"))
    return dates, commits, round(sum(t["seconds"] for t in tests))


def _gpu_facts() -> list[str]:
    if not GPU_RESULTS.is_file():
        return []
    tests = json.loads(GPU_RESULTS.read_text())["tests"].values()
    dates = sorted({test["date"] for test in tests})
    devices = sorted({test["device"] for test in tests if "device" in test})
    return [
        f"Run on GPUs: {', '.join(dates)}, {', '.join(devices)} (`test/afd/models/test_gpu.py`)."
    ]


def _formats() -> list[str]:
    """The section about formats of expert weights."""
    lines = [
        "",
        "## Formats of expert weights",
        "",
        "By the method that the checkpoint's `quantization_config` or `--quantization` names.",
        "",
        "| method | what | under AFD |",
        "|---|---|---|",
    ]
    on_gpu = formats_shown()
    for name, text in {**formats.SERVED, **formats.UNTESTED}.items():
        test, served = on_gpu.get(name), name in formats.SERVED
        if test is not None and test["outcome"] == "passed":
            word = (
                f"equal on {test['device']}, {test['topology']}, {test['positions']} positions, mean "
                f"difference {test['mean']} (colocated, one at a time against batched: "
                f"{test['colocated_mean']})"
            )
        else:
            word = "served" if served else "refused unless `--afd-allow-untested` is given"
            if test is not None:
                word += (
                    f"; upstream on a GPU: `{test['error']}`" if "error" in test else "; differs"
                )
        lines.append(f"| `{name or 'none'}` | {text} | {word} |")
    errors = sorted(
        {(t["format"], t["error"]) for t in _tests(RESULTS) if t.get("format") and "error" in t}
    )
    if errors:
        lines += [
            "",
            "On a CPU only unquantised experts were compared with colocated, since upstream runs no",
            "other there. What its colocated engine says of a tiny Qwen3-MoE:",
            "",
            "| format | upstream on CPU |",
            "|---|---|",
            *(f"| {text} | `{error}` |" for text, error in errors),
        ]
    return lines


def verified_module(shown: dict[str, Shown]) -> str:
    names = sorted(name for name, entry in shown.items() if entry.is_equal)
    overlap = sorted(
        name
        for name, entry in shown.items()
        if entry.is_equal and any("mb2" in test["topology"] for test in entry.passed)
    )
    kinds = sorted(
        method for method, test in formats_shown().items() if test["outcome"] == "passed"
    )
    lines = [
        '"""Generated by scripts/gen_models.py from test/results/: what was shown."""',
        "",
    ]
    lines += ["from __future__ import annotations", ""]
    for comment, variable, items in (
        ("Equal to colocated in every topology that was tried.", "EQUAL", names),
        ("Also with two microbatches.", "EQUAL_WITH_TWO_MICROBATCHES", overlap),
        ("Formats of expert weights that were equal to colocated on GPUs.", "FORMATS", kinds),
    ):
        lines.append(f"# {comment}")
        if not items:  # as the formatter writes it
            lines.append(f"{variable}: frozenset[str] = frozenset(())")
            continue
        lines.append(f"{variable}: frozenset[str] = frozenset(")
        lines += ["    (", *(f'        "{name}",' for name in items), "    )", ")"]
    return "\n".join(lines) + "\n"


def main() -> None:
    found = architectures(read_upstream())
    shown = read_results()
    OUT.write_text(page(found, shown))
    VERIFIED.write_text(verified_module(shown))


if __name__ == "__main__":
    main()
