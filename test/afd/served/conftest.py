"""Session fixtures: models once, one server at a time, its answers kept for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matrix.harness import Zygote
from served import models
from served.record import Record, bench_serving, collect
from served.server import Server

AFD = ("--disaggregation-mode", "afd")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="session")
def model_path(workspace: Path, zygote: Zygote) -> Callable[[str], Path]:
    """Folder of the model "demo" or "tiny", made when first asked for."""

    @cache
    def get(name: str) -> Path:
        if name == "demo":
            return models.demo_model()
        return zygote.call(models.tiny_model, workspace / "tiny")

    return get


@pytest.fixture(scope="session")
def serve(
    workspace: Path, model_path: Callable[[str], Path], zygote: Zygote
) -> Iterator[Callable[..., Server]]:
    """Starts a server of a model (its name, or a folder) with flags, forked from the zygote; ended
    with the session at the latest."""
    started: list[Server] = []

    def get(model: str | Path, *flags: str, log: str, **options: Any) -> Server:
        folder = model if isinstance(model, Path) else model_path(model)
        server = Server(workspace / f"{log}.log", folder, *flags, **{"zygote": zygote, **options})
        started.append(server)
        return server

    yield get
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def record_of(serve: Callable[..., Server], zygote: Zygote) -> Callable[..., Record]:
    """Answers of a server of `model` with `flags`; each combination is started once.

    AFD without further flags is a fresh interpreter, as on a user's machine; the others are forks.
    """

    @cache
    def get(model: str, *flags: str) -> Record:
        plain = flags == AFD
        log = f"{model}{'_'.join(flags).replace('/', '_')}"
        server = serve(model, *flags, log=log, **({"zygote": None} if plain else {}))
        try:
            record = collect(server)
            if plain:
                record.bench_serving = bench_serving(server, zygote)
            record.exit_code = server.stop()
        finally:
            server.kill()
        return record

    return get
