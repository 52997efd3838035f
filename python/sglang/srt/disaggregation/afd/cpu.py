"""What upstream's PyPI wheels lack on a machine without an accelerator.

`bootstrap` runs before the rest of sglang is imported, `prepare_server_args` when arguments are
resolved; the hooks at the end are rows of `patches.py`. None of it is active where a GPU is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from sglang.srt.disaggregation.afd import cpu_models, envs
from sglang.srt.disaggregation.afd.imports import after_import

if TYPE_CHECKING:
    from sglang.srt.disaggregation.afd.server_args import AFDServerArgs

_KERNELS = "sgl_kernel"
_WITH_CPU_KERNELS = "mamba"  # its submodule from which CPU code paths import
_CONTROLLER_POLL_MS = 1000

_torch_library: Any = None  # what it registers goes when it goes


def is_cpu_only() -> bool:
    """True where PyTorch sees no accelerator at all."""
    if torch.cuda.is_available() or torch.xpu.is_available():
        return False
    return importlib.util.find_spec("torch_npu") is None


class _AbsentKernels(types.ModuleType):
    """Stands for `sgl_kernel`, which cannot be imported without libcuda.

    Upstream imports names from it at module level and calls none of them on this path. A call
    raises, so a missing kernel is an error with a name and never a wrong number.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_args: object, **_kwargs: object) -> None:
            raise RuntimeError(
                f"sgl_kernel.{name} needs a GPU, and this machine has none; "
                "this model or option cannot run on CPU with the PyPI wheels"
            )

        return absent


def bootstrap() -> None:
    """Make `import sglang` work without libcuda, and select upstream's CPU engine."""
    envs.set_default(envs.USE_CPU_ENGINE, "1")
    _complete_torch()
    after_import("sglang.srt.models.registry", cpu_models.lend_vllm)
    after_import(
        "sglang.srt.layers.attention.linear.kernels.kda_triton", cpu_models.kimi_delta_attention
    )
    after_import("sglang.srt.layers.attention.mamba.mamba", cpu_models.mamba_convolution)
    if _KERNELS in sys.modules:
        return
    try:
        importlib.import_module(_KERNELS)
    except (ImportError, OSError):
        for name in [n for n in sys.modules if n.partition(".")[0] == _KERNELS]:
            del sys.modules[name]
        for name in (_KERNELS, f"{_KERNELS}.{_WITH_CPU_KERNELS}"):
            stub = _AbsentKernels(name)
            stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = stub
        sys.modules[_KERNELS].__path__ = []
        _lend_kernels()


