"""Starts the FFN ranks of this host, watches both pools, and ends everything when one rank is lost.

Runs in the main process of a server, of an offline engine, of bench_one_batch, and of
`--afd-role ffn`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Literal

import psutil

from sglang.srt.disaggregation.afd import ports
from sglang.srt.disaggregation.afd.errors import AFDConfigError

logger = logging.getLogger(__name__)

# Peers log why they end before they do; their text should reach the log before we kill them.
_LAST_WORDS_S = 1.0
_POLL_S = 0.5
_STOP_S = 5.0
_START_METHOD: Literal["spawn", "fork"] = "spawn"


class Supervisor:
    """Watches processes from a daemon thread and calls `on_loss` once for the first that ends.

    `expect_end()` says that an end is wanted from now on.
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        self._on_loss = on_loss
        self._names: dict[int, str] = {}
        self._processes: list[BaseProcess] = []
        self._expected = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="afd-supervisor", daemon=True)

    def add(self, name: str, process: BaseProcess) -> None:
        assert process.pid is not None
        self._names[process.pid] = name
        self._processes.append(process)

    def add_pids(self, name: str, pids: list[int]) -> None:
        """Processes that are not our children, known by pid only."""
        for pid in pids:
            self._names.setdefault(pid, f"{name} {pid}")

    def start(self) -> None:
        self._thread.start()

    def expect_end(self) -> None:
        self._expected.set()

    def _watch(self) -> None:
        while not self._expected.is_set():
            wait([process.sentinel for process in self._processes], timeout=_POLL_S)
            lost = self._first_lost()
            if lost is not None and not self._expected.is_set():
                self._on_loss(lost)
                return

    def _first_lost(self) -> str | None:
        for process in self._processes:
            if process.exitcode is not None:
                return f"{self._names[process.pid or 0]} ended with exit code {process.exitcode}"
        ours = {process.pid for process in self._processes}
        for pid, name in list(self._names.items()):
            if pid not in ours and not _is_alive(pid):
                return f"{name} is gone"
        return None


_supervisor: Supervisor | None = None
_held: list[socket.socket] = []


def start_ffn_ranks(server_args: Any, ranks: range) -> list[BaseProcess]:
    """Start one process per FFN rank of this host.

    GPU ids follow those of the attention ranks when both pools share the host.
    """
    from sglang.srt.disaggregation.afd.ffn import server

    context: Any = multiprocessing.get_context(_START_METHOD)
    first = server_args.afd_attn_ranks if server_args.afd_role == "all" else 0
    processes: list[BaseProcess] = []
    for rank in ranks:
        gpu_id = server_args.base_gpu_id + (first + rank - ranks.start) * server_args.gpu_id_step
        process = context.Process(
            target=server.main,
            args=(server_args, rank, gpu_id, os.getpid()),
            name=f"afd_ffn_{rank}",
        )
        process.start()
        processes.append(process)
        logger.info("AFD FFN rank %d: pid %d", rank, process.pid)
    return processes


def local_ffn_ranks(server_args: Any) -> range:
    """FFN ranks of this host: all of them, or this node's share under `--nnodes`.

    Raises:
        AFDConfigError: the ranks do not split evenly over the nodes.
    """
    if server_args.afd_role != "ffn":
        return range(server_args.afd_ffn_ranks)
    nodes, node = server_args.afd_typed("nnodes"), server_args.afd_typed("node_rank")
    if server_args.afd_ffn_ranks % nodes:
        raise AFDConfigError(
            f"--afd-ffn-ranks {server_args.afd_ffn_ranks} do not split evenly over "
            f"--nnodes {nodes}; choose a multiple"
        )
    share = server_args.afd_ffn_ranks // nodes
    return range(node * share, (node + 1) * share)


def choose_address(server_args: Any) -> None:
    """Fill in --afd-bootstrap-addr for a server whose pools share this host.

    The port is held for the life of this process, until attention rank 0 listens on it.
    """
    if server_args.afd_bootstrap_addr is not None:
        return
    held = ports.hold("127.0.0.1", 0, "--afd-bootstrap-addr")
    _held.append(held)
    address = f"127.0.0.1:{held.getsockname()[1]}"
    server_args.override("afd launcher", afd_bootstrap_addr=address)


