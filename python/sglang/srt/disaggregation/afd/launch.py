"""Starts the FFN ranks of this host and has both pools supervised.

Runs in the main process of a server, of an offline engine, of bench_one_batch, and of
`--afd-role ffn`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from sglang.srt.disaggregation.afd import envs, files, ports, sharing, shutdown
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.metrics import exporter
from sglang.srt.disaggregation.afd.status import routes
from sglang.srt.disaggregation.afd.supervisor import Supervisor

logger = logging.getLogger(__name__)

_START_METHOD: Literal["spawn", "fork"] = "spawn"
_EXIT_CODE_S = 5.0


_held: list[socket.socket] = []
_metrics_ports: dict[int, socket.socket] = {}


def start_ffn_ranks(server_args: Any, ranks: range) -> list[BaseProcess]:
    """Start one process per FFN rank of this host.

    GPU ids follow those of the attention ranks when both pools share the host.
    """
    from sglang.srt.disaggregation.afd.ffn import server

    check_gpus(server_args)
    context: Any = multiprocessing.get_context(_START_METHOD)
    first = server_args.afd_attn_ranks if server_args.afd_role == "all" else 0
    processes: list[BaseProcess] = []
    hold_metrics_ports(server_args, ranks)
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


def hold_metrics_ports(server_args: Any, ranks: range) -> None:
    """Hold the port of each of these FFN ranks until it listens. A second call does nothing.

    Raises:
        AFDConfigError: somebody has one of them.
    """
    first = server_args.afd_ffn_metrics_port
    for port in (first + rank for rank in ranks) if first else ():
        if port not in _metrics_ports:
            _metrics_ports[port] = ports.hold(server_args.host, port, exporter.FLAG)


def check_gpus(server_args: Any) -> None:
    """That this host has a GPU for each of its ranks, or that they share.

    Raises:
        AFDConfigError: it has fewer.
    """
    role = server_args.afd_role
    if server_args.device != "cuda" or role == "attn" or sharing.wanted():
        return
    ranks = len(local_ffn_ranks(server_args))
    flags = f"--afd-ffn-ranks {server_args.afd_ffn_ranks}"
    if role == "all":
        ranks += server_args.afd_attn_ranks
        flags = f"--afd-attn-ranks {server_args.afd_attn_ranks} and {flags}"
    first, step = server_args.base_gpu_id, server_args.gpu_id_step
    last, count = first + (ranks - 1) * step, torch.cuda.device_count()
    if last >= count:
        raise AFDConfigError(
            f"{flags} take GPUs {first} to {last} of this host, which has {count}; use fewer ranks, "
            f"or set {envs.SHARE_GPUS}=1 to try them on fewer GPUs"
        )


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


# --- hooks, see patches.py ---------------------------------------------------------------------


def launch_processes(
    orig: Any, cls: Any, server_args: Any, port_args: Any, run_scheduler_process_func: Any
) -> Any:
    """AROUND `Engine._launch_scheduler_processes`."""
    if not server_args.afd_enabled:
        return orig(cls, server_args, port_args, run_scheduler_process_func)
    supervisor = Supervisor(shutdown.end_everything, server_args.afd_peer_timeout)
    # Nobody broadcasts through it, and its shared memory would outlive the processes.
    envs.set_default(envs.MESSAGE_QUEUE_BROADCASTER, "0")
    files.sweep()
    folder = files.RunFolder()
    folder.adopt(port_args)
    shutdown.register(supervisor, folder)
    for name, value in (("afd_launcher_pid", os.getpid()), ("afd_run_folder", str(folder.path))):
        object.__setattr__(server_args, name, value)  # upstream froze it
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
        try:
            upstream_wait()
        except Exception as error:  # noqa: BLE001 - a rank died, and has said why in the log
            logger.error("AFD: %s", error)
            shutdown.end_everything("a rank ended while it was loading")
        supervisor.add_pids("attention process", result.all_child_pids)

    result.wait_for_ready = wait_for_ready
    result.all_child_pids.extend(process.pid for process in processes)
    return result, [*schedulers, *processes]


def launch_server(orig: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `http_server.launch_server`: `--afd-role ffn` has no API to serve.

    Upstream binds the API's port only when everything is loaded. Held from now on, it cannot go
    to one of the connections between the ranks, and a port in use is an error at once.
    """
    if not server_args.afd_enabled:
        return orig(server_args, *args, **kwargs)
    try:
        check_gpus(server_args)
        if server_args.afd_role != "attn":
            hold_metrics_ports(server_args, local_ffn_ranks(server_args))
        if server_args.afd_role == "ffn":
            sys.exit(run_ffn_pool(server_args))
        _held.append(ports.hold(server_args.host, server_args.port, "--port"))
    except AFDConfigError as error:
        sys.exit(f"sglang-afd: {error}")
    from sglang.srt.entrypoints import http_server

    routes.add_routes(http_server.app)
    return orig(server_args, *args, **kwargs)


def run_ffn_pool(server_args: Any) -> int:
    """Run this host's FFN ranks until they end; 0 only if all were told to stop."""
    processes = start_ffn_ranks(server_args, local_ffn_ranks(server_args))
    try:
        while running := [process for process in processes if process.exitcode is None]:
            ended = wait([process.sentinel for process in running])
            for process in (process for process in running if process.sentinel in ended):
                # The kernel closes the sentinel a moment before it tells the exit code.
                process.join(_EXIT_CODE_S)
                if process.exitcode:
                    logger.error("AFD: %s ended with exit code %s", process.name, process.exitcode)
                    return 1
        return 0
    finally:
        shutdown.kill_children()


def bench_one_batch(orig: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `one_batch.main`: FFN ranks for the length of the benchmark."""
    if not server_args.afd_enabled:
        return orig(server_args, *args, **kwargs)
    choose_address(server_args)
    supervisor = Supervisor(shutdown.end_everything, server_args.afd_peer_timeout)
    processes = start_ffn_ranks(server_args, local_ffn_ranks(server_args))
    for rank, process in enumerate(processes):
        supervisor.add(f"FFN rank {rank} (pid {process.pid})", process)
    supervisor.start()
    try:
        return orig(server_args, *args, **kwargs)
    finally:
        supervisor.expect_end()
        shutdown.kill_children()
