"""The demo: serves a small model with attention and FFN ranks on this machine and talks to it.

Trains the model first if there is none, starts the server, streams a chat and a completion with
the `openai` client, prints what each rank did, stops everything and checks that nothing is left.

    python examples/demo.py                        # exit code 0: every rank did its work
    python examples/demo.py --serve --port 30000   # leave the server running until Ctrl-C
    python examples/demo.py -- --log-level debug   # what follows `--` goes to the server
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
import openai

HERE = Path(__file__).resolve().parent
DEFAULT_MODEL = HERE / ".cache" / "demo-model"
MODEL_NAME = "demo"
IGNORE_EOS: dict[str, object] = {"ignore_eos": True}  # a small model may end at once
CHAT_PROMPT = "Explain os.path.join"
COMPLETION_PROMPT = 'class Queue:\n    """'

PROGRESS_S = 5.0  # between two lines while the server starts
REQUEST_S = 120.0  # longest wait for the next piece of a reply
SETTLE_S = 20.0  # longest wait for the last counters of the FFN ranks
HEARTBEAT_S = 2.5  # FFN counters arrive by heartbeat and may be this late
STOP_S = 30.0  # longest wait for the server to end by itself after SIGTERM
KILL_S = 10.0  # and for the kernel to remove what was killed


class DemoError(RuntimeError):
    """The demo cannot go on. The message says what to do."""


class Process(NamedTuple):
    """One line of /proc/PID/stat; `start` tells a reused process id apart."""

    pid: int
    parent: int
    session: int
    start: int


class RankRow(NamedTuple):
    """What one rank reports about itself. Sizes in bytes."""

    name: str
    param_bytes: int
    checkpoint_bytes: int
    tokens: int
    moe_layers: int


@dataclass(frozen=True)
class Server:
    """A running server and where its log goes."""

    process: subprocess.Popen[bytes]
    base_url: str
    log_path: Path


# ------------------------------------------------------------------------------- processes