def end_everything(reason: str) -> None:
    """Kill all children and this process, with a non-zero exit code."""
    time.sleep(_LAST_WORDS_S)
    logger.error("AFD: %s; the server ends", reason)
    _kill_children()
    logging.shutdown()
    os._exit(1)


def _end_on_sigterm() -> None:
    """Until upstream's own handler is set: children that still import would outlive us."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_early_sigterm)


def _on_early_sigterm(signum: int, frame: FrameType | None) -> None:
    logger.error("AFD: SIGTERM before the server was ready; it ends")
    _kill_children()
    os._exit(128 + signum)


def _kill_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue  # ended by itself in between, which is what we want
    psutil.wait_procs(children, timeout=_STOP_S)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- hooks, see patches.py ---------------------------------------------------------------------


def launch_processes(
    orig: Any, cls: Any, server_args: Any, port_args: Any, run_scheduler_process_func: Any
) -> Any:
    """AROUND `Engine._launch_scheduler_processes`."""
    global _supervisor
    if not server_args.afd_enabled:
        return orig(cls, server_args, port_args, run_scheduler_process_func)
    supervisor = _supervisor = Supervisor(end_everything)
    _end_on_sigterm()
    processes: list[BaseProcess] = []
    if server_args.afd_role == "all":
        choose_address(server_args)
        processes = start_ffn_ranks(server_args, local_ffn_ranks(server_args))
        for rank, process in enumerate(processes):
            supervisor.add(f"FFN rank {rank} (pid {process.pid})", process)
        supervisor.start()
    result, schedulers = orig(cls, server_args, port_args, run_scheduler_process_func)
    for process in schedulers:
        supervisor.add(f"attention process {process.pid}", process)
    if server_args.afd_role != "all":
        supervisor.start()
    upstream_wait = result.wait_for_ready

    def wait_for_ready() -> None:
        upstream_wait()
        supervisor.add_pids("attention process", result.all_child_pids)

    result.wait_for_ready = wait_for_ready
    result.all_child_pids.extend(process.pid for process in processes)
    return result, [*schedulers, *processes]


def before_shutdown(engine: Any) -> None:
    """BEFORE `Engine.shutdown`."""
    if _supervisor is not None:
        _supervisor.expect_end()


def before_sigterm(handler: Any, signum: Any = None, frame: Any = None) -> None:
    """BEFORE `SignalHandler.sigterm_handler`."""
    if _supervisor is not None:
        _supervisor.expect_end()


def launch_server(orig: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `http_server.launch_server`: `--afd-role ffn` has no API to serve.

    Upstream binds the API's port only when everything is loaded. Held from now on, it cannot go
    to one of the connections between the ranks, and a port in use is an error at once.
    """
    if not server_args.afd_enabled:
        return orig(server_args, *args, **kwargs)
    if server_args.afd_role == "ffn":
        sys.exit(run_ffn_pool(server_args))
    _held.append(ports.hold(server_args.host, server_args.port, "--port"))
    return orig(server_args, *args, **kwargs)


def run_ffn_pool(server_args: Any) -> int:
    """Run this host's FFN ranks until they end; 0 only if all were told to stop."""
    processes = start_ffn_ranks(server_args, local_ffn_ranks(server_args))
    try:
        while any(process.exitcode is None for process in processes):
            wait([process.sentinel for process in processes if process.exitcode is None])
            failed = [process for process in processes if process.exitcode]
            if failed:
                logger.error("AFD: %s ended with exit code %s", failed[0].name, failed[0].exitcode)
                return 1
        return 0
    finally:
        _kill_children()


def bench_one_batch(orig: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `one_batch.main`: FFN ranks for the length of the benchmark."""
    if not server_args.afd_enabled:
        return orig(server_args, *args, **kwargs)
    choose_address(server_args)
    supervisor = Supervisor(end_everything)
    processes = start_ffn_ranks(server_args, local_ffn_ranks(server_args))
    for rank, process in enumerate(processes):
        supervisor.add(f"FFN rank {rank} (pid {process.pid})", process)
    supervisor.start()
    try:
        return orig(server_args, *args, **kwargs)
    finally:
        supervisor.expect_end()
        _kill_children()
