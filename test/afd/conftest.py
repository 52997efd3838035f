"""The pre-imported process, once per session, for all tests that start engines or servers; and
`--results FILE`, which keeps what a long run showed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from matrix.harness import Zygote


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write outcome and seconds of each test as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--results"):
        config.pluginmanager.register(Results(config.getoption("--results")))


class Results:
    """Collects outcomes; a test counts as failed if its setup or teardown did.

    The file is written after every test: a run that is ended keeps what it showed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, str | float]] = {}
        self._commit = _commit()  # of the code that runs; the tree may change meanwhile

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(float(test["seconds"]) + report.duration, 2)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        for name, value in report.user_properties:
            test[name] = value
        if report.when == "teardown":
            self._write()

    def _write(self) -> None:
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": self._commit,
            "tests": self._tests,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(result, indent=1) + "\n")


def _commit() -> str:
    """As benchmarks name it: a GPU host may have a copy of the tree and no history."""
    if named := os.environ.get("AFD_COMMIT"):
        return named
    if not shutil.which("git"):
        return ""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    running = Zygote(tmp_path_factory.mktemp("zygote"))
    yield running
    running.close()
