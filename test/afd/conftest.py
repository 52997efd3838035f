"""The pre-imported process, once per session, for all tests that start engines or servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matrix.harness import Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    running = Zygote(tmp_path_factory.mktemp("zygote"))
    yield running
    running.close()