def _mm_with_dtype(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Product in the output's dtype; PyTorch has this form of `mm` for CUDA only."""
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


def _complete_torch() -> None:
    """Give PyTorch's CPU device what its CUDA device has and upstream's models use."""
    global _torch_library
    if _torch_library is not None:
        return
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = contextlib.nullcontext
    _torch_library = torch.library.Library("aten", "IMPL")
    _torch_library.impl("mm.dtype", _mm_with_dtype, "CPU")


def _lend_kernels() -> None:
    """Put our plain torch kernels where upstream's models look for CPU builds of theirs."""
    from sglang.srt.disaggregation.afd.cpu_kernels import KERNELS

    module = sys.modules[f"{_KERNELS}.{_WITH_CPU_KERNELS}"]
    for name, function in KERNELS.items():
        setattr(module, name, function)
        setattr(getattr(torch.ops, _KERNELS), name, function)


def has_cpu_kernels() -> bool:
    """True if a CPU build of sgl_kernel (Intel AMX) is installed."""
    return not isinstance(sys.modules.get(_KERNELS), _AbsentKernels)


def prepare_server_args(args: AFDServerArgs) -> None:
    """Defaults that let upstream start on a plain CPU: attention backend and core binding."""
    if not is_cpu_only() or args.device not in (None, "cpu"):
        return
    if not has_cpu_kernels() and args.attention_backend is None:
        args.attention_backend = "torch_native"
    # The ranks of one host take turns; OpenMP threads that spin between them take the turn away.
    envs.set_default(envs.OMP_WAIT_POLICY, "PASSIVE")
    if args.tp_size > 1:
        envs.set_default(envs.CPU_THREADS_BIND, bind_cores(envs.usable_cores(), args.tp_size))


def bind_cores(cores: list[int], ranks: int) -> str:
    """Upstream's notation for giving each of `ranks` processes its share of `cores`.

    With fewer cores than ranks, ranks share: `bind_cores([0, 1], 3) == "0|1|0"`.
    """
    share = max(1, len(cores) // ranks)
    parts = []
    for rank in range(ranks):
        first = rank * share % len(cores)
        parts.append(",".join(str(core) for core in cores[first : first + share]))
    return "|".join(parts)


# --- hooks, see patches.py ---------------------------------------------------------------------


def without_nccl(orig: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `GroupCoordinator.__init__`: no communicator that needs a GPU."""
    bound = inspect.signature(orig).bind(self, *args, **kwargs)
    bound.arguments.update(
        use_pynccl=False,
        use_pymscclpp=False,
        use_custom_allreduce=False,
        use_torch_symm_mem_all_reduce=False,
    )
    orig(*bound.args, **bound.kwargs)


def all_gather(orig: Any, self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """AROUND `GroupCoordinator.all_gather_into_tensor`: the custom op has a CUDA kernel only."""
    self._all_gather_into_tensor(output, input)


def reduce_scatter(orig: Any, self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """AROUND `GroupCoordinator.reduce_scatter_tensor`: the custom op has a CUDA kernel only."""
    self._reduce_scatter_tensor(output, input)


class _NoPinnedMemory(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def without_pinning(orig: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `ForwardBatch.prepare_mlp_sync_batch`: it asks for pinned memory unconditionally."""
    with _NoPinnedMemory():
        return orig(self, *args, **kwargs)


def seq_len_fill_value(self: Any) -> int:
    """REPLACE on the attention backends that do not define it: pad with sequences of length 1."""
    return 1


def memcpy(
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    sz: torch.Tensor,
    offset_src: bool,
) -> None:
    """REPLACE `memcpy_triton`: copy `sz` rows, from or to row `offset`."""
    assert dim == 0, dim
    first, count = int(offset), int(sz)
    if offset_src:
        dst[:count].copy_(src[first : first + count])
    else:
        dst[first : first + count].copy_(src[:count])


def select_experts(orig: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `select_experts`: the native top-k cannot mask padding rows itself, takes no bias that a
    checkpoint holds as [1, E], and without groups does not scale the weights."""
    num_real = kwargs.pop("num_token_non_padded", None)
    config = kwargs.get("topk_config")
    scale = None
    if config is not None:
        changes: dict[str, Any] = {}
        if config.correction_bias is not None:
            changes["correction_bias"] = config.correction_bias.flatten()
        if config.apply_routed_scaling_factor_on_output and not config.use_grouped_topk:
            changes["apply_routed_scaling_factor_on_output"] = False
            scale = config.routed_scaling_factor
        kwargs["topk_config"] = dataclasses.replace(config, **changes)
    output = orig(*args, **kwargs)
    if scale is not None:
        output = output._replace(topk_weights=output.topk_weights * scale)
    if num_real is not None:
        output.topk_ids[int(num_real) :] = -1
    return output


def token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """REPLACE `_allocate_token_bitmask`: all tokens allowed, [B, V / 32], not pinned."""
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)


def apply_token_bitmask(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """REPLACE `XGrammarGrammar.apply_vocab_mask`: -inf for forbidden tokens, logits [B, V]."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def controller_loop(self: Any) -> None:
    """REPLACE `DataParallelController.event_loop`: it reads its socket without a pause, which keeps
    a core busy that the ranks need."""
    from sglang.srt.managers.data_parallel_controller import sock_recv

    while True:
        self.soft_watchdog.feed()
        if self.recv_from_tokenizer.poll(_CONTROLLER_POLL_MS):
            self._request_dispatcher(sock_recv(self.recv_from_tokenizer))
