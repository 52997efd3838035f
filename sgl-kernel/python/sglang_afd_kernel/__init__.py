"""Dispatch and combine between attention and FFN ranks, one-sided over NVLink.

`ends` is the interface; `build` makes or finds the shared library; `abi` holds its structs.
"""
