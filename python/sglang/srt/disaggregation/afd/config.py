"""The settings of AFD, validated in one place.

`FLAGS` is the single list of command line flags (docs/flags.md is generated from it),
`LIMITS` the single list of upstream settings that AFD refuses, and `AFDConfig` what the rest of
the package reads. Nothing here imports torch or starts anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.afd import auto_ranks, envs
from sglang.srt.disaggregation.afd.connector import registry
from sglang.srt.disaggregation.afd.errors import AFDConfigError

if TYPE_CHECKING:
    from sglang.srt.disaggregation.afd.server_args import AFDServerArgs

ROLES = ("all", "attn", "ffn")
MICROBATCHES = ("auto", "1", "2", "measured")
WIRE_DTYPES = ("auto", "bf16", "fp8")
DEFAULT_PEER_TIMEOUT_S = 30.0
DEFAULT_LOAD_TIMEOUT_S = 1800.0
DEFAULT_DRAIN_TIMEOUT_S = 10.0
# Bounds one message of a prefill; DeepEP's low-latency buffers end here too.
EAGER_CAPACITY = 1024


def int_or_auto(text: str) -> int | str:
    """A rank count as typed: a number, or "auto" for the planner's choice (`auto_ranks`)."""
    return text if text == auto_ranks.AUTO else int(text)


class Flag(NamedTuple):
    """One command line flag; its `ServerArgs` field is the name with underscores."""

    name: str
    type: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[str, ...] | None = None


FLAGS = (
    Flag(
        "--afd-role",
        str,
        "all",
        "What this command starts: both pools on this host (all), only the attention pool with "
        "the API (attn), or only FFN ranks (ffn).",
        ROLES,
    ),
    Flag(
        "--afd-attn-ranks",
        int_or_auto,
        1,
        "Attention ranks (M). They become DP-attention ranks, so --tp-size and --dp-size follow. "
        "auto lets the planner divide this host's GPUs.",
    ),
    Flag(
        "--afd-ffn-ranks",
        int_or_auto,
        1,
        "FFN ranks (N), at most one per routed expert; auto as above.",
    ),
    Flag(
        "--afd-connector",
        str,
        "auto",
        "How tokens travel between the pools; auto takes the fastest that fits the device.",
        ("auto", *registry.names()),
    ),
    Flag(
        "--afd-microbatches",
        str,
        "auto",
        "Microbatches per step: 1, or 2 with upstream's two-batch overlap; measured captures graphs of "
        "both kinds and keeps, for each batch size, the faster one; auto is 1 for now.",
        MICROBATCHES,
    ),
    Flag(
        "--afd-max-tokens-per-rank",
        int,
        None,
        "Most tokens that one attention rank sends in one dispatch; a larger prefill goes in "
        f"rounds. Default: {EAGER_CAPACITY}, or the largest decode graph batch if that is more.",
    ),
    Flag(
        "--afd-wire-dtype",
        str,
        "auto",
        "Tokens on their way to FFN ranks: FP8 if the checkpoint's experts are FP8 in blocks of 128 "
        "and the connector can carry it (auto), the model's own dtype in any case (bf16), or FP8 "
        "or no start (fp8). Expert outputs return in the model's dtype.",
        WIRE_DTYPES,
    ),
    Flag(
        "--afd-bootstrap-addr",
        str,
        None,
        "HOST:PORT where attention rank 0 listens for the other ranks. Needed for the roles attn "
        "and ffn; chosen automatically for all.",
    ),
    Flag(
        "--afd-peer-timeout",
        float,
        DEFAULT_PEER_TIMEOUT_S,
        "Seconds without a sign of life after which a peer counts as lost.",
    ),
    Flag(
        "--afd-load-timeout",
        float,
        DEFAULT_LOAD_TIMEOUT_S,
        "Seconds that ranks may take to start and to load their weights.",
    ),
    Flag(
        "--afd-drain-timeout",
        float,
        DEFAULT_DRAIN_TIMEOUT_S,
        "Seconds that open requests may take to end after SIGTERM; later they get an error.",
    ),
    Flag(
        "--afd-ffn-metrics-port",
        int,
        0,
        "FFN rank r answers /health and /metrics (Prometheus) on this port + r of --host; 0 is off. "
        "Attention ranks are in the API's /metrics under --enable-metrics.",
    ),
    Flag(
        "--afd-allow-untested",
        bool,
        False,
        "Accept combinations that should work but have no test yet.",
    ),
)


