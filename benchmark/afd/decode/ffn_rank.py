"""An FFN rank, as `ffn/server.py` runs it, with a pipe beside it for what only a benchmark asks.

Commands come while no step runs, and are served by a thread of their own: the main one waits for
plans as ever.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from decode.attention_rank import Job
from decode.steps import BatchShape


def main(job: Job, pipe: Connection) -> None:
    """Entry of the process."""
    from decode import weights
    from sglang.srt.disaggregation.afd.ffn import server
    from sglang.srt.model_loader import weight_utils
    from sglang.srt.server_args import prepare_server_args

    weight_utils.initialize_dummy_weights = weights.fill
    args = prepare_server_args(list(job.command_line))
    side = _Side(job, pipe)
    side.listen_for(server)
    server.main(args, job.rank, job.gpu, job.parent)


class _Side:
    """The benchmark's side of this process."""

    def __init__(self, job: Job, pipe: Connection) -> None:
        self._job, self._pipe = job, pipe
        self._spec: Any = None
        self._is_expert_major = False
        self._layers: Any = None
        self._capacity = 0
        self._device = torch.device("cpu")
        self._alone: dict[str, _Alone] = {}
        self._profiler: Any = None

    def listen_for(self, server: Any) -> None:
        """Learn what the server builds, and answer commands once it has a loop."""
        side, create, loop_class = self, server.registry.create_ffn, server.FFNLoop

        def create_ffn(name: str, spec: Any, *args: Any) -> Any:
            side._spec, connector = spec, create(name, spec, *args)
            side._see_first_batch(connector)
            return connector

        class Loop(loop_class):  # type: ignore[misc, valid-type]
            def __init__(self, control: Any, connector: Any, layers: Any, *args: Any) -> None:
                super().__init__(control, connector, layers, *args)
                side._layers = layers
                side._capacity, _, side._device = args[:3]
                threading.Thread(target=side._serve, name="bench", daemon=True).start()

        server.registry.create_ffn = create_ffn
        server.FFNLoop = Loop

    def _see_first_batch(self, connector: Any) -> None:
        """Note in which form this connector brings rows, once; it is then as it was."""
        from sglang.srt.disaggregation.afd.connector.base import ExpertMajorBatch

        receive = connector.receive

        def first(*args: Any, **kwargs: Any) -> Any:
            batch = receive(*args, **kwargs)
            self._is_expert_major = isinstance(batch, ExpertMajorBatch)
            del connector.receive
            return batch

        connector.receive = first

    def _serve(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._job.gpu)
            self._pipe.send(("ok", self.facts()))
            while True:
                method, arguments = self._pipe.recv()
                self._pipe.send(("ok", getattr(self, method)(**arguments)))
        except EOFError:
            os._exit(1)  # the driver is gone
        except BaseException:  # noqa: BLE001 - its text goes to the driver
            self._pipe.send(("error", traceback.format_exc()))
            os._exit(1)

    def facts(self) -> dict[str, Any]:
        modules = torch.nn.ModuleList([layer.module for layer in self._layers])
        parameters = list(modules.parameters())
        return {
            "ready_at": time.monotonic(),
            "weight_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "moe_runner_backend": self._runner(),
        }

    def _runner(self) -> str:
        runner = getattr(self._layers[0].module.quant_method, "runner", None)
        return "native" if runner is None else str(runner.runner_backend.value)

    def measure(self, *, shape: BatchShape, path: str, **window: int) -> list[float]:
        """Milliseconds of steps of the experts alone, every arrival preset: T_e.

        Args:
            path: of a file with recorded routing.
        """
        if path not in self._alone:
            self._alone = {path: self._stand_alone(path)}  # the last one's buffers go
        return self._alone[path].measure(shape, **window)

    def _stand_alone(self, path: str) -> _Alone:
        from sglang.srt.disaggregation.afd.connector import null
        from sglang.srt.disaggregation.afd.ffn.loop import FFNLoop
        from sglang.srt.disaggregation.afd.ffn.pace import Pace

        spec, device = self._spec, self._device
        # What arrives has the form in which this rank's connector brings it.
        form = null.EXPERT_MAJOR if self._is_expert_major else null.ROWS
        routing = null.Arrivals(spec, Path(path))
        alone = _Alone(spec, device)
        alone.loop = FFNLoop(
            alone,  # type: ignore[arg-type]
            null.NullFFN(spec, self._job.rank, routing, device, form),
            self._layers,
            self._capacity,
            Pace("T_e", device, spec.timeout_s),
            device,
        )
        return alone

    def trace_start(self) -> None:
        from decode.profile import Profiler

        self._profiler = Profiler()
        self._profiler.start()

    def trace_stop(self) -> Any:
        return self._profiler.stop()


class _Alone:
    """A loop over the layers of this rank behind the connector `null`. It stands in for the loop's
    control channel too: plans come from a list, and it notes when each is taken."""

    loop: Any

    def __init__(self, spec: Any, device: torch.device) -> None:
        self._spec, self._is_cuda = spec, device.type == "cuda"
        self._captured: set[tuple[int, int]] = set()
        self._plans: Iterator[Any] = iter(())
        self._marks: list[Any] = []

    def recv_plan(self) -> Any:
        from sglang.srt.disaggregation.afd.messages import Stop

        if self._is_cuda:
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append(mark)
        return next(self._plans, Stop(reason="the list ends"))

    def count(self, steps: int, rows: int) -> None:
        pass

    def measure(self, shape: BatchShape, steps: int, warm_up: int) -> list[float]:
        """Milliseconds of each of `steps` steps."""
        key = (shape.bucket, shape.microbatches)
        first: list[str] = []
        if shape.graph and key not in self._captured:
            first = ["warmup", "warmup", "capture"]
            self._captured.add(key)
        # A step that is not replayed still has the rows of its bucket, as a warm-up does.
        mode = "decode" if shape.graph else "warmup"
        modes = [*first, *[mode] * (warm_up + steps)]
        self._plans = iter([self._plan(number, each, shape) for number, each in enumerate(modes)])
        self._marks = []
        self.loop.run()
        marks = self._marks[-steps - 1 :]
        if not self._is_cuda:
            return [1e3 * (after - before) for before, after in zip(marks, marks[1:], strict=False)]
        marks[-1].synchronize()
        return [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]

    def _plan(self, number: int, mode: Any, shape: BatchShape) -> Any:
        from sglang.srt.disaggregation.afd.plan import make_plan

        ranks = self._spec.topology.attn_ranks
        return make_plan(
            step_id=number,
            mode=mode,
            tokens_per_rank=(shape.bucket * shape.microbatches,) * ranks,
            capacity=self._spec.capacity,
            microbatches=shape.microbatches,
            bucket=shape.bucket,
        )
