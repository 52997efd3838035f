"""Every place where this package changes upstream: one row each, applied, then verified.

Upstream only logs a hook that fails. Here a target that is missing, whose source is not the one
that the hook was written for, or whose hook is not in force stops the start with its name.
docs/patches.md is generated from `ROWS`; scripts/patch_drift.py reports what another upstream
version changed.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

from sglang.srt.disaggregation.afd.errors import PatchError
from sglang.srt.disaggregation.afd.imports import after_import

UPSTREAM_VERSION = "0.5.17"
_HERE = "sglang.srt.disaggregation.afd."


class Row(NamedTuple):
    """One patch point.

    Attributes:
        group: "afd" (a server in AFD mode) or "cpu" (no accelerator, AFD or not).
        target: "module:name" in upstream.
        kind: HookType of upstream's registry: "before", "after", "around" or "replace".
        hook: our function, "module:name" below this package.
        why: the reason, one sentence.
        test: what fails without it.
        source_hash: first 16 hex digits of SHA-256 over the target's source in UPSTREAM_VERSION.
    """

    group: str
    target: str
    kind: str
    hook: str
    why: str
    test: str
    source_hash: str


ROWS: tuple[Row, ...] = (
    Row(
        "afd",
        "sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes",
        "around",
        "launch:launch_processes",
        "Starts the FFN ranks beside the schedulers and supervises both pools.",
        "test_served",
        "84f6cb453713afad",
    ),
    Row(
        "afd",
        "sglang.srt.entrypoints.engine:Engine.shutdown",
        "before",
        "shutdown:before_engine_shutdown",
        "A wanted end of the children is not a failure of the pool.",
        "test_engine",
        "dd245a47c0f01de6",
    ),
    Row(
        "afd",
        "sglang.srt.entrypoints.http_server:launch_server",
        "around",
        "launch:launch_server",
        "`--afd-role ffn` starts FFN ranks and no API server.",
        "test_roles",
        "232091472ea1ce07",
    ),
    Row(
        "afd",
        "sglang.srt.managers.tokenizer_manager:SignalHandler.sigterm_handler",
        "before",
        "shutdown:before_sigterm",
        "Children that end during a drain are not a failure of the pool.",
        "test_served",
        "0a4aac4977e172a8",
    ),
    Row(
        "afd",
        "sglang.srt.managers.tokenizer_manager:SignalHandler.running_phase_sigquit_handler",
        "around",
        "shutdown:sigquit",
        "Open requests get an error with the reason before the server ends.",
        "test_loss",
        "3cda3b761b1390df",
    ),
    Row(
        "afd",
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.sigterm_watchdog",
        "around",
        "shutdown:sigterm_watchdog",
        "A graceful end within a limit, with exit code 0; upstream's has neither.",
        "test_loss",
        "bd6a3f016113f0dd",
    ),
    Row(
        "afd",
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.init_communicators",
        "after",
        "refusals:after_init_communicators",
        "What would change one pool only is answered with the reason.",
        "test_api",
        "54b217a0206797a5",
    ),
    Row(
        "afd",
        "sglang.benchmark.one_batch:main",
        "around",
        "launch:bench_one_batch",
        "bench_one_batch builds its runners itself, so it needs the FFN ranks too.",
        "test_bench_one_batch",
        "a502dc8e931d0803",
    ),
    Row(
        "afd",
        "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE.__init__",
        "around",
        "experts_module:init_experts",
        "Attention ranks build no routed weights; FFN ranks build their share for real.",
        "test_served, test_ffn_model",
        "38b36049b62dcc46",
    ),
    Row(
        "afd",
        "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE.weight_loader_fused",
        "around",
        "experts_module:load_fused",
        "It knows no expert parallelism, and an FFN rank has slots for its own experts only.",
        "models/test_families (gpt_oss)",
        "e7d1ec6515ad1c54",
    ),
    Row(
        "afd",
        "sglang.srt.layers.moe.fused_moe_triton.layer:create_moe_dispatcher",
        "around",
        "experts_module:create_dispatcher",
        "The experts of an attention rank dispatch over the AFD connector.",
        "test_served",
        "521b78a2c551ff82",
    ),
    Row(
        "afd",
        "sglang.srt.layers.moe.ep_moe.layer:get_moe_impl_class",
        "around",
        "experts_module:impl_class",
        "DeepEPMoE insists on DeepEP's kernels; the plain module dispatches through ours.",
        "test_served",
        "6306258fa1ee14ab",
    ),
    Row(
        "afd",
        "sglang.srt.distributed.communication_op:tensor_model_parallel_all_reduce",
        "around",
        "attention.alone:all_reduce",
        "A model that runs as if alone has nobody to reduce with, and some do not look.",
        "models/test_families (step3p5)",
        "8b67efd8a9f881ee",
    ),
    Row(
        "afd",
        "sglang.srt.batch_overlap.two_batch_overlap:model_forward_maybe_tbo",
        "around",
        "attention.overlap:forward_maybe_tbo",
        "It knows the operations of few models; the layers of the others overlap by themselves.",
        "models/test_families (2A1F-mb2)",
        "6a29b89a78d04add",
    ),
    Row(
        "afd",
        "sglang.srt.batch_overlap.two_batch_overlap:TboForwardBatchPreparer.filter_batch",
        "around",
        "attention.overlap:filter_batch",
        "It refuses batches of recurrent models.",
        "models/test_families (qwen3_next-2A1F-mb2)",
        "2471500f012b7ee0",
    ),
    Row(
        "afd",
        "sglang.srt.layers.moe.token_dispatcher.deepep:DeepEPDispatcher.__init__",
        "around",
        "experts_module:no_deepep",
        "Some models make a dispatcher that they never call, and DeepEP need not be installed.",
        "models/test_families (bailing_moe)",
        "28e0387d5e65034d",
    ),
    Row(
        "afd",
        "sglang.srt.models.zaya:cca_decode",
        "around",
        "models.zaya:cca_decode",
        "It takes the slot of padding rows for an error, and ranks pad to the longest batch.",
        "models/test_zaya",
        "741f66e4e11fed65",
    ),
    Row(
        "afd",
        "sglang.srt.models.laguna:LagunaForCausalLM.load_weights",
        "around",
        "models.loaders:laguna",
        "It refuses a checkpoint of which a role reads only its part.",
        "models/test_families (laguna)",
        "7340b16b171899e3",
    ),
    Row(
        "afd",
        "sglang.srt.model_loader.loader:_initialize_model",
        "around",
        "attention.runtime:initialize_model",
        "Once the layers are known the rank says hello, before it reads weights.",
        "test_served",
        "90c98cea09329a5d",
    ),
    Row(
        "afd",
        "sglang.srt.model_loader.loader:DefaultModelLoader._get_weights_iterator",
        "around",
        "models.weights:role_weights",
        "A role reads only its own tensors from the checkpoint.",
        "test_weights, test_served",
        "d447a4357a5b6577",
    ),
    Row(
        "afd",
        "sglang.srt.model_executor.model_runner:ModelRunner.load_model",
        "after",
        "attention.runtime:after_load_model",
        "With weights loaded the rank joins the data plane.",
        "test_served",
        "d2ba5b4a96505629",
    ),
    Row(
        "afd",
        "sglang.srt.model_executor.model_runner:ModelRunner._prepare_eager_forward_batch",
        "after",
        "attention.step:after_prepare_eager",
        "The step's token counts are final here: the leader sends the plan.",
        "test_served",
        "24a258a4adafed88",
    ),
    Row(
        "afd",
        "sglang.srt.managers.scheduler_components.dp_attn:MLPSyncBatchInfo._get_fallback_tensor",
        "after",
        "attention.step:fallback_tensor",
        "With one attention rank the gathered tensor aliases this one.",
        "test_served (1A1F)",
        "884e8c0f829461ec",
    ),
    Row(
        "afd",
        "sglang.srt.eplb.expert_location:compute_initial_expert_location_metadata",
        "around",
        "experts_module:no_expert_location",
        "Placement is the FFN pool's; upstream asserts that M divides the experts.",
        "test_served",
        "0c28e897dcb05b9b",
    ),
    Row(
        "afd",
        "sglang.srt.eplb.expert_location_dispatch:ExpertLocationDispatchInfo.init_new",
        "around",
        "experts_module:no_dispatch_info",
        "The router's ids stay logical; the connector maps them to FFN ranks.",
        "test_served",
        "65fbc04f52db1ab5",
    ),
    Row(
        "afd",
        "sglang.srt.batch_overlap.operations_strategy:OperationsStrategy.init_new_tbo",
        "around",
        "attention.step:overlap_strategy",
        "Prefill strategies ask DeepEP for its SM count; the decode one serves both.",
        "test_served (2 microbatches)",
        "7ecdd7b1ee6d4406",
    ),
    Row(
        "afd",
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
        ":FullCudaGraphBackend.capture_one",
        "around",
        "attention.graphs:capture_one",
        "Warm-up forwards and the capture itself are steps that the FFN ranks mirror.",
        "test_gpu_served",
        "b184fdd5d216c21f",
    ),
    Row(
        "afd",
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
        ":FullCudaGraphBackend.replay",
        "around",
        "attention.graphs:replay",
        "A replay runs no Python in the model, so the plan is sent here.",
        "test_gpu_served",
        "fd812b9784f165dc",
    ),
    Row(
        "afd",
        "sglang.srt.model_executor.runner.base_runner:BaseRunner._dummy_run",
        "around",
        "attention.graphs:dummy_run",
        "Kernel autotuning runs forwards outside any batch.",
        "test_gpu_served",
        "60c1455b3a90877f",
    ),
    Row(
        "afd",
        "sglang.srt.model_executor.forward_batch_info:enable_num_token_non_padded",
        "around",
        "attention.graphs:mask_padding",
        "With one attention rank upstream would send padding rows to experts.",
        "test_gpu_served",
        "f0f0afec7ea1809b",
    ),
    Row(
        "afd",
        "sglang.srt.model_executor.model_runner:ModelRunner.forward",
        "after",
        "attention.runtime:after_forward",
        "A watch on each step ends a rank whose GPU waits for a lost peer.",
        "test_watch",
        "110f3b02b09b0af2",
    ),
    Row(
        "afd",
        "sglang.srt.managers.scheduler:Scheduler.get_internal_state",
        "after",
        "attention.runtime:after_internal_state",
        "/server_info shows both pools.",
        "test_served",
        "91851662bc4609fd",
    ),
    Row(
        "afd",
        "sglang.srt.managers.scheduler_components.profiler_manager"
        ":SchedulerProfilerManager._start_profile",
        "after",
        "attention.profiling:after_start",
        "A profile records the steps of FFN ranks too.",
        "served/test_metrics",
        "87f7a75c577aa058",
    ),
    Row(
        "afd",
        "sglang.srt.managers.scheduler_components.profiler_manager"
        ":SchedulerProfilerManager._stop_profile",
        "after",
        "attention.profiling:after_stop",
        "All ranks write what they recorded, for one trace.",
        "served/test_metrics",
        "c62f6ddc22be88de",
    ),
    Row(
        "afd",
        "sglang.srt.managers.scheduler:Scheduler.__init__",
        "around",
        "sharing:init_scheduler",
        "Tests put several ranks on one GPU.",
        "gpu/test_topologies_gpu",
        "991355af71d8861b",
    ),
    Row(
        "afd",
        "sglang.srt.managers.scheduler:Scheduler.run_event_loop",
        "around",
        "attention.runtime:run_event_loop",
        "What a scheduler failed of reaches its clients.",
        "served/test_loss",
        "acb21c1a968355e7",
    ),
    Row(
        "afd",
        "sglang.srt.managers.scheduler:Scheduler.release_host_resources",
        "before",
        "attention.runtime:before_release",
        "A graceful end tells the FFN ranks to stop.",
        "test_roles",
        "a3663bfe54967099",
    ),
    Row(
        "cpu",
        "sglang.srt.distributed.parallel_state:GroupCoordinator.__init__",
        "around",
        "cpu:without_nccl",
        "Upstream builds NCCL communicators for CPU groups of more than one rank.",
        "test_served (2A1F)",
        "03ba3c797672f522",
    ),
    Row(
        "cpu",
        "sglang.srt.distributed.parallel_state:GroupCoordinator.all_gather_into_tensor",
        "around",
        "cpu:all_gather",
        "Its custom op is registered for CUDA only.",
        "test_served (2A1F)",
        "bdef29a7aa66691f",
    ),
    Row(
        "cpu",
        "sglang.srt.distributed.parallel_state:GroupCoordinator.reduce_scatter_tensor",
        "around",
        "cpu:reduce_scatter",
        "Its custom op is registered for CUDA only.",
        "test_served (2A1F)",
        "465c96ecf1a6a3a7",
    ),
    Row(
        "cpu",
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.prepare_mlp_sync_batch",
        "around",
        "cpu:without_pinning",
        "It asks for pinned memory, which needs an accelerator.",
        "test_served (2A1F)",
        "ab51259e5e4bafbb",
    ),
    Row(
        "cpu",
        "sglang.srt.layers.attention.base_attn_backend"
        ":AttentionBackend.get_cuda_graph_seq_len_fill_value",
        "replace",
        "cpu:seq_len_fill_value",
        "Padding a DP-attention batch needs it, and the torch_native backend does not define it.",
        "test_served (2A1F)",
        "f7efe5e1ce080f78",
    ),
    Row(
        "cpu",
        "sglang.kernels.ops.memory.memcpy_triton:memcpy_triton",
        "replace",
        "cpu:memcpy",
        "A Triton kernel cannot run on CPU.",
        "test_served (2A1F)",
        "d6398dd2bae4e16d",
    ),
    Row(
        "cpu",
        "sglang.srt.constrained.xgrammar_backend:_allocate_token_bitmask",
        "replace",
        "cpu:token_bitmask",
        "It asks for pinned memory, which needs an accelerator.",
        "test_api (grammars)",
        "81fb7f0147c62f5c",
    ),
    Row(
        "cpu",
        "sglang.srt.constrained.xgrammar_backend:XGrammarGrammar.apply_vocab_mask",
        "replace",
        "cpu:apply_token_bitmask",
        "It knows GPUs only, although the grammar library has a CPU kernel.",
        "test_api (grammars)",
        "59743e0a87a1cf57",
    ),
    Row(
        "cpu",
        "sglang.srt.managers.data_parallel_controller:DataParallelController.event_loop",
        "replace",
        "cpu:controller_loop",
        "It polls without a pause, and a machine without a GPU has no core to spare.",
        "matrix/test_equality (time limit)",
        "bc008a8481258e79",
    ),
    Row(
        "cpu",
        "sglang.srt.layers.moe.topk:select_experts",
        "around",
        "cpu:select_experts",
        "The native top-k asserts that there are no padding rows.",
        "test_served (2A1F)",
        "3be2b086712e236c",
    ),
    Row(
        "cpu",
        "sglang.srt.layers.rotary_embedding.factory:get_rope_wrapper",
        "around",
        "cpu_models:rope",
        "For device cpu it knows YaRN of DeepSeek only, and models without scaling ask it too.",
        "models/test_families (deepseek_v2)",
        "59a0a4b3c8b90d54",
    ),
    Row(
        "cpu",
        "sglang.srt.models.minimax_m2:rms_sumsq_serial",
        "replace",
        "cpu_models:sum_of_squares",
        "It asserts CUDA tensors.",
        "models/test_families (minimax_m2)",
        "70642bcae41ae22a",
    ),
    Row(
        "cpu",
        "sglang.srt.models.minimax_m2:rms_apply_serial",
        "replace",
        "cpu_models:apply_rms",
        "It asserts CUDA tensors.",
        "models/test_families (minimax_m2)",
        "c90a3e4463417365",
    ),
    Row(
        "cpu",
        "sglang.srt.runtime_context:RuntimeContext.get_stream",
        "around",
        "cpu_models:stream",
        "Some models ask for a CUDA stream on every device.",
        "models/test_families (longcat_flash, grok, kimi_linear)",
        "a657a5804000eba8",
    ),
    Row(
        "cpu",
        "sglang.kernels.ops.attention.fla.layernorm_gated:_get_sm_count",
        "replace",
        "cpu_models:one_processor",
        "It asks CUDA, also where Triton is interpreted on a CPU.",
        "models/test_families (bailing_moe_linear)",
        "04ebbc34a12796a8",
    ),
    Row(
        "cpu",
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend",
        "after",
        "cpu_models:flat_output",
        "It returns the query's shape, which some models have by head.",
        "models/test_families (hunyuan)",
        "9d94d3cc90d249c5",
    ),
    Row(
        "cpu",
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_decode",
        "after",
        "cpu_models:flat_output_decode",
        "It returns the query's shape, which some models have by head.",
        "models/test_families (hunyuan)",
        "057e1386b8475474",
    ),
    Row(
        "cpu",
        "sglang.kernels.ops.attention.fla.layernorm_gated:RMSNorm.forward",
        "around",
        "cpu_models:gated_norm",
        "Its Triton kernel asks for the number of streaming multiprocessors.",
        "models/test_families (qwen3_5_moe)",
        "ab7854fc759a8dba",
    ),
    Row(
        "cpu",
        "sglang.kernels.ops.attention.fla.fused_norm_gate:FusedRMSNormGated.forward",
        "around",
        "cpu_models:fused_gated_norm",
        "Its Triton kernel cannot run on CPU.",
        "models/test_families (qwen3_next)",
        "7d7183a542a90cd8",
    ),
    Row(
        "cpu",
        "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod.apply",
        "around",
        "cpu_models:experts",
        "It knows SiLU experts only, and no router weights on inputs.",
        "models/test_families (gemma4, llama4, nemotron_h)",
        "efb3cf6c2490aa20",
    ),
)

_in_force: set[str] = set()


def apply(group: str = "afd") -> None:
    """Put the rows of `group` in force: at once where the target's module is imported, else when
    it will be. A second call does nothing.

    Raises:
        PatchError: names the target and what is wrong with it. For a module that is imported
            later, that import raises it.
    """
    if group in _in_force:
        return
    _in_force.add(group)
    _check_version()
    modules: dict[str, list[Row]] = {}
    for row in ROWS:
        if row.group == group:
            modules.setdefault(row.target.partition(":")[0], []).append(row)
    for module, rows in modules.items():
        after_import(module, partial(_hook, rows))


def verify(hooks: str) -> None:
    """Raise unless every row whose hook starts with `hooks` (a file below this package) is in
    force. Imports their targets.

    Raises:
        PatchError
    """
    for row in ROWS:
        if row.hook.startswith(hooks):
            pkgutil.resolve_name(row.target.partition(":")[0])
            _check_in_force(row)


def _hook(rows: list[Row], _module: ModuleType) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    for row in rows:
        found = source_hash(row.target)
        if found != row.source_hash:
            raise PatchError(
                f"{row.target} is not what sglang-afd was written for (source {found}, expected "
                f"{row.source_hash}); reinstall sglang=={UPSTREAM_VERSION}, or uninstall the "
                "plugin that changed it"
            )
        hook = pkgutil.resolve_name(_HERE + row.hook)
        source = HookSource("afd", "sglang-afd")
        HookRegistry.register(_dotted(row), hook, HookType(row.kind), source=source)
    HookRegistry.apply_hooks()
    for row in rows:
        _check_in_force(row)


def _check_in_force(row: Row) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    if _dotted(row) not in HookRegistry._patched:
        raise PatchError(f"the hook on {row.target} is not in force; see the error logged above")


def _check_version() -> None:
    found = version("sglang")
    if found != UPSTREAM_VERSION:
        raise PatchError(
            f"sglang {found} is installed and sglang-afd hooks {UPSTREAM_VERSION}; "
            f"run: pip install sglang=={UPSTREAM_VERSION}"
        )


def source_hash(target: str) -> str:
    """First 16 hex digits of SHA-256 over the source of upstream's function.

    Raises:
        PatchError: upstream has no such function.
    """
    try:
        source = inspect.getsource(inspect.unwrap(pkgutil.resolve_name(target)))
    except (ImportError, AttributeError, OSError, TypeError) as error:
        raise PatchError(
            f"{target} does not exist in the installed sglang ({error}); "
            f"install sglang=={UPSTREAM_VERSION}"
        ) from error
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _dotted(row: Row) -> str:
    return row.target.replace(":", ".")