class Limit(NamedTuple):
    """An upstream setting that AFD does not serve.

    `grade` is "broken" (always refused) or "untested" (refused unless --afd-allow-untested).
    """

    field: str
    is_bad: Callable[[Any], bool]
    grade: str
    reason: str


def _set(value: Any) -> bool:
    return value not in (None, False, 0, "", [], (), {})


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


LIMITS = (
    Limit("pp_size", _above_one, "broken", "a step plan describes one pipeline stage"),
    Limit("attn_cp_size", _above_one, "broken", "tokens of one request would sit on many ranks"),
    Limit("dcp_size", _above_one, "broken", "tokens of one request would sit on many ranks"),
    Limit("moe_dp_size", _above_one, "broken", "the FFN pool replaces MoE parallelism"),
    Limit("dwdp_size", _above_one, "broken", "attention ranks hold no expert weights"),
    Limit("speculative_algorithm", _set, "broken", "draft models keep their experts local"),
    Limit("decoupled_spec_role", lambda v: v != "null", "broken", "no draft models under AFD"),
    Limit("enable_lora", _set, "broken", "adapters of routed experts cannot reach FFN ranks"),
    Limit("lora_paths", _set, "broken", "adapters of routed experts cannot reach FFN ranks"),
    Limit("enable_eplb", _set, "broken", "expert placement belongs to the FFN pool"),
    Limit(
        "init_expert_location", lambda v: v != "trivial", "broken", "placement is the FFN pool's"
    ),
    Limit("ep_num_redundant_experts", _set, "broken", "expert placement belongs to the FFN pool"),
    Limit("enable_waterfill", _set, "broken", "it balances experts that attention ranks lack"),
    Limit("elastic_ep_backend", _set, "broken", "the pools have a fixed size"),
    Limit("ep_join_mode", _set, "broken", "the pools have a fixed size"),
    Limit("enable_elastic_expert_backup", _set, "broken", "attention ranks hold no experts"),
    Limit("enable_single_batch_overlap", _set, "broken", "it needs DeepEP's own dispatcher"),
    Limit("enable_pdmux", _set, "broken", "it runs prefill and decode steps out of order"),
    Limit("kt_weight_path", _set, "broken", "it keeps experts on the attention host"),
    Limit("cpu_offload_gb", _set, "broken", "there are no expert weights to offload"),
    Limit(
        "offload_group_size", lambda v: v > 0, "broken", "there are no expert weights to offload"
    ),
    Limit("weight_cache_mode", lambda v: v != "off", "broken", "it caches whole models"),
    Limit("enable_memory_saver", _set, "broken", "FFN ranks would keep their memory"),
    Limit("dllm_algorithm", _set, "broken", "diffusion steps are not decode steps"),
    Limit("is_embedding", _set, "broken", "AFD serves generation"),
    Limit("use_ray", _set, "broken", "Ray starts its own processes"),
    Limit("encoder_only", _set, "broken", "an encoder has no routed experts"),
    Limit("smg_grpc_mode", _set, "untested", "the gRPC front end has no AFD test"),
    Limit("language_only", _set, "untested", "encoder disaggregation has no AFD test"),
    Limit("enable_return_routed_experts", _set, "untested", "routing capture has no AFD test"),
    Limit("enable_torch_compile", _set, "untested", "compiled graphs have no AFD test"),
    Limit("tokenizer_worker_num", _above_one, "untested", "several tokenizers have no AFD test"),
    Limit("detokenizer_worker_num", _above_one, "untested", "they have no AFD test"),
    Limit("enable_hierarchical_cache", _set, "untested", "hierarchical cache has no AFD test"),
    Limit(
        "load_format",
        lambda v: getattr(v, "value", v) not in ("auto", "safetensors", "dummy"),
        "broken",
        "each role reads its own tensors, which needs safetensors",
    ),
    Limit(
        "moe_a2a_backend",
        lambda v: v not in ("none", "deepep"),
        "broken",
        "--afd-connector is the transport",
    ),
    Limit("deepep_mode", lambda v: v != "auto", "broken", "--afd-connector is the transport"),
    Limit(
        "disaggregation_mode",
        lambda v: v not in ("afd", "null"),
        "broken",
        "prefill/decode disaggregation is another mode",
    ),
)


