"""One microbatch or two: measured for each batch size while it is served, and then kept.

What two microbatches win depends on the context, on the batch and on both GPUs, so nothing but the
traffic itself can say. A batch size alternates between its two graphs for some replays, which are
timed on the device, and then keeps the faster one until it is asked again.

Every attention rank replays the same graphs in the same order, so all of them count alike. Rank 0
measures; the others take its word at the same replay.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

WIDTHS = (2, 1)  # in the order in which they are tried
BLOCK = 12  # replays with the same graph
SKIP = 4  # of a block, since the step before ran the other graph
BLOCKS = 4
MEASURED = BLOCK * BLOCKS
DELAY = 6  # replays until the result is taken, so that nobody waits for the last ones
AGAIN = 4000  # replays until it is measured again: contexts grow


class Timer(Protocol):
    """A pair of events around one replay."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def milliseconds(self) -> float:
        """Waits for the replay to finish."""


class Board(Protocol):
    """Where rank 0 leaves its word for the others."""

    def write(self, key: str, value: str) -> None: ...

    def read(self, key: str) -> str:
        """Waits until it is there, at most the peer timeout."""


class Result(NamedTuple):
    """What a batch size keeps, and the median of its replays by number of microbatches, ms."""

    microbatches: int
    ms: dict[int, float]


class _Size:
    """One batch size: replays since its measurement began, and what that has shown so far."""

    def __init__(self) -> None:
        self.replay = 0
        self.round = 0
        self.kept = WIDTHS[0]
        self.timers: dict[int, list[Timer]] = {width: [] for width in WIDTHS}


class Choice:
    """Args:
    measures: whether this is attention rank 0.
    """

    def __init__(self, measures: bool, new_timer: Callable[[], Timer], board: Board) -> None:
        self._measures = measures
        self._new_timer = new_timer
        self._board = board
        self._sizes: dict[int, _Size] = {}
        self.results: dict[int, Result] = {}  # by batch size, on rank 0

    @contextmanager
    def replay(self, batch: int) -> Iterator[int]:
        """Around one replay of the graphs of `batch` tokens: the number of microbatches to use."""
        size = self._sizes.setdefault(batch, _Size())
        number = size.replay
        size.replay += 1
        if number < MEASURED:
            width = WIDTHS[number // BLOCK % len(WIDTHS)]
            timer = None
            if self._measures and number % BLOCK >= SKIP:
                timer = self._new_timer()
                timer.start()
            yield width
            if timer is not None:
                timer.stop()
                size.timers[width].append(timer)
            return
        if number == MEASURED + DELAY:
            self._decide(batch, size)
        yield size.kept
        if number == AGAIN:
            size.replay = 0

    def _decide(self, batch: int, size: _Size) -> None:
        key = f"microbatches/{batch}/{size.round}"
        size.round += 1
        if not self._measures:
            size.kept = int(self._board.read(key))
            return
        ms = {
            width: statistics.median(timer.milliseconds() for timer in timers)
            for width, timers in size.timers.items()
        }
        size.timers = {width: [] for width in WIDTHS}
        size.kept = min(WIDTHS, key=lambda width: ms[width])
        self._board.write(key, str(size.kept))
        self.results[batch] = Result(size.kept, ms)
        logger.info(
            "AFD batch size %d runs with %d microbatch(es): %s",
            batch,
            size.kept,
            ", ".join(f"{ms[width]:.3f} ms with {width}" for width in sorted(ms)),
        )


class DeviceTimer:
    """Of the current CUDA stream."""

    def __init__(self) -> None:
        import torch

        self._events: Any = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._events[0].record()

    def stop(self) -> None:
        self._events[1].record()

    def milliseconds(self) -> float:
        start, stop = self._events
        stop.synchronize()
        return float(start.elapsed_time(stop))


class StoreBoard:
    """The store of attention rank 0, joined when somebody has something to say.

    Args:
        join: connects to it.
    """

    def __init__(self, join: Callable[[], Any]) -> None:
        self._join = join
        self._store: Any = None

    def write(self, key: str, value: str) -> None:
        self._joined().set(key, value)

    def read(self, key: str) -> str:
        return bytes(self._joined().get(key)).decode()

    def _joined(self) -> Any:
        if self._store is None:
            self._store = self._join()
        return self._store
