"""Requests in the middle of decoding, admitted without a prefill, and windows of steps over them."""

from __future__ import annotations

import time
from typing import Any

import torch

from decode.steps import Window
from sglang.benchmark import one_batch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


class ResidentBatch:
    """`size` requests of `context` tokens whose KV slots are allocated and hold what was there.

    Args:
        steps: decode steps that will follow at most; each takes a slot per request.
    """

    def __init__(self, runner: Any, size: int, context: int, steps: int) -> None:
        self._runner = runner
        self._context = context
        self._is_cuda = runner.device == "cuda"
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        self._batch = ScheduleBatch.init_new(
            reqs=one_batch.prepare_synthetic_inputs_for_latency_test(size, context),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=one_batch.TreeCacheNamespace(
                page_size=runner.server_args.page_size,
                device=runner.device,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            ),
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        self._batch.prepare_for_extend()
        # Only a forward that is left out here would have read them.
        self._batch.input_ids = self._batch.prefill_input_ids_cpu = None
        # Drawn anew for each step: greedy answers of random weights soon repeat themselves, and
        # requests that do the same would meet at the same experts.
        generator = torch.Generator(runner.device).manual_seed(size * 1009 + context)
        self._tokens_SB = torch.randint(
            runner.model_config.vocab_size,
            (steps, size),
            generator=generator,
            device=runner.device,
        )
        self._steps = 0

    def step(self) -> None:
        """One decode step, enqueued."""
        one_batch.decode(self._tokens_SB[self._steps], self._batch, self._runner)
        self._steps += 1

    def window(self, steps: int, warm_up: int, ahead: int) -> Window:
        """Run `warm_up` + `steps` steps.

        Args:
            ahead: steps that the host may be ahead of the device: 1 is what the overlap scheduler
                does, 0 waits for each step.
        """
        ends: list[torch.cuda.Event] = []
        seen: list[float] = []
        total = warm_up + steps
        for number in range(total + ahead):
            if number < total:
                self.step()
                if self._is_cuda:
                    end = torch.cuda.Event(enable_timing=True)
                    end.record()
                    ends.append(end)
            if number >= ahead:
                if self._is_cuda:
                    ends[number - ahead].synchronize()
                seen.append(time.perf_counter())
        first = warm_up - 1
        wall = [1e3 * (seen[i + 1] - seen[i]) for i in range(first, total - 1)]
        on_device = wall
        if self._is_cuda:
            on_device = [ends[i].elapsed_time(ends[i + 1]) for i in range(first, total - 1)]
        return Window(step_ms=on_device, wall_ms=wall, context=self._context + warm_up + steps // 2)
