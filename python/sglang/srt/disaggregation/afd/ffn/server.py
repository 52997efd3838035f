"""Main function of an FFN process: load, join, serve, and end with a telling exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Any, NoReturn

import torch

from sglang.srt.disaggregation.afd import config as afd_config
from sglang.srt.disaggregation.afd import envs, facts, files, sharing, wire
from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.connector.base import LinkSpec
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.control import MemberControl
from sglang.srt.disaggregation.afd.errors import AFDError
from sglang.srt.disaggregation.afd.ffn import deep_gemm
from sglang.srt.disaggregation.afd.ffn.loop import FFNLoop
from sglang.srt.disaggregation.afd.ffn.model_runner import FFNModelRunner
from sglang.srt.disaggregation.afd.ffn.pace import Pace
from sglang.srt.disaggregation.afd.ffn.profiling import LoopTrace
from sglang.srt.disaggregation.afd.messages import Ready
from sglang.srt.disaggregation.afd.metrics.exporter import Exporter
from sglang.srt.disaggregation.afd.metrics.meter import FFNMeter, Link, device_name
from sglang.srt.disaggregation.afd.models import weights
from sglang.srt.disaggregation.afd.topology import Topology

logger = logging.getLogger(__name__)

EXIT_STOPPED, EXIT_FAILED = 0, 1


def main(server_args: Any, ffn_rank: int, gpu_id: int, launcher_pid: int) -> None:
    """Entry of the process; `server_args` are the launcher's, `gpu_id` counts on a CUDA device.

    Exits 0 when the attention side said stop, 1 on everything else.
    """
    import setproctitle

    from sglang.srt.runtime_context import publish
    from sglang.srt.utils import configure_logger, kill_itself_when_parent_died

    setproctitle.setproctitle(f"sglang::afd_ffn_{ffn_rank}")
    kill_itself_when_parent_died()
    if os.getppid() != launcher_pid:
        sys.exit(EXIT_FAILED)  # it died while this process was importing
    args = server_args.for_ffn_rank(ffn_rank)
    configure_logger(args, prefix=f" FFN{ffn_rank}")
    publish(args, role="scheduler")
    if args.device == "cpu":
        torch.set_num_threads(max(1, len(envs.usable_cores()) // args.afd_ffn_ranks))
    else:
        sharing.enter()
        gpu_id = sharing.device_of(gpu_id)
        torch.cuda.set_device(gpu_id)
    # Upstream sets it for attention ranks; what this rank counts is served by this rank.
    envs.drop(envs.PROMETHEUS_FOLDER)
    control: MemberControl | None = None
    exporter: Exporter | None = None
    try:
        if args.afd_ffn_metrics_port:
            exporter = Exporter(args.host, args.afd_ffn_metrics_port + ffn_rank)
        runner = FFNModelRunner(args, ffn_rank, gpu_id)
        settings = afd_config.build(args)
        control = MemberControl(
            address=settings.leader_addr,
            role="ffn",
            rank=ffn_rank,
            facts=facts.collect(
                settings,
                runner.shape,
                runner.model_config,
                args.afd_max_tokens_per_rank or 0,
                wire.fp8(args, settings.connector),
            ),
            load_timeout_s=settings.load_timeout_s,
            peer_timeout_s=settings.peer_timeout_s,
        )
        reason = _serve(args, settings, ffn_rank, runner, control, exporter)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the process ends; its text goes to the leader
        text = f"{type(error).__name__}: {error}"
        known = isinstance(error, AFDError)
        logger.error("FFN rank %d ends: %s", ffn_rank, text if known else traceback.format_exc())
        reason = f"FFN rank {ffn_rank} failed: {text}"
        files.leave_reason(server_args.afd_run_folder, reason, error)
        if control is not None:
            control.failed(text)
            control.close()
        _end(EXIT_FAILED)
    logger.info("FFN rank %d stops: %s", ffn_rank, reason)
    control.close()
    _end(EXIT_STOPPED)


def _end(code: int) -> NoReturn:
    """Leave at once: the interpreter's own way takes seconds, or for ever behind a kernel that
    waits for a lost peer."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(
    args: Any,
    settings: afd_config.AFDConfig,
    ffn_rank: int,
    runner: FFNModelRunner,
    control: MemberControl,
    exporter: Exporter | None,
) -> str:
    welcome = control.join()
    spec = LinkSpec(
        topology=_topology(settings, runner),
        hidden_size=runner.shape.hidden_size,
        topk=runner.shape.topk,
        dtype=runner.model_config.dtype,
        capacity=welcome.capacity,
        timeout_s=settings.peer_timeout_s,
        microbatches=settings.microbatches,
        fp8=wire.fp8(args, settings.connector),
    )
    layers = runner.load()
    if wire.expert_major(settings.connector, spec.fp8):
        deep_gemm.compile_ahead(layers, spec)
    report = weights.report()
    logger.info(
        "FFN rank %d: %d layers, %d experts each, %.1f MiB of parameters, %.1f MiB read",
        ffn_rank,
        runner.shape.moe_layers,
        len(_topology(settings, runner).expert_range(ffn_rank)),
        runner.parameter_bytes() / 2**20,
        report.bytes_read / 2**20,
    )
    control.ready(
        Ready(
            role="ffn",
            rank=ffn_rank,
            param_bytes=runner.parameter_bytes(),
            checkpoint_bytes=report.bytes_read,
            tensors_read=report.tensors_read,
            tensors_skipped=report.tensors_skipped,
            device=device_name(runner.device),
        )
    )
    rendezvous = Rendezvous(
        store_host=welcome.store_host,
        store_port=welcome.store_port,
        timeout_s=settings.load_timeout_s,
    )
    connector = registry.create_ffn(settings.connector, spec, ffn_rank, rendezvous)
    pace = Pace(f"ffn {ffn_rank}", runner.device, settings.peer_timeout_s)
    meter = None
    if exporter is not None:
        link = Link(
            rank=ffn_rank,
            spec=spec,
            moe_layers=len(layers),
            connector=settings.connector,
            device=runner.device,
            silences=control.silences,
        )
        meter = FFNMeter(link, lambda: control.counters[1])
        exporter.serve(lambda: _health(control, ffn_rank), meter.text)
    try:
        loop = FFNLoop(control, connector, layers, welcome.capacity, pace, runner.device, meter)
        control.set_on_trace(LoopTrace(loop, ffn_rank))
        return loop.run()
    finally:
        connector.close()


def _health(control: MemberControl, ffn_rank: int) -> tuple[str, bool, dict[str, Any]]:
    steps, rows = control.counters
    status = "ok" if control.is_healthy else "lost its leader"
    return (
        status,
        control.is_healthy,
        {"role": "ffn", "rank": ffn_rank, "steps": steps, "rows": rows},
    )


def _topology(settings: afd_config.AFDConfig, runner: FFNModelRunner) -> Topology:
    return Topology(settings.attn_ranks, settings.ffn_ranks, runner.shape.num_experts)
