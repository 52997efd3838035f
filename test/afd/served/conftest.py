"""Session fixtures: models once, one server at a time, its answers kept for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from served import models
from served.record import Record, bench_serving, collect
from served.server import Server

AFD = ("--disaggregation-mode", "afd")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="session")
def model_path(workspace: Path) -> Callable[[str], Path]:
    """Folder of the model "demo" or "tiny", made when first asked for."""

    @cache
    def get(name: str) -> Path:
        return models.demo_model() if name == "demo" else models.tiny_model(workspace / "tiny")

    return get


@pytest.fixture(scope="session")
def record_of(workspace: Path, model_path: Callable[[str], Path]) -> Callable[..., Record]:
    """Answers of a server of `model` with `flags`; each combination is started once."""

    @cache
    def get(model: str, *flags: str) -> Record:
        log = workspace / f"{model}{'_'.join(flags).replace('/', '_')}.log"
        server = Server(log, model_path(model), *flags)
        try:
            record = collect(server)
            if flags == AFD:
                record.bench_serving = bench_serving(server)
            record.exit_code = server.stop()
        finally:
            server.kill()
        return record

    return get
