"""The pre-imported process, once per session, for all tests that start engines or servers; and
`--results FILE`, which keeps what a long run showed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from long_results import Results
from matrix.harness import Zygote


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write outcome and seconds of each test as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--results"):
        config.pluginmanager.register(Results(config.getoption("--results")))


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    running = Zygote(tmp_path_factory.mktemp("zygote"))
    yield running
    running.close()
