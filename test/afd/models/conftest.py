"""Fixtures: the zygote of the families, and the colocated answers of each, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from models import harness
from models.families import Family


@pytest.fixture(scope="session")
def families_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session")
def family_zygote(families_folder: Path) -> Iterator[harness.FamilyZygote]:
    running = harness.FamilyZygote(families_folder)
    yield running
    running.close()


@pytest.fixture(scope="session")
def reference(
    family_zygote: harness.FamilyZygote, families_folder: Path
) -> Callable[[Family], harness.Reference]:
    """What the colocated engine answers; no AFD hook is in force in it."""

    @cache
    def get(name: str) -> harness.Reference:
        from models.families import by_name

        return harness.collect(family_zygote, by_name()[name], families_folder)

    return lambda family: get(family.name)
