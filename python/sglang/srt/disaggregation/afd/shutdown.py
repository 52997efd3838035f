"""How a server ends: on SIGTERM after its requests, on a loss at once; never with one unanswered.

Runs in the main process. Upstream's own end kills the main process with SIGKILL, which drops
connections without a word and tells a service manager that the server crashed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from http import HTTPStatus
from types import FrameType
from typing import Any, NoReturn

import psutil

from sglang.srt.disaggregation.afd.files import RunFolder
from sglang.srt.disaggregation.afd.supervisor import Supervisor

logger = logging.getLogger(__name__)

# Peers log why they end before they do, and clients read their answers, before we kill and go.
_LAST_WORDS_S = 1.0
_POLL_S = 0.1
_STOP_S = 5.0

_supervisor: Supervisor | None = None
_folder: RunFolder | None = None
_manager: Any = None
_loop: asyncio.AbstractEventLoop | None = None
_ending = threading.Lock()


def register(supervisor: Supervisor, folder: RunFolder) -> None:
    """What has to be told about the end, and what has to be removed. Until upstream sets its own
    handler, SIGTERM ends everything: children that still import would outlive us."""
    global _supervisor, _folder
    _supervisor, _folder = supervisor, folder
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_early_sigterm)


def end_everything(reason: str) -> None:
    """Answer the open requests with `reason` and what the first rank to end said, kill all
    children, and exit with code 1."""
    if not _ending.acquire(blocking=False):
        time.sleep(_LAST_WORDS_S + 2 * _STOP_S)  # somebody else is at it, for the first reason
        return
    time.sleep(_LAST_WORDS_S / 2)
    text = f"AFD: {reason}; the server ends"
    if _folder is not None and (said := _folder.reason()):
        text += f". {said}"
    _answer(text)
    time.sleep(_LAST_WORDS_S / 2)
    logger.error("%s", text)
    _exit(1)


def kill_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue  # ended by itself in between, which is what we want
    psutil.wait_procs(children, timeout=_STOP_S)


def _exit(code: int) -> NoReturn:
    kill_children()
    if _folder is not None:
        _folder.remove()
    logging.shutdown()
    os._exit(code)


def _on_early_sigterm(signum: int, frame: FrameType | None) -> None:
    logger.error("AFD: SIGTERM before the server was ready; it ends")
    _exit(128 + signum)


def _answer(text: str) -> None:
    """Fail every open request with status 503 and `text`, from any thread."""
    if _loop is not None and not _loop.is_closed():
        _loop.call_soon_threadsafe(_answer_open_requests, text)


def _answer_open_requests(text: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    finish = {
        "type": "abort",
        "message": text,
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "err_type": "ServiceUnavailable",
    }
    for rid in list(_manager.rid_to_state):
        _manager._handle_abort_req(AbortReq(rid=rid, finished_reason=finish))


async def _end_gracefully(manager: Any) -> None:
    from sglang.srt.managers.io_struct import ShutdownReq
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    limit_s = manager.server_args.afd_drain_timeout
    logger.info("AFD: SIGTERM; %d open requests have %g s", len(manager.rid_to_state), limit_s)
    deadline = time.monotonic() + limit_s
    while manager.rid_to_state and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    if manager.rid_to_state:
        left = len(manager.rid_to_state)
        logger.warning("AFD: %d requests did not end within --afd-drain-timeout", left)
        _answer_open_requests("the server was shut down before this request had ended")
        await asyncio.sleep(_LAST_WORDS_S)
    manager._subprocess_watchdog and manager._subprocess_watchdog.stop()
    manager._dispatch_to_scheduler(ShutdownReq())
    deadline = time.monotonic() + _STOP_S
    while collect_scheduler_processes() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    _exit(0)


def _end_after_crash(manager: Any) -> None:
    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()
    if manager.server_args.crash_dump_folder:
        manager.dump_requests_before_crash()  # takes seconds, so only for those who asked
    end_everything("a process of the server failed; its log is above")


# --- hooks, see patches.py ---------------------------------------------------------------------


def before_engine_shutdown(engine: Any) -> None:
    """BEFORE `Engine.shutdown`."""
    if _supervisor is not None:
        _supervisor.expect_end()
    if _folder is not None:
        _folder.remove()


def before_sigterm(handler: Any, signum: Any = None, frame: Any = None) -> None:
    """BEFORE `SignalHandler.sigterm_handler`."""
    if _supervisor is not None:
        _supervisor.expect_end()


def sigquit(orig: Any, handler: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `SignalHandler.running_phase_sigquit_handler`: a child of ours failed."""
    if _supervisor is None:
        orig(handler, *args, **kwargs)
        return
    _supervisor.expect_end()
    # Not on this thread: it has to answer the open requests.
    threading.Thread(target=_end_after_crash, args=(handler.tokenizer_manager,)).start()


async def sigterm_watchdog(orig: Any, manager: Any) -> None:
    """AROUND `TokenizerManager.sigterm_watchdog`: upstream looks every 5 s, waits for requests
    without a limit, and ends with SIGKILL."""
    global _manager, _loop
    if _supervisor is None:
        await orig(manager)
        return
    _manager, _loop = manager, asyncio.get_running_loop()
    while not manager.gracefully_exit:
        await asyncio.sleep(_POLL_S)
    await _end_gracefully(manager)
