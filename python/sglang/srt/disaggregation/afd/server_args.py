"""Upstream's ServerArgs with the AFD flags. It travels by pickle to every process.

Importing this file puts the class in the place of upstream's. `plugin.bootstrap` has it imported
the moment upstream's module ran, so every command line knows the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
from typing import Any, ClassVar, Literal

import sglang.srt.server_args as upstream
from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.disaggregation.afd import auto_ranks, config, cpu, envs, patches, wire
from sglang.srt.disaggregation.afd.errors import AFDConfigError
from sglang.srt.disaggregation.afd.models import families

_HELP = {flag.name[2:].replace("-", "_"): flag for flag in config.FLAGS}


def _arg(field: str) -> Arg:
    flag = _HELP[field]
    parser = flag.type if flag.type is config.int_or_auto else None
    choices = list(flag.choices) if flag.choices else None
    return Arg(help=flag.help, choices=choices, type_parser=parser)


@dataclasses.dataclass
class AFDServerArgs(upstream.ServerArgs):
    """Server arguments of every process while the package is installed.

    `disaggregation_mode="afd"` is accepted and then stored as `afd_enabled=True` with upstream's
    own field back at "null": over a hundred places in upstream branch on that field.
    """

    disaggregation_mode: A[
        Literal["null", "prefill", "decode", "afd"],
        "Disaggregation: prefill/decode (prefill, decode) or attention/FFN (afd). "
        "If not specified, the server is not disaggregated.",
        NS("disagg"),
    ] = "null"
    afd_enabled: A[
        bool, Arg(help="Set by --disaggregation-mode afd.", no_cli=True), NS("disagg")
    ] = False
    afd_role: A[str, _arg("afd_role"), NS("disagg")] = _HELP["afd_role"].default
    afd_attn_ranks: A[int, _arg("afd_attn_ranks"), NS("disagg")] = _HELP["afd_attn_ranks"].default
    afd_ffn_ranks: A[int, _arg("afd_ffn_ranks"), NS("disagg")] = _HELP["afd_ffn_ranks"].default
    afd_connector: A[str, _arg("afd_connector"), NS("disagg")] = _HELP["afd_connector"].default
    afd_microbatches: A[str, _arg("afd_microbatches"), NS("disagg")] = _HELP[
        "afd_microbatches"
    ].default
    afd_max_tokens_per_rank: A[int | None, _arg("afd_max_tokens_per_rank"), NS("disagg")] = _HELP[
        "afd_max_tokens_per_rank"
    ].default
    afd_wire_dtype: A[str, _arg("afd_wire_dtype"), NS("disagg")] = _HELP["afd_wire_dtype"].default
    afd_moe_runner_backend: A[
        str | None, Arg(help="The --moe-runner-backend that was typed.", no_cli=True), NS("disagg")
    ] = None
    afd_bootstrap_addr: A[str | None, _arg("afd_bootstrap_addr"), NS("disagg")] = _HELP[
        "afd_bootstrap_addr"
    ].default
    afd_peer_timeout: A[float, _arg("afd_peer_timeout"), NS("disagg")] = _HELP[
        "afd_peer_timeout"
    ].default
    afd_load_timeout: A[float, _arg("afd_load_timeout"), NS("disagg")] = _HELP[
        "afd_load_timeout"
    ].default
    afd_drain_timeout: A[float, _arg("afd_drain_timeout"), NS("disagg")] = _HELP[
        "afd_drain_timeout"
    ].default
    afd_ffn_metrics_port: A[int, _arg("afd_ffn_metrics_port"), NS("disagg")] = _HELP[
        "afd_ffn_metrics_port"
    ].default
    afd_allow_untested: A[bool, _arg("afd_allow_untested"), NS("disagg")] = _HELP[
        "afd_allow_untested"
    ].default

    def __post_init__(self) -> None:
        if self.disaggregation_mode == "afd":
            self.afd_enabled = True
        if self.afd_enabled:
            auto_ranks.resolve(self)
            # Kept so that FFN ranks can derive their own arguments from what the user typed.
            self._afd_typed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            self._afd_prepare()
        else:
            config.check_unused(self)
        cpu.prepare_server_args(self)
        super().__post_init__()
        if not self.afd_enabled:
            self._hide_unused()
        elif not self.is_ffn_rank:
            config.check_limits(self)

    def _hide_unused(self) -> None:
        """Leave upstream's fields alone in the instance, since a scheduler reports them all.

        Reads find the defaults of the class, which are the values (`config.check_unused`).
        """
        for name in _OWN_FIELDS:
            self.__dict__.pop(name, None)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> AFDServerArgs:
        """Upstream's, for every command line: a refusal is one message, not a traceback."""
        try:
            return super().from_cli_args(args)
        except AFDConfigError as error:
            sys.exit(f"sglang-afd: {error}")

    # Of the server's main process, set by it for its children; None in other processes.
    afd_launcher_pid: ClassVar[int | None] = None
    afd_run_folder: ClassVar[str | None] = None

    @property
    def is_ffn_rank(self) -> bool:
        """True in the arguments that an FFN rank builds for itself (see `for_ffn_rank`)."""
        return getattr(self, "_afd_ffn_rank", None) is not None

    @property
    def ffn_rank(self) -> int:
        return self._afd_ffn_rank

    @property
    def afd_alone(self) -> bool:
        """True if each attention rank runs the model as if it were alone (see `families`)."""
        return getattr(self, "_afd_alone", False)

    def afd_typed(self, field: str) -> Any:
        """The value of an upstream field before AFD and upstream resolved it."""
        return self._afd_typed[field]

    def _afd_prepare(self) -> None:
        """Check what the user typed, then turn it into the upstream settings that AFD stands on."""
        config.check_limits(self)
        # Set by torchrun: ranks would look for its store and not for the one that we host.
        envs.drop(envs.AGENT_STORE)
        if self.device is None:  # type: ignore[has-type]
            self.device = "cpu" if cpu.is_cpu_only() else "cuda"
        settings = config.build(self)
        if self.afd_moe_runner_backend is None:
            # A field, so that it survives where upstream makes arguments from arguments.
            self.afd_moe_runner_backend = self.moe_runner_backend  # type: ignore[has-type]
        wire.check(self, settings.connector)
        self.disaggregation_mode = "null"
        self.disable_shared_experts_fusion = True
        self.cuda_graph_backend_prefill = "disabled"
        if settings.role == "ffn" or self.is_ffn_rank:
            # Nothing of upstream's parallelism applies to a pool of experts.
            self.tp_size = self.dp_size = self.nnodes = 1
            self.node_rank = 0
            patches.apply()
            return
        self.tp_size = self.dp_size = settings.attn_ranks
        self.enable_dp_attention = settings.attn_ranks > 1
        families.check(self, settings.microbatches)
        self._afd_alone = not families.has_dp_form(self)
        # The value on which upstream's models take their "local tokens, no all-reduce" branch;
        # our dispatcher takes DeepEP's place, DeepEP itself need not be installed.
        self.moe_a2a_backend = "deepep"
        self.enable_two_batch_overlap = settings.microbatches == 2
        # The choice is for the FFN ranks, which take it from what was typed. This value keeps the
        # router's output in the format that the connectors carry, for every model.
        self.moe_runner_backend = "triton"
        patches.apply()

    def for_ffn_rank(self, ffn_rank: int) -> AFDServerArgs:
        """Arguments of FFN rank `ffn_rank`: a world of one rank, without DeepEP or overlap."""
        typed = dict(self._afd_typed)
        typed.update(
            disaggregation_mode="afd",
            afd_enabled=True,
            afd_bootstrap_addr=self.afd_bootstrap_addr,
            tp_size=1,
            dp_size=1,
            enable_dp_attention=False,
            enable_two_batch_overlap=False,
            moe_a2a_backend="none",
            moe_runner_backend=self.afd_moe_runner_backend,
            skip_tokenizer_init=True,
            random_seed=self.random_seed,
            nnodes=1,
            node_rank=0,
            dist_init_addr=None,
        )
        args = type(self).__new__(type(self))
        args._afd_ffn_rank = ffn_rank
        type(self).__init__(args, **typed)
        return args

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__), os.getpid())


