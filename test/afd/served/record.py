"""What one server answered: collected in one session, asserted by many tests."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import openai
from matrix.harness import Process, Zygote
from matrix.jobs import Command
from served.server import Server

NUM_PROMPTS = 50
MAX_TOKENS = 16
BENCH_TIMEOUT_S = 200
_WORDS = (
    "def return import class self for in if not None True open read write list dict path "
    "file name value the a is of and to with error type object string number key item"
).split()


def prompts() -> list[str]:
    """Seeded prompts from one word to far beyond the capacity that the tests set."""
    rng = random.Random(0)
    lengths = [1, 2, 3, 60] + [rng.randint(1, 30) for _ in range(NUM_PROMPTS - 4)]
    return [" ".join(rng.choices(_WORDS, k=length)) for length in lengths]


@dataclass
class Record:
    """Answers in the order of the prompts."""

    completions: list[str] = field(default_factory=list)
    streamed: list[str] = field(default_factory=list)
    chats: list[str] = field(default_factory=list)
    streamed_chats: list[str] = field(default_factory=list)
    info: list[dict] = field(default_factory=list)
    model_ids: list[str] = field(default_factory=list)
    bench_serving: str = ""
    exit_code: int | None = None


def bench_serving(server: Server, zygote: Zygote) -> str:
    """What upstream's load generator prints about 8 requests, with its exit code in front."""
    log = server.log.with_suffix(".bench_serving")
    argv = ("-m", "sglang.bench_serving", "--backend", "sglang")
    argv += ("--host", "127.0.0.1", "--port", str(server.port), "--dataset-name", "random-ids")
    argv += ("--num-prompts", "8", "--random-input-len", "32", "--random-output-len", "8")
    # It writes a results file where it runs.
    process = Process(zygote, Command(argv, log, server.log.parent))
    code = process.wait(BENCH_TIMEOUT_S)
    return f"exit code {code}\n{log.read_text()}"


def collect(server: Server) -> Record:
    """Ask everything, greedily, with up to 8 requests in flight."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
    record = Record(model_ids=[model.id for model in client.models.list().data])
    model = record.model_ids[0]
    asked = prompts()

    def complete(prompt: str) -> str:
        answer = client.completions.create(
            model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0
        )
        return answer.choices[0].text

    def stream(prompt: str) -> str:
        chunks = client.completions.create(
            model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    def chat(prompt: str) -> str:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            temperature=0,
        )
        return answer.choices[0].message.content or ""

    def stream_chat(prompt: str) -> str:
        chunks = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    with ThreadPoolExecutor(8) as pool:
        record.completions = list(pool.map(complete, asked))
        record.streamed = list(pool.map(stream, asked[:10]))
        record.chats = list(pool.map(chat, asked[:10]))
        record.streamed_chats = list(pool.map(stream_chat, asked[:10]))
    record.info = server.info() if "--disaggregation-mode" in server.flags else []
    return record
