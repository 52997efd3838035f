"""Upstream's /start_profile and /stop_profile record the spans of both roles too.

Each attention rank gets these calls; attention rank 0 passes them on to the FFN ranks. The parts
are in the folder `afd-PROFILE_ID` of the profile's output, and `profile` merges them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang.srt.disaggregation.afd.attention import runtime

logger = logging.getLogger(__name__)


def after_start(result: Any, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER `SchedulerProfilerManager._start_profile`."""
    if not runtime.is_active() or not result.success:
        return
    if manager.torch_profiler_output_dir is None:
        logger.warning("AFD: SGLANG_PROFILE_V2=1 records no spans of the two roles; unset it")
        return
    # Upstream knows nothing to do for the activity "AFD" alone, and would refuse to stop it.
    manager.profile_in_progress = True
    runtime.current().start_trace()


def after_stop(result: Any, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER `SchedulerProfilerManager._stop_profile`."""
    if runtime.is_active() and result.success and manager.torch_profiler_output_dir is not None:
        folder = Path(manager.torch_profiler_output_dir, f"afd-{manager.profile_id}")
        runtime.current().stop_trace(folder.absolute())
