"""Traffic of a long run over HTTP, and what the server's processes weigh meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
from served.server import Server

CONCURRENCY = 64
ABORT_SHARE = 0.1
KNOWN = 24  # prompts that come again and again, and must be answered alike
SAMPLE_EVERY_S = 5.0
WARM_UP = 0.25  # of the requests, before memory counts: caches and pools fill
REQUEST_S = 120
_MIB = 2**20
_ABORTED_TOKENS = 300  # far more than it gets


@dataclass(frozen=True)
class Ask:
    """One request: what is sent, and when its client goes away."""

    ids: tuple[int, ...]
    new_tokens: int
    kind: str  # generate, stream, completion, chat
    known: int | None = None  # which of the known prompts
    abort: str = ""  # "", "disconnect" or "abort_request"


@dataclass
class Outcome:
    """Counted while it runs."""

    done: Counter[str] = field(default_factory=Counter)  # by kind, and "aborted"
    wrong: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)  # first answer of a known prompt
    changed: int = 0
    seconds: float = 0.0
    samples: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # requests, MiB

    @property
    def num_done(self) -> int:
        return sum(self.done.values())


def requests_of(count: int) -> list[Ask]:
    """Mostly short ones; one of twenty is a long prompt, which goes in rounds."""
    rng = random.Random(count)
    known = [tuple(rng.choices(range(97, 123), k=rng.randint(1, 40))) for _ in range(KNOWN)]
    asked = []
    for _ in range(count):
        kind = rng.choice(("generate", "stream", "stream", "completion", "chat"))
        length = rng.randint(100, 300) if rng.random() < 0.05 else rng.randint(1, 40)
        ids = tuple(rng.choices(range(97, 123), k=length))
        if rng.random() < ABORT_SHARE:
            abort = rng.choice(("disconnect", "abort_request"))
            asked.append(Ask(ids, _ABORTED_TOKENS, "stream", abort=abort))
        elif rng.random() < 0.1:
            index = rng.randrange(KNOWN)
            asked.append(Ask(known[index], 8, "generate", known=index))
        else:
            asked.append(Ask(ids, rng.randint(1, 8), kind))
    return asked


def run(server: Server, asked: list[Ask]) -> Outcome:
    return asyncio.run(_run(server, asked))


async def _run(server: Server, asked: list[Ask]) -> Outcome:
    outcome = Outcome()
    began = time.monotonic()
    weigh = scale(server)
    queue = iter(asked)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:

        async def work() -> None:
            for ask in queue:
                try:
                    await _ask(session, ask, outcome)
                except (aiohttp.ClientError, TimeoutError, AssertionError, KeyError) as error:
                    outcome.wrong.append(f"{ask.kind} {ask.abort}: {error!r}"[:300])

        async def watch() -> None:
            while True:
                outcome.samples.append((outcome.num_done, weigh()))
                await asyncio.sleep(SAMPLE_EVERY_S)

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        watching.cancel()
    outcome.samples.append((outcome.num_done, weigh()))
    outcome.seconds = time.monotonic() - began
    return outcome


async def _ask(session: aiohttp.ClientSession, ask: Ask, outcome: Outcome) -> None:
    if ask.kind in ("completion", "chat"):
        text = bytes(ask.ids).decode()
        body: dict[str, Any] = {"model": "x", "max_tokens": ask.new_tokens, "ignore_eos": True}
        if ask.kind == "completion":
            path, body["prompt"] = "/v1/completions", text
        else:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
        async with session.post(path, json={**body, "temperature": 0}) as answer:
            assert answer.status == 200, await answer.text()
            got = await answer.json()
        assert got["usage"]["completion_tokens"] == ask.new_tokens, got["usage"]
        assert got["choices"][0]["finish_reason"] == "length", got
        outcome.done[ask.kind] += 1
        return
    rid = f"{random.getrandbits(64):x}"
    sampling = {"temperature": 0, "max_new_tokens": ask.new_tokens, "ignore_eos": True}
    body = {"input_ids": list(ask.ids), "sampling_params": sampling, "rid": rid}
    streams = ask.kind == "stream"
    async with session.post("/generate", json={**body, "stream": streams}) as answer:
        assert answer.status == 200, await answer.text()
        if not streams:
            got = await answer.json()
        else:
            got = await _read(session, answer, ask, rid)
    if ask.abort:
        outcome.done["aborted"] += 1
        return
    meta = got["meta_info"]
    assert meta["finish_reason"]["type"] == "length", meta
    assert meta["completion_tokens"] == ask.new_tokens, meta
    outcome.done[ask.kind] += 1
    if ask.known is not None:
        outcome.changed += outcome.texts.setdefault(ask.known, got["text"]) != got["text"]


async def _read(
    session: aiohttp.ClientSession, answer: aiohttp.ClientResponse, ask: Ask, rid: str
) -> dict[str, Any]:
    """The last event of a stream, or the first after which its client wants no more."""
    last: dict[str, Any] = {}
    async for line in answer.content:
        if not line.startswith(b"data: ") or b"[DONE]" in line:
            continue
        last = json.loads(line.removeprefix(b"data: "))
        if ask.abort == "disconnect":
            answer.close()
            return last
        if ask.abort == "abort_request" and not last["meta_info"]["finish_reason"]:
            async with session.post("/abort_request", json={"rid": rid}) as done:
                assert done.status == 200
    assert last, "an empty stream"
    return last


def scale(server: Server) -> Callable[[], dict[str, float]]:
    """Resident MiB of every process, by what it is called and its place among its likes."""
    processes = [psutil.Process(server.process.pid), *server.descendants()]
    names: list[str] = []
    for process in processes:
        words = " ".join(process.cmdline())
        title = "resource_tracker" if "resource_tracker" in words else words.split()[0]
        name = title.removeprefix("sglang::") if title.startswith("sglang::") else title
        names.append("launcher" if process.pid == server.process.pid else name)

    def weigh() -> dict[str, float]:
        pairs = zip(names, processes, strict=True)
        return {name: process.memory_info().rss / _MIB for name, process in pairs}

    assert len(set(names)) == len(names), names
    return weigh


def slopes(outcome: Outcome, count: int) -> dict[str, dict[str, float]]:
    """By process: MiB at the start, after the warm-up and at the end, and the slope after the
    warm-up in MiB per 1000 requests."""
    late = [(done, mib) for done, mib in outcome.samples if done >= WARM_UP * count]
    found = {}
    for name, first in outcome.samples[0][1].items():
        xs, ys = [done / 1000 for done, _ in late], [mib[name] for _, mib in late]
        slope = statistics.linear_regression(xs, ys).slope if len(set(xs)) > 1 else 0.0
        found[name] = {
            "mib_at_start": round(first, 1),
            "mib_after_warm_up": round(ys[0], 1),
            "mib_at_end": round(ys[-1], 1),
            "mib_per_1000_requests": round(slope, 3),
        }
    return found
