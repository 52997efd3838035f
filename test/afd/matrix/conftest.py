"""Fixtures: models and colocated answers once each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from matrix.cases import Reference, collect, start
from matrix.harness import Zygote
from matrix.jobs import Answer
from matrix.patterns import without_generation
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


@pytest.fixture(scope="session")
def bfloat16_scores(
    zygote: Zygote,
    model: Callable[[int], Path],
    reference: Callable[[int], Reference],
    matrix_folder: Path,
) -> list[Answer]:
    """How the colocated BF16 engine scores the FP32 engine's sequences."""
    log = matrix_folder / "colocated_bfloat16.log"
    with start(zygote, model(8), log, dtype="bfloat16") as engine:
        return without_generation(engine.run(reference(8).teacher))
