"""A process that has imported everything a rank needs, and forks one child per engine or server.

Upstream spawns five to eight processes per engine and each imports for twenty seconds. Here all
of them are forked, so an engine starts in seconds; what the ranks execute is the same. Run by
`matrix.harness` as `python -m matrix.zygote SOCKET`.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NoReturn

from matrix import jobs

MODULES = (
    "sglang.benchmark.one_batch",
    "sglang.benchmark.serving",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.disaggregation.afd.attention.dispatcher",
    "sglang.srt.disaggregation.afd.attention.runtime",
    "sglang.srt.disaggregation.afd.connector.gloo",
    "sglang.srt.disaggregation.afd.ffn.server",
    "sglang.srt.disaggregation.afd.launch",
)


def main(address: str) -> None:
    """Import, then serve connections for ever; each one is the life of one child."""
    import torch

    torch.set_num_threads(1)  # a thread pool does not survive a fork
    for name in MODULES:
        importlib.import_module(name)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    load_plugins()
    _fork_everywhere()
    threads = [thread.name for thread in threading.enumerate()]
    assert len(threads) == 1, f"a fork would lose these threads: {threads}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with Listener(address, "AF_UNIX") as listener:
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                kill_itself_when_parent_died()
                connection.send(os.getpid())
                os._exit(_child(connection))
            connection.close()


def _fork_everywhere() -> None:
    from sglang.srt.disaggregation.afd import launch

    multiprocessing.set_start_method("fork", force=True)
    # The engine asks for "spawn" when it starts.
    multiprocessing.set_start_method = lambda *_args, **_kwargs: None
    launch._START_METHOD = "fork"


def _child(connection: Connection) -> int:
    """Do what the first message asks: call a function, or run an engine until told to stop."""
    try:
        first = connection.recv()
        if isinstance(first, jobs.Command):
            _run_command(first, connection)
        elif isinstance(first, jobs.EngineSpec):
            _run_engine(first, connection)
        else:
            function, arguments = first
            connection.send(function(*arguments))
        return 0
    except BaseException:  # noqa: BLE001 - the process ends; its text goes to the test
        connection.send(RuntimeError(traceback.format_exc()))
        return 1


def _run_command(command: jobs.Command, connection: Connection) -> None:
    """Send the pid of a child that runs the command, then its exit code."""
    pid = os.fork()
    if pid == 0:
        from sglang.srt.utils import kill_itself_when_parent_died

        kill_itself_when_parent_died()  # when the test's process ends, so does everything
        connection.close()
        multiprocessing.util._finalizer_registry.clear()  # the zygote's socket is not ours
        _write_to(command.log)
        _put_in(command.faults)
        os.chdir(command.folder)
        os.environ.update(command.env)
        tempfile.tempdir = None  # it may have been looked up before the fork
        _end_as_interpreter(_execute(command.argv))
    connection.send(pid)
    connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _execute(argv: tuple[str, ...]) -> int:
    """What `python ARGV...` would do; returns its exit code."""
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter: print it, exit with 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end_as_interpreter(code: int) -> NoReturn:
    """Wait for threads, run the exit functions and end, without unwinding into the zygote."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_to(log: Path) -> None:
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)


def _put_in(faults: tuple[str, ...]) -> None:
    if faults:
        module = importlib.import_module("matrix.faults")
        for name in faults:
            getattr(module, name)()


def _run_engine(spec: jobs.EngineSpec, connection: Connection) -> None:
    _write_to(spec.log)
    import sglang

    _put_in(spec.faults)
    engine = sglang.Engine(model_path=str(spec.model), skip_tokenizer_init=True, **spec.arguments)
    connection.send("ready")
    while True:
        message = connection.recv()
        if message == "stop":
            engine.shutdown()
            connection.send("stopped")
            return
        if message == "state":
            connection.send(engine.get_server_info()["internal_states"])
            continue
        connection.send(engine.loop.run_until_complete(_run_job(engine, message)))


async def _run_job(engine: Any, job: jobs.Job) -> list[jobs.Answer]:
    """Answers in the order of the requests; `finish` is "lost" for one that did not come in time,
    and an error's text for one that failed."""
    free = asyncio.Semaphore(job.concurrency)

    async def one(request: jobs.Request) -> jobs.Answer:
        await asyncio.sleep(request.delay_s)
        async with free:
            return await _ask(engine, request)

    tasks = [asyncio.ensure_future(one(request)) for request in job.requests]
    done, late = await asyncio.wait(tasks, timeout=job.timeout_s)
    for task in late:
        task.cancel()
    return [_result(task) if task in done else jobs.Answer() for task in tasks]


def _result(task: asyncio.Future[jobs.Answer]) -> jobs.Answer:
    error = task.exception()
    return task.result() if error is None else jobs.Answer(finish=repr(error))


async def _ask(engine: Any, request: jobs.Request) -> jobs.Answer:
    sampling = {"temperature": 0, "max_new_tokens": request.new_tokens, "ignore_eos": True}
    rid = os.urandom(8).hex()
    asked = await engine.async_generate(
        input_ids=list(request.ids),
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=0 if request.score else -1,
        top_logprobs_num=2,
        routed_dp_rank=None if request.rank is None else request.rank % engine.server_args.dp_size,
        rid=rid,
        stream=True,
    )
    last: dict[str, Any] = {}
    async for last in asked:
        seen = last["meta_info"].get("completion_tokens", 0)
        if request.abort_after is not None and seen >= request.abort_after:
            engine.tokenizer_manager.abort_request(rid)
    return _answer(last, request)


def _answer(last: dict[str, Any], request: jobs.Request) -> jobs.Answer:
    meta = last["meta_info"]
    new = meta.get("output_token_logprobs") or []
    prompt = (meta.get("input_token_logprobs") or [])[1:] if request.score else []
    tops = meta.get("output_top_logprobs") or []
    return jobs.Answer(
        ids=[entry[1] for entry in new],
        logprobs=[entry[0] for entry in (*prompt, *new)],
        gaps=[top[0][0] - top[1][0] for top in tops],
        cached_tokens=meta.get("cached_tokens", 0),
        finish=(meta.get("finish_reason") or {}).get("type", "none"),
    )


if __name__ == "__main__":
    main(sys.argv[1])
