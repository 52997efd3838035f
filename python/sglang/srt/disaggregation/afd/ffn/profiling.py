"""What an FFN rank does when attention rank 0 says that a trace begins or ends."""

from __future__ import annotations

import threading
from pathlib import Path

from sglang.srt.disaggregation.afd.ffn.loop import FFNLoop
from sglang.srt.disaggregation.afd.messages import Trace
from sglang.srt.disaggregation.afd.trace.spans import SpanLog


class LoopTrace:
    """Called with each `Trace` message, on the control channel's thread."""

    def __init__(self, loop: FFNLoop, ffn_rank: int) -> None:
        self._loop = loop
        self._rank = ffn_rank
        self._spans: SpanLog | None = None

    def __call__(self, message: Trace) -> None:
        if message.on and self._spans is None:
            self._spans = SpanLog("ffn", self._rank)
            self._loop.start_trace(self._spans)
        elif not message.on and self._spans is not None:
            spans, self._spans = self._spans, None
            self._loop.stop_trace(spans)
            # Writing takes longer than a heartbeat may be late.
            threading.Thread(target=spans.write, args=(Path(message.folder),), daemon=True).start()
