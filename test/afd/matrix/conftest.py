"""Fixtures: models and colocated answers once each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from matrix.cases import Reference, collect, start
from matrix.harness import Zygote
from served.models import tiny_model


@pytest.fixture(scope="session")
def matrix_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="session")
def model(zygote: Zygote, matrix_folder: Path) -> Callable[[int], Path]:
    """Folder of the tiny model with so many experts."""

    @cache
    def get(num_experts: int) -> Path:
        return zygote.call(tiny_model, matrix_folder / f"tiny{num_experts}", num_experts)

    return get


@pytest.fixture(scope="session")
def reference(
    zygote: Zygote, model: Callable[[int], Path], matrix_folder: Path
) -> Callable[[int], Reference]:
    """What the colocated FP32 engine answers to every pattern; no AFD hook is in force in it."""

    @cache
    def get(num_experts: int) -> Reference:
        log = matrix_folder / f"colocated_{num_experts}.log"
        with start(zygote, model(num_experts), log, dtype="float32") as engine:
            return collect(engine)

    return get
