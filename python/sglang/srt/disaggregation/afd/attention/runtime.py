"""What an attention rank keeps for its lifetime: layers, control channel, connector, counters.

One per process. It comes into being with the model, joins the control channel before weights are
read, and the data plane after.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.disaggregation.afd import config as afd_config
from sglang.srt.disaggregation.afd import envs, facts, files, sharing, wire
from sglang.srt.disaggregation.afd.attention.choice import Choice, DeviceTimer, StoreBoard
from sglang.srt.disaggregation.afd.attention.watch import StepWatch
from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.connector.base import AttnConnector, LinkSpec, TellsFailure
from sglang.srt.disaggregation.afd.connector.rendezvous import Rendezvous
from sglang.srt.disaggregation.afd.connector.store import host_store, join_store
from sglang.srt.disaggregation.afd.control import LeaderControl, MemberControl
from sglang.srt.disaggregation.afd.errors import AFDError
from sglang.srt.disaggregation.afd.messages import Mode, Ready, StepPlan, Trace
from sglang.srt.disaggregation.afd.metrics.meter import AttnMeter, Link, device_name
from sglang.srt.disaggregation.afd.metrics.timed import TimedAttn
from sglang.srt.disaggregation.afd.models import weights
from sglang.srt.disaggregation.afd.plan import make_plan
from sglang.srt.disaggregation.afd.supervisor import watch_launcher
from sglang.srt.disaggregation.afd.topology import Topology
from sglang.srt.disaggregation.afd.trace.spans import SpanLog

if TYPE_CHECKING:
    from sglang.srt.disaggregation.afd.attention.dispatcher import RemoteDispatcher

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0

_runtime: AttentionRuntime | None = None


class AttentionRuntime:
    """State of one attention rank.

    Attributes:
        plan: of the step that runs now; dispatchers read step id and rounds from it.
        connector: the data plane, once `join_data_plane` ran.
        choice: between the graphs of a batch size, if both kinds are captured.
        spec: shapes and sizes of the link, once `join_control_plane` ran.
        capacity: tokens per dispatch.
    """

    plan: StepPlan
    connector: AttnConnector
    spec: LinkSpec

    def __init__(self, server_args: Any, model_config: Any, attn_rank: int) -> None:
        sharing.enter()
        self.settings = afd_config.build(server_args)
        self.capacity = self.settings.capacity
        self.attn_rank = attn_rank
        self.steps = 0
        self.device = torch.device(server_args.device)
        # Counted on the device, because a graph replays the counting without the host.
        self._tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        self._model_config = model_config
        self._server_args = server_args
        self._layers: list[RemoteDispatcher] = []
        self._leader: LeaderControl | None = None
        self._member: MemberControl | None = None
        self._store: torch.distributed.TCPStore | None = None
        self._rendezvous: Rendezvous | None = None
        self._ready: Ready | None = None
        self._meter: AttnMeter | None = None
        self._spans: SpanLog | None = None
        self._on_plan: list[Callable[[StepPlan], None]] = []  # of the meter, and of a trace
        self._log_plans = envs.flag(envs.LOG_PLANS)
        self._graph_replays = 0
        self._eager_steps: Counter[str] = Counter()  # by mode
        self._graphs: dict[int, dict[str, float]] = {}  # by number of microbatches
        self.choice: Choice | None = None
        self._watch: StepWatch | None = None
        self._closed = False

    @property
    def is_leader(self) -> bool:
        return self.attn_rank == 0

    def add_layer(self, dispatcher: RemoteDispatcher) -> None:
        self._layers.append(dispatcher)

    def join_control_plane(self) -> None:
        """Number the layers and say hello. Called with the model built and no weight read."""
        self._layers.sort(key=lambda d: d.config.layer_id)
        for index, dispatcher in enumerate(self._layers):
            dispatcher.layer = index
        shape = facts.expert_shape(
            [d.config for d in self._layers], self._model_config, self._server_args.model_path
        )
        fp8 = wire.fp8(self._server_args, self.settings.connector)
        ours = facts.collect(self.settings, shape, self._model_config, self.capacity, fp8)
        self.spec = LinkSpec(
            topology=Topology(self.settings.attn_ranks, self.settings.ffn_ranks, shape.num_experts),
            hidden_size=shape.hidden_size,
            topk=shape.topk,
            dtype=self._model_config.dtype,
            capacity=self.capacity,
            timeout_s=self.settings.peer_timeout_s,
            microbatches=self.settings.microbatches,
            fp8=fp8,
        )
        address = self.settings.leader_addr
        timeouts = {
            "load_timeout_s": self.settings.load_timeout_s,
            "peer_timeout_s": self.settings.peer_timeout_s,
        }
        if self.is_leader:
            if self._server_args.afd_launcher_pid is not None:
                watch_launcher(self._server_args.afd_launcher_pid, self.settings.peer_timeout_s)
            host = address.rpartition(":")[0]
            self._store = host_store(host, self.settings.load_timeout_s)
            self._leader = LeaderControl(
                bind_addr=address,
                facts=ours,
                store_host=host,
                store_port=self._store.port,
                **timeouts,
            )
            store_host, store_port = host, self._store.port
        else:
            self._member = MemberControl(
                address=address, role="attn", rank=self.attn_rank, facts=ours, **timeouts
            )
            welcome = self._member.join()
            store_host, store_port = welcome.store_host, welcome.store_port
        channel = self._leader or self._member
        assert channel is not None
        channel.set_on_failure(self._end)
        self._rendezvous = Rendezvous(
            store_host=store_host, store_port=store_port, timeout_s=self.settings.load_timeout_s
        )
        atexit.register(self.close)

    def join_data_plane(self, model: torch.nn.Module) -> None:
        """Report what was loaded, wait for every rank, connect."""
        report = weights.report()
        self._ready = Ready(
            role="attn",
            rank=self.attn_rank,
            param_bytes=weights.parameter_bytes(model),
            checkpoint_bytes=report.bytes_read,
            tensors_read=report.tensors_read,
            tensors_skipped=report.tensors_skipped,
            device=device_name(self.device),
        )
        if self._leader is not None:
            self._leader.wait_ready(self.settings.load_timeout_s)
        else:
            assert self._member is not None
            self._member.ready(self._ready)
        assert self._rendezvous is not None
        self.connector = registry.create_attn(
            self.settings.connector, self.spec, self.attn_rank, self._rendezvous
        )
        if self.settings.measured:
            soon = replace(self._rendezvous, timeout_s=self.settings.peer_timeout_s)
            board = StoreBoard(functools.partial(join_store, soon))
            self.choice = Choice(self.is_leader, DeviceTimer, board)
        if self.device.type == "cuda":
            channel = self._leader or self._member
            assert channel is not None
            self._watch = StepWatch(
                f"attn {self.attn_rank}",
                self.settings.peer_timeout_s,
                self.settings.load_timeout_s,
                channel.silences,
                self._end,
                *([self.connector.failure] if isinstance(self.connector, TellsFailure) else []),
            )
        if self._server_args.enable_metrics:
            self._meter = AttnMeter(self._link(), self._tokens)
            self._on_plan.append(self._meter.begin)
            self.connector = self._meter.wrap(self.connector)
        logger.info(
            "AFD attention rank %d: %d MoE layers on %d FFN ranks over %s, %.1f MiB of parameters",
            self.attn_rank,
            len(self._layers),
            self.settings.ffn_ranks,
            self.settings.connector,
            self._ready.param_bytes / 2**20,
        )

    def _link(self) -> Link:
        channel = self._leader or self._member
        assert channel is not None
        return Link(
            rank=self.attn_rank,
            spec=self.spec,
            moe_layers=len(self._layers),
            connector=self.settings.connector,
            device=self.device,
            silences=channel.silences,
        )

    def begin_graph_step(self, mode: Mode, batch: int, microbatches: int) -> None:
        """Fix the plan of a graph's warm-up, capture or replay, at `batch` tokens per rank."""
        tokens = (batch,) * self.settings.attn_ranks
        self.begin_step(mode, tokens, microbatches, bucket=-(-batch // microbatches))

    def captured(self, microbatches: int, seconds: float, num_bytes: int) -> None:
        """Count one graph, its warm-up forwards included, to the set of its kind."""
        graphs = self._graphs.setdefault(microbatches, {"graphs": 0, "seconds": 0.0, "mib": 0.0})
        graphs["graphs"] += 1
        graphs["seconds"] = round(graphs["seconds"] + seconds, 2)
        graphs["mib"] = round(graphs["mib"] + num_bytes / 2**20, 1)
        logger.info(
            "AFD graphs with %d microbatch(es): %d, captured in %.2f s, %.1f MiB",
            microbatches,
            *graphs.values(),
        )

    def begin_step(
        self, mode: Mode, tokens: tuple[int, ...], microbatches: int, bucket: int = 0
    ) -> None:
        """Fix the plan of the step that starts now; the leader tells the FFN ranks."""
        self.plan = make_plan(
            step_id=self.steps,
            mode=mode,
            tokens_per_rank=tokens,
            capacity=self.capacity,
            microbatches=microbatches,
            bucket=bucket,
        )
        self.steps += 1
        if not bucket:
            self._eager_steps[mode] += 1
        elif mode == "decode":
            self._graph_replays += 1
        for on_plan in self._on_plan:
            on_plan(self.plan)
        if self._leader is not None:
            self._leader.check()
            self._leader.publish(self.plan)
            if self._log_plans:
                logger.info("AFD plan %s", self.plan)

    def step_enqueued(self) -> None:
        """All work of the step that began last is enqueued."""
        if self._watch is not None and self.plan.mode not in ("warmup", "capture"):
            self._watch.enqueued(self.plan.step_id)

    def idle_step(self) -> None:
        """Take part in every transfer of this step without a row."""
        for dispatcher in self._layers:
            for microbatch in range(self.plan.microbatches):
                dispatcher.send_nothing(microbatch)

    def count_tokens(self, topk_ids: torch.Tensor) -> None:
        """Count the tokens [T, K] that leave with at least one expert; padding rows do not."""
        self._tokens += (topk_ids >= 0).any(dim=1).sum()

    def state(self) -> dict[str, Any]:
        """What /server_info shows of this rank, and, on the leader, of the FFN ranks."""
        assert self._ready is not None
        layers = len(self._layers)
        state: dict[str, Any] = {
            **facts.rank_row(self._ready, layers),
            "tokens": int(self._tokens),
            "steps": self.steps,
            "graph_replays": self._graph_replays,
            "eager_steps": dict(self._eager_steps),
            "graphs": {str(width): dict(found) for width, found in self._graphs.items()},
            "connector": self.settings.connector,
            "capacity": self.capacity,
            "microbatches": self.settings.microbatches,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "afd_version": version("sglang-afd"),
            "sglang_version": version("sglang"),
        }
        if self.choice is not None:
            state["chosen"] = {
                str(batch): {
                    "microbatches": found.microbatches,
                    "ms": {str(width): round(ms, 4) for width, ms in found.ms.items()},
                }
                for batch, found in self.choice.results.items()
            }
        if self._leader is not None:
            experts = self.spec.topology.expert_range
            state["ffn"] = [
                {
                    **facts.rank_row(peer.ready, layers),
                    "host": peer.host,
                    "pid": peer.pid,
                    "experts": (experts(peer.ready.rank).start, experts(peer.ready.rank).stop),
                    "tokens": peer.heartbeat.rows if peer.heartbeat else 0,
                    "steps": peer.heartbeat.steps if peer.heartbeat else 0,
                }
                for peer in self._leader.peers()
                if peer.ready is not None and peer.ready.role == "ffn"
            ]
        return state

    def start_trace(self) -> None:
        """Keep spans from the next step on, on this rank and, if it leads, on the FFN ranks."""
        if self._spans is None:
            self._spans = SpanLog("attn", self.attn_rank)
            self._on_plan.append(self._spans.begin)
            self._untraced = self.connector
            self.connector = TimedAttn(self.connector, self._spans)
            if self._leader is not None:
                self._leader.trace(Trace(on=True, folder=""))

    def stop_trace(self, folder: Path) -> None:
        """Write the spans into `folder`, or nothing if no trace was started."""
        if self._spans is not None:
            spans, self._spans = self._spans, None
            self.connector = self._untraced
            self._on_plan.remove(spans.begin)
            if self._leader is not None:
                self._leader.trace(Trace(on=False, folder=str(folder)))
            spans.write(folder)

    def live_state(self) -> dict[str, Any]:
        """What changes by itself: seconds since each peer's last sign of life, by name."""
        channel = self._leader or self._member
        assert channel is not None
        return {"heartbeat_age_s": dict(channel.silences())}

    def _end(self, error: AFDError) -> None:
        """A peer is lost: end this rank at once, whatever its main thread waits for.

        A kernel that waits for a lost peer, or an idle scheduler, would never notice.
        """
        if self._closed:
            return
        reason = f"Attention rank {self.attn_rank}: {error}"
        files.leave_reason(self._server_args.afd_run_folder, reason, error)
        time.sleep(_LAST_WORDS_S)  # a main thread that is in a wait says more about it
        logger.error("AFD attention rank %d ends: %s", self.attn_rank, error)
        logging.shutdown()
        os._exit(1)

    def close(self, reason: str = "the attention side ended") -> None:
        """Tell the FFN ranks to stop and release the link. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        if self._meter is not None:
            self._meter.close()
        if self._leader is not None:
            self._leader.stop(reason)
            self._leader.close()
        if self._member is not None:
            self._member.close()
        if hasattr(self, "connector"):
            self.connector.close()


def is_active() -> bool:
    """True in a process that holds an attention rank."""
    return _runtime is not None


def current() -> AttentionRuntime:
    if _runtime is None:
        raise AFDError("no AFD attention rank in this process")
    return _runtime


@contextlib.contextmanager
def _last_words(server_args: Any) -> Iterator[None]:
    """End this process on an error of ours while it loads: with the text, without a traceback."""
    try:
        yield
    except AFDError as error:
        files.leave_reason(server_args.afd_run_folder, str(error), error)
        logger.error("AFD attention rank ends: %s", error)
        logging.shutdown()
        os._exit(1)


# --- hooks, see patches.py ---------------------------------------------------------------------


def initialize_model(orig: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `_initialize_model`: builds the model without experts, then says hello."""
    from sglang.srt.runtime_context import get_server_args

    server_args = get_server_args()
    if not getattr(server_args, "afd_enabled", False) or server_args.is_ffn_rank:
        return orig(model_config, *args, **kwargs)
    with _last_words(server_args):
        return _build_model(orig, server_args, model_config, *args, **kwargs)


def _build_model(orig: Any, server_args: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
    global _runtime
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if _runtime is not None:
        _runtime.close("the model was loaded again")
    _runtime = AttentionRuntime(server_args, model_config, parallel.tp_rank)
    if server_args.afd_alone:
        from sglang.srt.disaggregation.afd.attention import alone

        model = alone.build(orig, model_config, *args, **kwargs)
    else:
        # Blocks run their dispatch operations only under expert parallelism (ep_size > 1).
        ep_size = max(2, parallel.moe_ep_size)
        with parallel.override(moe_ep_size=ep_size, moe_ep_rank=parallel.moe_ep_rank):
            model = orig(model_config, *args, **kwargs)
    if _runtime.settings.microbatches == 2:
        from sglang.srt.disaggregation.afd.attention import overlap

        overlap.wrap(model)
    _runtime.join_control_plane()
    return model


def after_load_model(result: Any, model_runner: Any) -> None:
    """AFTER `ModelRunner.load_model`."""
    if is_active() and not model_runner.is_draft_worker:
        with _last_words(model_runner.server_args):
            current().join_data_plane(model_runner.model)


def after_forward(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER `ModelRunner.forward`, eager or a replay."""
    if is_active() and not model_runner.is_draft_worker:
        current().step_enqueued()
    return result


def after_internal_state(result: Any, scheduler: Any, recv_req: Any) -> Any:
    """AFTER `Scheduler.get_internal_state`: the entries `afd` and `afd_live`."""
    if is_active():
        result.internal_state["afd"] = current().state()
        result.internal_state["afd_live"] = current().live_state()
    return result


def run_event_loop(orig: Any, scheduler: Any) -> None:
    """AROUND `Scheduler.run_event_loop`: upstream logs what its main thread failed of, and its
    parent learns only that it is gone."""
    try:
        orig(scheduler)
    except Exception as error:
        if is_active():
            text = f"Attention rank {current().attn_rank} failed: {type(error).__name__}: {error}"
            files.leave_reason(scheduler.server_args.afd_run_folder, text, error)
        raise


def before_release(scheduler: Any) -> None:
    """BEFORE `Scheduler.release_host_resources`, which upstream calls on a graceful end only."""
    if is_active():
        current().close("the server was shut down")
