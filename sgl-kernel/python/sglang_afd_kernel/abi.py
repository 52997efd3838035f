"""The structs of `csrc/afd`, as ctypes. `check` compares their sizes with those of a build."""

from __future__ import annotations

import ctypes as c

# Of `layout.cuh`.
MAX_ATTN_RANKS = 64
MAX_FFN_RANKS = 64
MAX_TOPK = 16
MAX_EXPERTS = 1024
GROUP = 128  # values that share a scale


class Shape(c.Structure):
    _fields_ = [
        (name, c.c_int32)
        for name in (
            "attn_ranks",
            "ffn_ranks",
            "num_experts",
            "hidden",
            "topk",
            "capacity",
            "microbatches",
            "fp8",
        )
    ]


class Layout(c.Structure):
    """Offsets in bytes from the start of a microbatch's buffer, and its size."""

    _fields_ = [
        (name, c.c_uint64)
        for name in ("flags", "rows", "scales", "ids", "weights", "back", "bytes")
    ]


class State(c.Structure):
    _fields_ = [("epoch", c.c_uint32), ("failed", c.c_uint32)]


class Failure(c.Structure):
    _fields_ = [
        ("claimed", c.c_uint32),
        ("full", c.c_uint32),
        ("operation", c.c_int32),
        ("rank", c.c_int32),
        ("peer", c.c_int32),
        ("layer", c.c_int32),
        ("microbatch", c.c_int32),
        ("epoch", c.c_uint32),
        ("expected", c.c_uint32),
        ("seen", c.c_uint32),
    ]


class Rank(c.Structure):
    _fields_ = [
        ("shape", Shape),
        ("index", c.c_int32),
        ("layer", c.c_int32),
        ("microbatch", c.c_int32),
        ("reserved", c.c_int32),
        ("timeout_ns", c.c_uint64),
        ("own", c.c_void_p),
        ("state", c.c_void_p),
        ("failure", c.c_void_p),
    ]


class Dispatch(c.Structure):
    _fields_ = [
        ("rank", Rank),
        ("hidden", c.c_void_p),
        ("ids", c.c_void_p),
        ("weights", c.c_void_p),
        ("wide_ids", c.c_int32),
        ("tokens", c.c_int32),
        ("max_rows", c.c_int32),
        ("first_row", c.c_int32),
        ("peers", c.c_void_p * MAX_FFN_RANKS),
    ]


class Receive(c.Structure):
    _fields_ = [
        ("rank", Rank),
        ("num_rows", c.c_int32),
        ("room", c.c_int32),
        ("by_expert", c.c_void_p),
        ("scales", c.c_void_p),
        ("rows_per_expert", c.c_void_p),
        ("places", c.c_void_p),
    ]


class Send(c.Structure):
    _fields_ = [
        ("rank", Rank),
        ("out", c.c_void_p),
        ("places", c.c_void_p),
        ("rows_per_expert", c.c_void_p),
        ("num_experts", c.c_int32),
        ("num_rows", c.c_int32),
        ("first_rows", c.c_int32 * (MAX_ATTN_RANKS + 1)),
        ("peers", c.c_void_p * MAX_ATTN_RANKS),
    ]


class Combine(c.Structure):
    _fields_ = [
        ("rank", Rank),
        ("ids", c.c_void_p),
        ("shared", c.c_void_p),
        ("out", c.c_void_p),
        ("wide_ids", c.c_int32),
        ("tokens", c.c_int32),
    ]


STRUCTS = (Shape, Layout, Rank, State, Failure, Dispatch, Receive, Send, Combine)


def declare(library: c.CDLL) -> c.CDLL:
    """Give the functions of a build their types.

    Raises:
        RuntimeError: the build's structs have other sizes than these.
    """
    library.afd_sizes.argtypes = [c.POINTER(c.c_int64), c.c_int]
    library.afd_layout.argtypes = [c.POINTER(Shape), c.POINTER(Layout)]
    library.afd_layout.restype = None
    library.afd_error.argtypes = [c.c_int]
    library.afd_error.restype = c.c_char_p
    for name, struct in (
        ("afd_dispatch", Dispatch),
        ("afd_receive", Receive),
        ("afd_send", Send),
        ("afd_combine", Combine),
    ):
        getattr(library, name).argtypes = [c.POINTER(struct), c.c_int, c.c_void_p]
    sizes = (c.c_int64 * len(STRUCTS))()
    total = library.afd_sizes(sizes, len(STRUCTS))
    ours = [c.sizeof(struct) for struct in STRUCTS]
    if total != len(STRUCTS) or list(sizes) != ours:
        raise RuntimeError(
            f"the kernel library's structs have sizes {list(sizes)} and this package's {ours}; "
            "build it again from this package's sources"
        )
    return library
