"""Patch points: hashes on the pinned wheel, refusal of drift, and silence while AFD is off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.disaggregation.afd import imports, patches
from sglang.srt.disaggregation.afd.errors import PatchError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def upstream() -> Path:
    import sglang

    return Path(sglang.__file__).resolve().parent.parent


@pytest.mark.pain(26)
@pytest.mark.parametrize("row", patches.ROWS, ids=[row.target for row in patches.ROWS])
def test_source_hash_is_that_of_the_pinned_wheel(row):
    assert patches.source_hash(row.target) == row.source_hash
    assert callable(patches.pkgutil.resolve_name(patches._HERE + row.hook))
    assert row.why.endswith(".")


@pytest.mark.long
def test_drift_report(upstream, tmp_path):
    command = [sys.executable, ROOT / "scripts" / "patch_table.py", "drift"]
    same = subprocess.run([*command, upstream], capture_output=True, text=True, check=False)
    assert same.returncode == 0, same.stdout + same.stderr
    other = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert other.stdout.count("missing") == len(patches.ROWS)


@pytest.mark.pain(26)
def test_changed_target_is_refused_by_name(monkeypatch):
    row = patches.ROWS[0]._replace(source_hash="0" * 16)
    with pytest.raises(PatchError, match=row.target):
        patches._hook([row], sys)


def test_missing_target_is_refused_by_name():
    with pytest.raises(PatchError, match=r"sglang\.srt\.plugins:nothing_here does not exist"):
        patches.source_hash("sglang.srt.plugins:nothing_here")


@pytest.mark.pain(26)
def test_other_upstream_version_is_refused(monkeypatch):
    monkeypatch.setattr(patches, "version", lambda name: "0.5.99")
    with pytest.raises(PatchError, match=r"sglang 0\.5\.99 is installed"):
        patches._check_version()


OFF_SCRIPT = """
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
load_plugins()
import sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server
from sglang.srt.disaggregation.afd import patches
args = ServerArgs(model_path="none")
allowed = {row.target.replace(":", ".") for row in patches.ROWS if row.group == "cpu"}
extra = {t for t in HookRegistry._patched if "server_args" not in t} - allowed
print("EXTRA", sorted(extra))
patches.apply("afd")
patches.verify("experts_module"); patches.verify("attention"); patches.verify("launch")
print("VERIFIED")
"""


@pytest.mark.long
@pytest.mark.pain(63)
def test_no_hook_of_the_mode_is_in_force_while_it_is_off():
    done = subprocess.run(
        [sys.executable, "-c", OFF_SCRIPT], capture_output=True, text=True, check=False, timeout=200
    )
    assert "EXTRA []" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "VERIFIED" in done.stdout, done.stderr[-2000:]


def test_after_import_calls_back_once_the_module_is_complete(tmp_path, monkeypatch):
    (tmp_path / "afd_probe_module.py").write_text("value = 1\nlast = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    imports.after_import("afd_probe_module", lambda module: seen.append(module.last))
    assert seen == []
    import afd_probe_module  # noqa: F401

    assert seen == [2]
    imports.after_import("afd_probe_module", lambda module: seen.append("now"))
    assert seen == [2, "now"]


def test_error_of_a_callback_fails_the_import(tmp_path, monkeypatch):
    (tmp_path / "afd_probe_failing.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def refuse(module):
        raise PatchError("no")

    imports.after_import("afd_probe_failing", refuse)
    with pytest.raises(PatchError):
        import afd_probe_failing  # noqa: F401