def live_processes() -> list[Process]:
    """All processes of this machine that have not ended (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is hidden from us and so not ours
        fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces
        if fields[0] not in "ZX":
            found.append(Process(int(entry.name), int(fields[1]), int(fields[3]), int(fields[19])))
    return found


def family_of(pid: int) -> set[Process]:
    """`pid`, its descendants, and all of the session that it leads."""
    processes = live_processes()
    family = {p for p in processes if p.pid == pid or p.session == pid}
    while True:
        pids = {p.pid for p in family}
        children = {p for p in processes if p.parent in pids} - family
        if not children:
            return family
        family |= children


def still_alive(family: set[Process]) -> set[Process]:
    known = {(p.pid, p.start) for p in family}
    return {p for p in live_processes() if (p.pid, p.start) in known}


def stop(server: Server) -> list[int]:
    """SIGTERM, a bounded wait, then SIGKILL. Returns the process ids that survived even that."""
    pid = server.process.pid
    family = family_of(pid)
    if server.process.poll() is None:
        server.process.terminate()
        try:
            server.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            print(f"The server did not end within {STOP_S:.0f} s of SIGTERM: killing it.")
    outlived = still_alive(family | family_of(pid))
    if outlived:
        print(f"{len(outlived)} processes outlived the server: killing them.", flush=True)
    deadline = time.monotonic() + KILL_S
    while True:
        family |= family_of(pid)
        server.process.poll()  # reaps it
        left = still_alive(family)
        if not left or time.monotonic() > deadline:
            return sorted(p.pid for p in left)
        for process in left:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended between the look and the kill
        time.sleep(0.2)


# ---------------------------------------------------------------------------------- server


def ensure_model(model: Path) -> None:
    """Train the default model if it is missing; any other must exist.

    Raises:
        DemoError
    """
    if model != DEFAULT_MODEL and (model / "config.json").is_file():
        return
    script = HERE / "train_demo_model.py"
    if subprocess.run([sys.executable, str(script), "--out", str(model)], check=False).returncode:
        raise DemoError(f"training failed, see above; {script} alone repeats it")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(args: argparse.Namespace, port: int) -> list[str]:
    if args.server_command:
        command = shlex.split(args.server_command)
    else:
        command = [sys.executable, "-m", "sglang.launch_server"]
    options = {
        "--model-path": args.model,
        "--served-model-name": MODEL_NAME,
        "--disaggregation-mode": "afd",
        "--afd-attn-ranks": args.attn_ranks,
        "--afd-ffn-ranks": args.ffn_ranks,
        "--device": "cpu",
        "--dtype": "float32",  # bfloat16 is slow on most CPUs
        "--max-total-tokens": 20000,
        "--host": "127.0.0.1",
        "--port": port,
    }
    for name, value in options.items():
        command += [name, str(value)]
    return command + args.server_args


def log_tail(path: Path, lines: int = 40) -> str:
    with path.open(encoding="utf-8", errors="replace") as log:
        return "".join(deque(log, lines))


def last_log_line(path: Path) -> str:
    """The newest line that says something, shortened to fit a terminal."""
    for line in reversed(log_tail(path).splitlines()):
        if line.strip() and "Warning" not in line and "warn(" not in line:
            return line.strip()[:100]
    return "(no output yet)"


@contextmanager
def running_server(args: argparse.Namespace) -> Iterator[Server]:
    """Start the server, yield it once it answers, and stop it whatever happens.

    Raises:
        DemoError: it ended or did not answer in time, or processes are left after the stop.
    """
    port = args.port or free_port()
    command = server_command(args, port)
    log_path = args.log
    log_path.parent.mkdir(parents=True, exist_ok=True)
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"]))
    env = os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": no_proxy, "no_proxy": no_proxy}
    print(f"$ {shlex.join(command)}\n  log: {log_path}", flush=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    server = Server(process, f"http://127.0.0.1:{port}", log_path)
    try:
        wait_until_healthy(server, args.start_timeout)
        yield server
    finally:
        # A second Ctrl-C would leave processes behind; the stop is bounded anyway.
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        left = stop(server)
        if left:
            raise DemoError(f"processes {left} are still running: end them with kill -9")
    print("Stopped: no process is left.")


def wait_until_healthy(server: Server, timeout_s: float) -> None:
    """Poll /health, with a line of progress every few seconds."""
    start = time.monotonic()
    next_line = start + PROGRESS_S
    with httpx.Client(trust_env=False, timeout=5) as client:
        while True:
            elapsed = time.monotonic() - start
            code = server.process.poll()
            if code is not None:
                reason = f"the server ended with code {code}"
            elif elapsed > timeout_s:
                reason = f"no answer within {timeout_s:.0f} s (--start-timeout raises it)"
            else:
                try:
                    if client.get(f"{server.base_url}/health").status_code == 200:
                        print(f"Ready after {elapsed:.0f} s.", flush=True)
                        return
                except httpx.TransportError:
                    state = "not listening yet"
                else:
                    state = "listening, not ready yet"
                if time.monotonic() >= next_line:
                    next_line += PROGRESS_S
                    line = last_log_line(server.log_path)
                    print(f"  {elapsed:4.0f} s, {state}: {line}", flush=True)
                time.sleep(0.5)
                continue
            print(f"--- end of {server.log_path}\n{log_tail(server.log_path)}---")
            raise DemoError(f"{reason}; the log above says why")


# ---------------------------------------------------------------------------------- client


def stream_to_terminal(title: str, pieces: Iterator[tuple[str, int | None]]) -> None:
    """Print text as it arrives, then tokens/s. Pieces are (text, tokens of the reply if known).

    Raises:
        DemoError: no text came.
    """
    print(f"\n=== {title}", flush=True)
    start = time.monotonic()
    first = 0.0
    text, tokens = "", 0
    for piece, total in pieces:
        tokens = total or tokens
        if piece and not text:
            first = time.monotonic() - start
        text += piece
        print(piece, end="", flush=True)
    seconds = time.monotonic() - start
    if not text.strip():
        raise DemoError("the server sent no text")
    print(
        f"\n--- {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s, "
        f"first after {first:.2f} s"
    )


def chat_pieces(client: openai.OpenAI, prompt: str) -> Iterator[tuple[str, int | None]]:
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=96,
        temperature=0.7,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        yield text, chunk.usage.completion_tokens if chunk.usage else None


def completion_pieces(client: openai.OpenAI, prompt: str) -> Iterator[tuple[str, int | None]]:
    stream = client.completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=96,
        temperature=0.7,
        extra_body=IGNORE_EOS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        text = chunk.choices[0].text if chunk.choices else ""
        yield text, chunk.usage.completion_tokens if chunk.usage else None


def run_batch(client: openai.OpenAI, size: int) -> None:
    """Several completions at once, so that every attention rank has requests of its own."""

    def one(index: int) -> int:
        reply = client.completions.create(
            model=MODEL_NAME, prompt=f"def step_{index}(", max_tokens=24, extra_body=IGNORE_EOS
        )
        return reply.usage.completion_tokens if reply.usage else 0

    start = time.monotonic()
    with ThreadPoolExecutor(size) as pool:
        tokens = sum(pool.map(one, range(size)))
    seconds = time.monotonic() - start
    print(f"\n=== {size} completions at once: {tokens / seconds:.1f} tokens/s in all")


# ---------------------------------------------------------------------------------- report


def rank_rows(server_info: dict[str, Any]) -> list[RankRow]:
    """One row per attention rank, then one per FFN rank, from the answer of /server_info.

    Raises:
        DemoError: the server reports nothing about AFD.
    """
    states = [state["afd"] for state in server_info["internal_states"] if "afd" in state]
    if not states:
        raise DemoError(
            "/server_info holds no AFD state: is sglang-afd installed in this environment?"
        )
    return [
        RankRow(
            name=f"{rank['role']} {rank['rank']}",
            param_bytes=rank["param_bytes"],
            checkpoint_bytes=rank["checkpoint_bytes"],
            tokens=rank["tokens"],
            moe_layers=rank["moe_layers"],
        )
        for rank in states + [ffn for state in states for ffn in state.get("ffn", [])]
    ]


def settled_rows(base_url: str, num_ranks: int) -> list[RankRow]:
    """Read /server_info until the counters stand still and no rank is at zero, or time is up."""
    deadline = time.monotonic() + SETTLE_S
    previous: list[RankRow] = []
    with httpx.Client(trust_env=False, timeout=10) as client:
        while True:
            rows = rank_rows(client.get(f"{base_url}/server_info").raise_for_status().json())
            complete = len(rows) == num_ranks and all(row.tokens > 0 for row in rows)
            if (complete and rows == previous) or time.monotonic() > deadline:
                return rows
            previous = rows
            time.sleep(HEARTBEAT_S)


def print_table(rows: list[RankRow]) -> None:
    print("\nrank      parameters   read from disk     tokens   MoE layers")
    for row in rows:
        print(
            f"{row.name:<8}{row.param_bytes / 2**20:>9.2f} MiB"
            f"{row.checkpoint_bytes / 2**20:>13.2f} MiB{row.tokens:>11}{row.moe_layers:>13}"
        )
    print(flush=True)


def check_ranks(rows: list[RankRow], attn_ranks: int, ffn_ranks: int) -> None:
    """Raises DemoError unless every expected rank is there and processed tokens."""
    wanted = [f"attn {i}" for i in range(attn_ranks)] + [f"ffn {j}" for j in range(ffn_ranks)]
    tokens = {row.name: row.tokens for row in rows}
    idle = [name for name in wanted if tokens.get(name, 0) <= 0]
    if idle:
        raise DemoError(f"no tokens reached: {', '.join(idle)}; the server's log may say why")


# ------------------------------------------------------------------------------------ main


def talk(server: Server, args: argparse.Namespace) -> None:
    with openai.OpenAI(
        base_url=f"{server.base_url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.Client(trust_env=False, timeout=REQUEST_S),
    ) as client:
        # The client imports these on first use, which must not count as waiting for the server.
        for resource in (client.chat.completions, client.completions):
            assert resource
        stream_to_terminal(f"chat: {CHAT_PROMPT}", chat_pieces(client, CHAT_PROMPT))
        stream_to_terminal(
            f"completion: {COMPLETION_PROMPT}",
            completion_pieces(client, COMPLETION_PROMPT),
        )
        run_batch(client, 2 * args.attn_ranks)
    rows = settled_rows(server.base_url, args.attn_ranks + args.ffn_ranks)
    print_table(rows)
    check_ranks(rows, args.attn_ranks, args.ffn_ranks)


def serve(server: Server) -> None:
    """Wait until Ctrl-C, or until the server ends by itself."""
    body = (
        f'{{"model": "{MODEL_NAME}", "max_tokens": 64, "temperature": 0.7, '
        f'"messages": [{{"role": "user", "content": "{CHAT_PROMPT}"}}]}}'
    )
    print(
        f"\nOpenAI base URL: {server.base_url}/v1\nTry:\n"
        f"  curl {server.base_url}/v1/chat/completions \\\n"
        f"    -H 'Content-Type: application/json' \\\n    -d '{body}'\n"
        f"  curl {server.base_url}/server_info\nCtrl-C stops it.",
        flush=True,
    )
    code = server.process.wait()
    print(log_tail(server.log_path))
    raise DemoError(f"the server ended by itself with code {code}; its log is above")


def parse_args(argv: list[str]) -> argparse.Namespace:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, metavar="DIR")
    parser.add_argument("--attn-ranks", type=int, default=2, metavar="M")
    parser.add_argument("--ffn-ranks", type=int, default=1, metavar="N")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one (default)")
    parser.add_argument("--serve", action="store_true", help="leave it running until Ctrl-C")
    parser.add_argument("--start-timeout", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--log", type=Path, default=HERE / ".cache" / "server.log")
    parser.add_argument("--server-command", help=argparse.SUPPRESS)  # for tests of this script
    args = parser.parse_args(argv[:split])
    args.model = args.model.resolve()
    args.server_args = argv[split + 1 :]
    return args


def on_signal(signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signum)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    # A closed terminal or a `kill` must stop the server too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGHUP, on_signal)
    try:
        ensure_model(args.model)
        with running_server(args) as server:
            if args.serve:
                serve(server)
            talk(server, args)
    except KeyboardInterrupt:
        print("\nInterrupted; the server is stopped.")
        return 0 if args.serve else 130
    except (DemoError, openai.OpenAIError, httpx.HTTPError) as error:
        print(f"\nThe demo failed: {error}\nServer log: {args.log}", file=sys.stderr)
        return 1
    print("The demo passed: text came, and every attention and FFN rank processed tokens.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