def _rebuild(cls: type[AFDServerArgs], state: dict[str, Any], parent_pid: int) -> AFDServerArgs:
    """Unpickle, and put the hooks in force in a process that upstream gives no plugin call.

    A process that is being spawned ends here if its parent died while it was importing: upstream
    ties it to its parent only later.
    """
    spawning = getattr(multiprocessing.current_process(), "_inheriting", False)
    if spawning and os.getppid() != parent_pid:
        os._exit(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    args = cls.__new__(cls)
    for name, value in state.items():
        object.__setattr__(args, name, value)
    if args.afd_enabled:
        patches.apply()
    return args


class _Fields:
    """The dataclass fields: all of the class, but upstream's only of a server without AFD, so that
    whatever reports the arguments of one (`/server_info`) says what it says without the package."""

    def __init__(self, cls: type[AFDServerArgs]) -> None:
        self._all = {field.name: field for field in dataclasses.fields(cls)}
        self._upstream = {k: v for k, v in self._all.items() if k not in _OWN_FIELDS}

    def __get__(
        self, args: AFDServerArgs | None, cls: type[AFDServerArgs]
    ) -> dict[str, dataclasses.Field[Any]]:
        return self._all if args is None or args.afd_enabled else self._upstream


_OWN_FIELDS = frozenset(
    field.name for field in dataclasses.fields(AFDServerArgs) if field.name.startswith("afd_")
)
# `dataclasses` reads this attribute from the instance that it is given.
AFDServerArgs.__dataclass_fields__ = _Fields(AFDServerArgs)  # type: ignore[assignment]
upstream.ServerArgs = AFDServerArgs