@dataclass(frozen=True, kw_only=True)
class AFDConfig:
    """What one process needs to know.

    Attributes:
        role: "all", "attn" or "ffn".
        attn_ranks, ffn_ranks: M and N.
        connector: a resolved name, never "auto".
        microbatches: largest number per step, 1 or 2.
        measured: graphs exist for 1 and 2, and each batch size takes the faster kind.
        capacity: most tokens per attention rank, dispatch and microbatch.
        bootstrap_addr: HOST:PORT of attention rank 0; None until the launcher chose it.
        peer_timeout_s, load_timeout_s: seconds.
    """

    role: str
    attn_ranks: int
    ffn_ranks: int
    connector: str
    microbatches: int
    measured: bool
    capacity: int
    bootstrap_addr: str | None
    peer_timeout_s: float
    load_timeout_s: float

    @property
    def leader_addr(self) -> str:
        """`bootstrap_addr` in a rank, where it is always known."""
        assert self.bootstrap_addr is not None, "the launcher chooses an address"
        return self.bootstrap_addr


def check_limits(args: AFDServerArgs) -> None:
    """Refuse, by flag name, every upstream setting of `LIMITS` that is in the way.

    Raises:
        AFDConfigError
    """
    for limit in LIMITS:
        value = getattr(args, limit.field)
        if not limit.is_bad(value):
            continue
        if limit.grade == "untested" and args.afd_allow_untested:
            continue
        cli = "--" + limit.field.replace("_", "-")
        way_out = (
            "drop the flag"
            if limit.grade == "broken"
            else "drop the flag, or add --afd-allow-untested to try"
        )
        raise AFDConfigError(
            f"{cli}={value!r} is {limit.grade} with --disaggregation-mode afd: "
            f"{limit.reason}; {way_out}"
        )
    for name, reason in (
        (envs.RUST_SERVER, "the Rust server starts its own processes"),
        (envs.SKIP_ALL_GATHER, "ranks would not know each other's token counts"),
        (envs.SIMULATE_UNIFORM, "answers would be wrong, and measurements too good"),
        (envs.SIMULATE_ROUND_ROBIN, "answers would be wrong, and measurements too good"),
    ):
        if envs.flag(name):
            raise AFDConfigError(
                f"{name}=1 does not work with --disaggregation-mode afd: {reason}; unset it"
            )


