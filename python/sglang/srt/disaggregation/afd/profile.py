"""Takes one trace of both roles of a running server: `python -m ...afd.profile --url URL`.

Writes Chrome's trace format, which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests

from sglang.srt.disaggregation.afd.trace.merge import merge
from sglang.srt.disaggregation.afd.trace.spans import file_name

_ANSWER_S = 60.0
_FILES_S = 30.0  # FFN ranks write theirs after /stop_profile has answered
OURS = "AFD"  # the activity that is ours alone; see attention/profiling.py


class TraceFailed(Exception):
    """The text says why, and what to do."""


def take(url: str, seconds: float, folder: Path, headers: dict[str, str]) -> dict[str, Any]:
    """Record for `seconds` and return the trace. `folder` must be the same one for all ranks.

    Raises:
        TraceFailed: the server is not in AFD mode, a rank wrote nothing, or no step ran.
    """
    topology = _ask("GET", f"{url}/afd/topology", headers).json()
    profile_id = f"{time.time_ns()}"
    request = {"output_dir": str(folder), "activities": [OURS], "profile_id": profile_id}
    _ask("POST", f"{url}/start_profile", headers, request)
    try:
        time.sleep(seconds)
    finally:
        _ask("POST", f"{url}/stop_profile", headers)
    names = [file_name("attn", rank["rank"]) for rank in topology["attention"]]
    names += [file_name("ffn", rank["rank"]) for rank in topology["ffn"]]
    paths = [folder / f"afd-{profile_id}" / name for name in names]
    deadline = time.monotonic() + _FILES_S
    while missing := [path.name for path in paths if not path.exists()]:
        if time.monotonic() > deadline:
            raise TraceFailed(
                f"{', '.join(missing)} did not appear in {folder} within {_FILES_S:g} s; --folder "
                "must name one that every rank can write to, on every host"
            )
        time.sleep(0.1)
    try:
        return merge([json.loads(path.read_text()) for path in paths])
    except ValueError as error:
        raise TraceFailed(str(error)) from error


def _ask(
    method: str, url: str, headers: dict[str, str], body: dict[str, Any] | None = None
) -> requests.Response:
    try:
        answer = requests.request(method, url, headers=headers, json=body, timeout=_ANSWER_S)
    except requests.RequestException as error:
        raise TraceFailed(f"{url} does not answer: {error}") from error
    if not answer.ok:
        raise TraceFailed(f"{url} answered {answer.status_code}: {answer.text[:500]}")
    return answer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang.srt.disaggregation.afd.profile")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the API of the server")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to record")
    parser.add_argument(
        "--out", type=Path, default=Path("afd_trace.json"), help="the file to write"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where ranks leave their parts; shared if they have several hosts",
    )
    parser.add_argument("--api-key", help="the server's, if it has one")
    args = parser.parse_args(argv)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    folder = args.folder or Path(tempfile.mkdtemp(prefix="afd-trace-"))
    try:
        trace = take(args.url.rstrip("/"), args.seconds, folder.resolve(), headers)
    except TraceFailed as error:
        print(f"no trace: {error}", file=sys.stderr)
        return 1
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    args.out.write_text(json.dumps(trace))
    steps = {e["args"]["step"] for e in trace["traceEvents"] if e["name"].startswith("step ")}
    print(f"{args.out}: {len(steps)} steps; open it at https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
