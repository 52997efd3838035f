"""The flags and epochs of a link as a small world in which every order of events can be tried.

Ranks run kernels one after the other, a kernel's blocks in any order and at the same time as every
other rank's. A block's writes, reads and credits are single events. A write may become visible at any
time before the credit that releases it, which is what trying every order amounts to.

Memory holds, instead of data, the epoch in which it was written. A reader that finds another epoch
than its own has read what was not there yet, or what was overwritten too early. The rows of an
attention rank lie elsewhere in every other epoch, as they do when batch sizes change: what one rank
writes in one epoch lies where another rank's rows were in the epoch before.

`share`, `reached` and the sum of all shares are those of the kernels. Flags count modulo a number so
small that they wrap around within a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

ATTN, FFN = 0, 1
DISPATCH, COMBINE, RECEIVE, SEND = range(4)
KERNELS = {ATTN: (DISPATCH, COMBINE), FFN: (RECEIVE, SEND)}


class Block(NamedTuple):
    """How far a block is: events of its kernel that have happened."""

    done: int


class Rank(NamedTuple):
    kernel: int  # counts both kernels of every epoch
    blocks: tuple[int, ...]


class State(NamedTuple):
    ranks: tuple[Rank, ...]  # attention, then FFN
    inbox: tuple[int, ...]  # [ffn][region][block]: epoch of the write, -1 before the first
    back: tuple[int, ...]  # [attn][ffn][block]
    arrivals: tuple[int, ...]  # [ffn][attn] flags
    returns: tuple[int, ...]  # [attn][ffn] flags


@dataclass(frozen=True, kw_only=True)
class World:
    """Sizes, and the rules, each of which a test may break.

    Attributes:
        credits: sum of the shares of all blocks.
        modulus: at which flags wrap around.
        waits: whether a kernel of a rank waits for its peers.
        expected_receive, expected_combine: flag that an epoch's kernel waits for.
        writes_first: a block's writes come before its credits.
    """

    attn_ranks: int
    ffn_ranks: int
    blocks: int
    epochs: int
    share: Callable[[int, int], int]
    credits: int
    modulus: int
    moving_rows: bool = True
    waits: Callable[[int, int], bool] = lambda kernel, rank: True
    expected_receive: Callable[[int], int] = lambda epoch: epoch + 1
    expected_combine: Callable[[int], int] = lambda epoch: epoch + 1
    writes_first: bool = True

    def start(self) -> State:
        ranks = (Rank(0, (0,) * self.blocks),) * (self.attn_ranks + self.ffn_ranks)
        pairs = self.attn_ranks * self.ffn_ranks
        return State(
            ranks,
            (-1,) * (pairs * self.blocks),
            (-1,) * (pairs * self.blocks),
            (0,) * pairs,
            (0,) * pairs,
        )

    def reached(self, seen: int, expected: int) -> bool:
        return (seen - expected) % self.modulus < self.modulus // 2

    def next_states(self, state: State) -> Iterator[State | str]:
        """States that one event leads to; a text instead where the event reads what it must not."""
        for number, rank in enumerate(state.ranks):
            epoch, step = divmod(rank.kernel, 2)
            if epoch == self.epochs:
                continue
            role, index = (
                (ATTN, number) if number < self.attn_ranks else (FFN, number - self.attn_ranks)
            )
            kernel = KERNELS[role][step]
            for block, done in enumerate(rank.blocks):
                if done == self._events(kernel):
                    continue
                after = self._event(state, kernel, index, epoch, block, done)
                if after is None:
                    continue
                if isinstance(after, str):
                    yield after
                    continue
                yield self._advance(after, number, block)

    def is_finished(self, state: State) -> bool:
        return all(rank.kernel == 2 * self.epochs for rank in state.ranks)

    def _peers(self, kernel: int) -> int:
        return self.ffn_ranks if kernel in KERNELS[ATTN] else self.attn_ranks

    def _events(self, kernel: int) -> int:
        peers = self._peers(kernel)
        return 2 * peers if kernel in (DISPATCH, SEND) else peers

    def _event(
        self, state: State, kernel: int, index: int, epoch: int, block: int, done: int
    ) -> State | str | None:
        """The state after it, None if it must wait."""
        peers = self._peers(kernel)
        peer = done % peers
        if kernel in (COMBINE, RECEIVE):
            if (
                done == 0
                and self.waits(kernel, index)
                and not self._arrived(state, kernel, index, epoch)
            ):
                return None
            return self._read(state, kernel, index, peer, epoch)
        is_write = (done < peers) == self.writes_first
        if is_write:
            return self._write(state, kernel, index, peer, epoch, block)
        return self._credit(state, kernel, index, peer, block)

    def _arrived(self, state: State, kernel: int, index: int, epoch: int) -> bool:
        peers = self._peers(kernel)
        if kernel == RECEIVE:
            flags = state.arrivals[index * peers : (index + 1) * peers]
            expected = self.expected_receive(epoch)
        else:
            flags = state.returns[index * peers : (index + 1) * peers]
            expected = self.expected_combine(epoch)
        return all(self.reached(flag, expected * self.credits % self.modulus) for flag in flags)

    def _region(self, attn_rank: int, epoch: int) -> int:
        if self.moving_rows and epoch % 2:
            return self.attn_ranks - 1 - attn_rank
        return attn_rank

    def _inbox(self, ffn_rank: int, attn_rank: int, epoch: int) -> int:
        return (ffn_rank * self.attn_ranks + self._region(attn_rank, epoch)) * self.blocks

    def _back(self, attn_rank: int, ffn_rank: int) -> int:
        return (attn_rank * self.ffn_ranks + ffn_rank) * self.blocks

    def _read(self, state: State, kernel: int, index: int, peer: int, epoch: int) -> State | str:
        """A block reads what all blocks of the peer wrote."""
        if kernel == RECEIVE:
            start, memory = self._inbox(index, peer, epoch), state.inbox
        else:
            start, memory = self._back(index, peer), state.back
        found = memory[start : start + self.blocks]
        if any(each != epoch for each in found):
            name = "receive" if kernel == RECEIVE else "combine"
            return f"{name} of epoch {epoch} on rank {index} read {found} of peer {peer}"
        return state

    def _write(
        self, state: State, kernel: int, index: int, peer: int, epoch: int, block: int
    ) -> State:
        if kernel == DISPATCH:
            place = self._inbox(peer, index, epoch) + block
            return state._replace(inbox=_with(state.inbox, place, epoch))
        place = self._back(peer, index) + block
        return state._replace(back=_with(state.back, place, epoch))

    def _credit(self, state: State, kernel: int, index: int, peer: int, block: int) -> State:
        share = self.share(block, self.blocks)
        if kernel == DISPATCH:
            place = peer * self.attn_ranks + index
            flag = (state.arrivals[place] + share) % self.modulus
            return state._replace(arrivals=_with(state.arrivals, place, flag))
        place = peer * self.ffn_ranks + index
        flag = (state.returns[place] + share) % self.modulus
        return state._replace(returns=_with(state.returns, place, flag))

    def _advance(self, state: State, number: int, block: int) -> State:
        """One more event of that block; the next kernel begins when all blocks are done."""
        rank = state.ranks[number]
        blocks = _with(rank.blocks, block, rank.blocks[block] + 1)
        role = ATTN if number < self.attn_ranks else FFN
        if all(done == self._events(KERNELS[role][rank.kernel % 2]) for done in blocks):
            after = Rank(rank.kernel + 1, (0,) * self.blocks)
        else:
            after = Rank(rank.kernel, blocks)
        return state._replace(ranks=_with(state.ranks, number, after))


def explore(world: World, most: int = 2_000_000) -> tuple[int, str | None]:
    """Number of states, and what went wrong in the first bad one.

    Raises:
        AssertionError: more than `most` states.
    """
    start = world.start()
    seen = {start}
    todo = [start]
    while todo:
        state = todo.pop()
        after = list(world.next_states(state))
        if not after and not world.is_finished(state):
            return len(seen), "every rank waits"
        for each in after:
            if isinstance(each, str):
                return len(seen), each
            if each not in seen:
                seen.add(each)
                todo.append(each)
        assert len(seen) <= most, f"more than {most} states"
    return len(seen), None


def _with(values: tuple, place: int, value: object) -> tuple:
    return (*values[:place], value, *values[place + 1 :])