def build(args: AFDServerArgs) -> AFDConfig:
    """Validate the AFD flags and return the settings.

    Args:
        args: server arguments, before or after upstream resolved them; the default capacity is
            final only after.
    Raises:
        AFDConfigError: names the flag, its value and what is allowed.
    """
    _positive("--afd-attn-ranks", args.afd_attn_ranks)
    _positive("--afd-ffn-ranks", args.afd_ffn_ranks)
    _positive("--afd-peer-timeout", args.afd_peer_timeout)
    _positive("--afd-load-timeout", args.afd_load_timeout)
    if args.afd_drain_timeout < 0:
        raise AFDConfigError(f"--afd-drain-timeout {args.afd_drain_timeout} must be at least 0")
    if args.afd_max_tokens_per_rank is not None:
        _positive("--afd-max-tokens-per-rank", args.afd_max_tokens_per_rank)
    last_port = args.afd_ffn_metrics_port + args.afd_ffn_ranks - 1
    if args.afd_ffn_metrics_port and not 0 < args.afd_ffn_metrics_port <= last_port < 65536:
        raise AFDConfigError(
            f"--afd-ffn-metrics-port {args.afd_ffn_metrics_port} must be 0, or leave a port below "
            f"65536 for each of {args.afd_ffn_ranks} FFN ranks"
        )
    _one_of("--afd-role", args.afd_role, ROLES)
    _one_of("--afd-microbatches", str(args.afd_microbatches), MICROBATCHES)
    _one_of("--afd-wire-dtype", args.afd_wire_dtype, WIRE_DTYPES)
    _one_of("--afd-connector", args.afd_connector, ("auto", *registry.names()))
    device = args.device or "cpu"
    connector = args.afd_connector
    if connector == "auto":
        connector = registry.resolve_auto(device)
    info = registry.info(connector)
    if info.one_process:
        raise AFDConfigError(
            f"--afd-connector {connector} joins both roles in one process and is for tests; "
            f"leave the flag out, or choose {' or '.join(registry.available(device))}"
        )
    if info.benchmark_only and not envs.flag(envs.BENCHMARK):
        raise AFDConfigError(
            f"--afd-connector {connector} moves nothing, so answers would be meaningless; it is for "
            f"benchmarks under {envs.BENCHMARK}=1; leave the flag out, or choose "
            f"{' or '.join(registry.available(device))}"
        )
    if info.device not in ("any", device):
        raise AFDConfigError(
            f"--afd-connector {connector} moves {info.device} tensors and --device is {device}; "
            "leave the flag out"
        )
    if args.afd_role != "all" and args.afd_bootstrap_addr is None:
        raise AFDConfigError(
            f"--afd-role {args.afd_role} needs --afd-bootstrap-addr HOST:PORT, the address where "
            "attention rank 0 listens; give the same one to every command"
        )
    if args.afd_bootstrap_addr is not None:
        _check_address(args.afd_bootstrap_addr)
    for field in ("tp_size", "dp_size"):
        value = getattr(args, field)
        if value not in (1, args.afd_attn_ranks):
            raise AFDConfigError(
                f"--{field.replace('_', '-')} {value} differs from --afd-attn-ranks "
                f"{args.afd_attn_ranks}; attention ranks are DP-attention ranks of one GPU each, "
                "so leave the flag out"
            )
    measured = args.afd_microbatches == "measured"
    microbatches = 2 if measured or args.afd_microbatches == "2" else 1
    if measured and device != "cuda":
        raise AFDConfigError(
            f"--afd-microbatches measured times CUDA graphs and --device is {device}; choose 1 or 2"
        )
    if args.enable_two_batch_overlap and args.afd_microbatches == "1":
        raise AFDConfigError(
            "--enable-two-batch-overlap contradicts --afd-microbatches 1; drop one of them"
        )
    if microbatches == 2 and args.enable_mixed_chunk:
        raise AFDConfigError(
            "--enable-mixed-chunk does not work with --afd-microbatches 2: two-batch overlap "
            "cannot split a mixed batch; drop one of them"
        )
    return AFDConfig(
        role=args.afd_role,
        attn_ranks=args.afd_attn_ranks,
        ffn_ranks=args.afd_ffn_ranks,
        connector=connector,
        microbatches=2 if args.enable_two_batch_overlap else microbatches,
        measured=measured,
        capacity=_capacity(args),
        bootstrap_addr=args.afd_bootstrap_addr,
        peer_timeout_s=float(args.afd_peer_timeout),
        load_timeout_s=float(args.afd_load_timeout),
    )


def _capacity(args: AFDServerArgs) -> int:
    largest = 0
    # Before upstream resolved it this is None, a string or a dict.
    decode = getattr(args.cuda_graph_config, "decode", None)
    if decode is not None and decode.backend != "disabled" and decode.bs:
        largest = max(decode.bs)
    given: int | None = args.afd_max_tokens_per_rank
    if given is not None and given < largest:
        raise AFDConfigError(
            f"--afd-max-tokens-per-rank {given} is less than the largest decode graph batch "
            f"{largest}; raise it, or lower --cuda-graph-max-bs-decode"
        )
    return given or max(EAGER_CAPACITY, largest)


def check_unused(args: AFDServerArgs) -> None:
    """Refuse AFD flags on a server that is not in AFD mode: nobody types them by accident."""
    for flag in FLAGS:
        value = getattr(args, flag.name[2:].replace("-", "_"))
        if value != flag.default:
            raise AFDConfigError(
                f"{flag.name} {value} has no effect without --disaggregation-mode afd; "
                "add that flag or drop this one"
            )


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise AFDConfigError(f"{name} {value} must be greater than 0")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise AFDConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(allowed)}")


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise AFDConfigError(
            f"--afd-bootstrap-addr {address!r} is not HOST:PORT, for example 10.0.0.1:20000"
        )
