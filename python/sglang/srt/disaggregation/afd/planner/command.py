"""The launch_server command of a layout, ready to paste."""

from __future__ import annotations

from sglang.srt.disaggregation.afd.planner.hardware import Hardware
from sglang.srt.disaggregation.afd.planner.layout import Layout

_SERVER = "python -m sglang.launch_server"
_ADDRESS = "HOST0:20000"
_ATTN_INIT = "HOST0:20001"


def launch(layout: Layout, hardware: Hardware, model_path: str) -> list[str]:
    """One command per role and host; HOST0 stands for the host of attention rank 0.

    Args:
        model_path: for --model-path.
    """
    if not layout.ffn_ranks:
        return [_colocated(layout, hardware, model_path)]
    flags = [
        _SERVER,
        f"--model-path {model_path}",
        "--disaggregation-mode afd",
        f"--afd-attn-ranks {layout.attn_ranks} --afd-ffn-ranks {layout.ffn_ranks}",
        f"--afd-connector {layout.connector} --afd-microbatches {layout.microbatches}",
    ]
    sizes = _sizes(layout, hardware, layout.attn_ranks)
    if layout.gpus <= hardware.host_gpus:
        return [_join([*flags, sizes])]
    commands = []
    for role, ranks in (("attn", layout.attn_ranks), ("ffn", layout.ffn_ranks)):
        hosts = -(-ranks // hardware.host_gpus)
        line = [*flags, f"--afd-role {role} --afd-bootstrap-addr {_ADDRESS}"]
        if role == "attn":
            line.append(sizes)
        if hosts > 1:
            line.append(f"--nnodes {hosts} --node-rank 0")
            if role == "attn":
                line.append(f"--dist-init-addr {_ATTN_INIT}")
        of = f"# {role}: on {hosts} host(s)" + (
            ", --node-rank 0 to " + str(hosts - 1) if hosts > 1 else ""
        )
        commands.append(of + "\n" + _join(line))
    return commands


def _colocated(layout: Layout, hardware: Hardware, model_path: str) -> str:
    flags = [_SERVER, f"--model-path {model_path}"]
    if layout.attn_ranks > 1:
        flags.append(
            f"--tp-size {layout.attn_ranks} --dp-size {layout.attn_ranks} --enable-dp-attention"
        )
        flags.append("--moe-a2a-backend deepep")
    hosts = -(-layout.attn_ranks // hardware.host_gpus)
    if hosts > 1:
        flags.append(f"--nnodes {hosts} --node-rank 0 --dist-init-addr {_ATTN_INIT}")
    return _join([*flags, _sizes(layout, hardware, layout.attn_ranks)])


def _sizes(layout: Layout, hardware: Hardware, ranks: int) -> str:
    # Upstream's fraction is of weights and KV together; its limit on requests is of all ranks.
    fraction = (layout.room.weights + layout.room.kv) / hardware.memory_bytes
    return (
        f"--mem-fraction-static {fraction:.2f} --max-running-requests {layout.batch * ranks} "
        f"--cuda-graph-max-bs-decode {layout.batch}"
    )


def _join(parts: list[str]) -> str:
    return " \\\n    ".join(parts)
