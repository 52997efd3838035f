"""What `--results FILE` keeps of a run: outcome, seconds, date, commit and properties of each test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest


class Results:
    """Collects outcomes; a test counts as failed if its setup or teardown did.

    The file is written after every test, so a run that is ended keeps what it showed. What ran
    before and not now stays, each test with the commit that it ran at, unless there is no such test.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, str | float]] = {}
        # Of the code that runs; the tree may change meanwhile.
        self._run = {"date": time.strftime("%Y-%m-%d"), "commit": _commit()}
        self._ran: set[str] = set()
        if path.exists():
            self._tests = json.loads(path.read_text())["tests"]

    @pytest.hookimpl(tryfirst=True)  # before -m and -k leave tests out
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        known = {item.nodeid for item in items}
        files = {_file(name) for name in known}
        for name in list(self._tests):
            was_collected = _file(name) in files
            if name not in known if was_collected else not (config.rootpath / _file(name)).exists():
                del self._tests[name]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._ran:
            self._ran.add(report.nodeid)
            self._tests[report.nodeid] = {"outcome": "passed", "seconds": 0.0, **self._run}
        test = self._tests[report.nodeid]
        test["seconds"] = round(float(test["seconds"]) + report.duration, 2)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        for name, value in report.user_properties:
            test[name] = value
        if report.when == "teardown":
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"tests": self._tests}, indent=1) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _commit() -> str:
    """As benchmarks name it: a GPU host may have a copy of the tree and no history."""
    if named := os.environ.get("AFD_COMMIT"):
        return named
    if not shutil.which("git"):
        return ""
    # Results, and the pages made of them, are what runs leave behind.
    code = ["--", ".", ":!test/results", ":!docs"]
    told, changed = (
        subprocess.run(["git", *command], capture_output=True, text=True, check=False).stdout
        for command in (["describe", "--always"], ["status", "--porcelain", *code])
    )
    return told.strip() + ("-dirty" if changed else "")
