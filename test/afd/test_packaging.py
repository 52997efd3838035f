"""The wheel holds only our files, installs beside SGLang, and leaves SGLang intact when removed."""

from __future__ import annotations

import configparser
import hashlib
import importlib.metadata
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
OURS = "sglang/srt/disaggregation/afd/"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed within two minutes."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def pip(*arguments: str | Path, interpreter: Path | None = None) -> str:
    """Our pip, without index and configuration; on another interpreter if one is named."""
    target = ("--python", interpreter) if interpreter else ()
    return run(sys.executable, "-m", "pip", "--isolated", "--no-cache-dir", *target, *arguments)


def copy_tree(source: Path, target: Path, wanted: list[str]) -> None:
    for name in wanted:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((source / name).read_bytes())


def hashes(root: Path) -> dict[str, str]:
    """SHA-256 of every file below `root` but bytecode, by relative path."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def sources() -> set[str]:
    """What belongs in the wheel: every module, the planner's data, and the map of the package."""
    root = REPO / "python"
    package = root / OURS
    files = (path for suffix in ("py", "json") for path in package.rglob(f"*.{suffix}"))
    found = {path.relative_to(root).as_posix() for path in files}
    readme = package / "README.md"
    return found | ({readme.relative_to(root).as_posix()} if readme.exists() else set())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the tree stays clean and its old builds cannot leak in."""
    top = tmp_path_factory.mktemp("wheel")
    copy_tree(REPO / "python", top / "python", sorted(sources() | {"pyproject.toml", "README.md"}))
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", top, top / "python")
    (built,) = top.glob("*.whl")
    return built


def test_wheel_holds_only_our_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    info = {name for name in names if name.startswith("sglang_afd-0.1.0.dist-info/")}
    assert names - info == sources()
    assert {Path(name).name for name in info} >= {"METADATA", "RECORD", "WHEEL"}


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("sglang_afd-0.1.0.dist-info/METADATA").decode()
        entries = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        points = configparser.ConfigParser(delimiters=("=",))
        points.read_string(archive.read(entries[0]).decode() if entries else "")
    assert "Requires-Dist: sglang==0.5.17\n" in text
    assert "License-Expression: Apache-2.0\n" in text
    plugin = OURS.replace("/", ".") + "plugin"
    assert {name: dict(points[name]) for name in points.sections()} == {
        "sglang.srt.plugins": {"afd": f"{plugin}:register"},
        "sglang.srt.platforms": {"afd": f"{plugin}:bootstrap"},
    }


def test_every_entry_point_exists() -> None:
    tree = (REPO / "python" / OURS / "plugin.py").read_text(encoding="utf-8")
    assert "def register(" in tree
    assert "def bootstrap(" in tree


@pytest.mark.pain(63)
def test_installs_beside_upstream_and_leaves_it_intact(wheel: Path, tmp_path: Path) -> None:
    """In a bare environment with SGLang's own files: install, find both, remove, compare."""
    venv.create(tmp_path / "env", with_pip=False)
    interpreter = tmp_path / "env/bin/python"
    site = Path(
        run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    upstream = importlib.metadata.distribution("sglang")
    inside = [
        str(file)
        for file in upstream.files or []
        if file.suffix != ".pyc" and ".." not in file.parts and not str(file).startswith(OURS)
    ]
    assert len(inside) > 1000
    copy_tree(Path(str(upstream.locate_file(""))), site, inside)
    before = hashes(site)

    pip("install", "--no-deps", "--no-index", "--no-compile", wheel, interpreter=interpreter)
    during = hashes(site)
    assert {name: during.get(name) for name in before} == before
    added = {name for name in during.keys() - before.keys() if ".dist-info/" not in name}
    assert added == sources()
    # Not an import of `sglang`, which would need torch: the first directory that Python would
    # search for each level, starting at upstream's regular package.
    assert (site / "sglang/__init__.py").is_file()
    for level in ("sglang/srt", "sglang/srt/disaggregation"):
        assert not (site / level / "__init__.py").exists(), f"{level} is no namespace any more"

    pip("uninstall", "-y", "sglang-afd", interpreter=interpreter)
    assert hashes(site) == before


def test_running_environment_is_consistent() -> None:
    assert "No broken requirements" in pip("check")


def test_this_tree_is_the_one_that_is_tested() -> None:
    """The editable install finds our files here, and upstream's where pip put them."""
    code = (
        "import importlib.util as u, pathlib, sys, types;"
        "top = pathlib.Path(u.find_spec('sglang').origin).parent;"
        # Stands for upstream's package, whose own import would take long and needs torch.
        "m = types.ModuleType('sglang'); m.__path__ = [str(top)]; sys.modules['sglang'] = m;"
        "import sglang.srt.disaggregation.afd.errors as e;"
        "print(e.__file__); print(u.find_spec('sglang.srt.disaggregation.utils').origin)"
    )
    ours, theirs = run(sys.executable, "-c", code, cwd=REPO).split()
    assert Path(ours) == REPO / "python" / OURS / "errors.py"
    assert Path(theirs).is_relative_to(
        Path(str(importlib.metadata.distribution("sglang").locate_file("")))
    )
