"""All ranks of a link in one process: a buffer per rank, a stream per rank, one GPU or several.

Kernels of different ranks wait for each other, so they must be able to run at the same time: few
blocks each.
"""

from __future__ import annotations

import time

import torch
from sglang_afd_kernel.ends import AttnEnd, Failure, FFNEnd, Shape, buffer_bytes

TIMEOUT_S = 5.0


class Link:
    """Ends by role. `attn[i]` on stream `attn_streams[i]`, `ffn[j]` on `ffn_streams[j]`.

    Args:
        devices: GPU of each world rank; all on the first if empty. A pair of GPUs must have copied
            to each other before, which is what makes torch open their memory to each other.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        by_expert: bool,
        blocks: int = 4,
        ffn_blocks: int = 4,
        timeout_s: float = TIMEOUT_S,
        eager_timeout_s: float | None = None,
        devices: tuple[int, ...] = (),
    ) -> None:
        self.shape = shape
        world = shape.attn_ranks + shape.ffn_ranks
        places = [torch.device("cuda", rank) for rank in devices or (0,) * world]
        size = buffer_bytes(shape, places[0])
        self.buffers = [torch.zeros(size, dtype=torch.uint8, device=place) for place in places]
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.attn = [
            AttnEnd(
                shape,
                i,
                self.buffers[i],
                addresses[shape.attn_ranks :],
                timeout_s=timeout_s,
                eager_timeout_s=eager_timeout_s,
                most_blocks=blocks,
            )
            for i in range(shape.attn_ranks)
        ]
        self.ffn = [
            FFNEnd(
                shape,
                j,
                self.buffers[shape.attn_ranks + j],
                addresses[: shape.attn_ranks],
                timeout_s=timeout_s,
                eager_timeout_s=eager_timeout_s,
                most_blocks=ffn_blocks,
                by_expert=by_expert,
            )
            for j in range(shape.ffn_ranks)
        ]
        self.streams = [torch.cuda.Stream(place) for place in places]
        self.attn_streams = self.streams[: shape.attn_ranks]
        self.ffn_streams = self.streams[shape.attn_ranks :]
        torch.cuda.synchronize()

    def ready(self) -> None:
        """What follows on the ranks' streams starts after what was done on the current one."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def finish(self) -> None:
        """Wait for all ranks, and not for ever.

        Raises:
            AssertionError: a rank's kernels gave up, or do not end.
        """
        deadline = time.monotonic() + 4 * TIMEOUT_S
        for rank, stream in enumerate(self.streams):
            while not stream.query():
                assert time.monotonic() < deadline, f"world rank {rank} does not end"
                time.sleep(1e-4)
        failed = [end.failure for end in (*self.attn, *self.ffn) if end.failure is not None]
        assert not failed, failed[0]
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def failures(self) -> list[Failure]:
        return [end.failure for end in (*self.attn, *self.ffn) if end.failure is not None]
