"""Digests of tensors' bits that depend on position.

A transpose has the same bytes in another order, so the digest mixes each word with its place before adding up. It detects
accidents (a wrong replay), not attacks.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import torch

Tensor = torch.Tensor


def digest(t: Tensor) -> int:
    """Digest of the elements of `t` in index order, with its shape and dtype; strides do not matter."""
    seed = zlib.crc32(repr((tuple(t.shape), t.dtype)).encode())
    if not t.numel():
        return seed
    t = t.detach()
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    flat = bytes_of(t)
    if t.device.type == "cpu":
        return zlib.crc32(memoryview(flat.numpy()), seed)  # pyright: ignore[reportArgumentType]
    return seed ^ _mix(flat)


def bytes_of(t: Tensor) -> Tensor:
    """The bytes of a strided tensor in index order, as one row."""
    if t._is_zerotensor():  # type: ignore[operator] - zeros without memory
        t = t.clone()
    flat = t.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a row of one element may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def strong_digest(t: Tensor) -> int:
    """64-bit digest of a tensor of any kind for proofs: bits, shape, dtype, layout; slower than `digest`."""
    h = hashlib.blake2b(digest_size=8)
    _feed(h, t.detach())
    return int.from_bytes(h.digest(), "little")


def _feed(h: Any, t: Tensor) -> None:
    h.update(repr((type(t).__name__, tuple(t.shape) if not t.is_nested else (), t.dtype, t.layout)).encode())
    if t.is_nested:
        anything: Any = t
        for part in (anything.values(), anything.offsets()) if t.layout is torch.jagged else t.unbind():
            _feed(h, part.detach())
    elif t.layout is torch.sparse_coo:
        t = t.coalesce()
        _feed(h, t.indices())
        _feed(h, t.values())
    elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (t.crow_indices(), t.col_indices(), t.values()):
            _feed(h, part)
    elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (t.ccol_indices(), t.row_indices(), t.values()):
            _feed(h, part)
    elif t.layout is not torch.strided:
        _feed(h, t.to_dense())
    elif hasattr(t, "__tensor_flatten__"):
        names, _ = t.__tensor_flatten__()  # type: ignore[operator]
        for name in names:
            _feed(h, getattr(t, name).detach())
    elif t.is_quantized:
        _feed(h, t.int_repr())
        h.update(repr(t.qscheme()).encode())
    elif t.numel():
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        h.update(memoryview(bytes_of(t).cpu().numpy()))  # pyright: ignore[reportArgumentType]


def _mix(flat: Tensor) -> int:
    """Sum over 64-bit words of the word times an odd number made from its position, modulo 2**64."""
    pad = -flat.numel() % 8
    if pad:
        flat = torch.cat([flat, flat.new_zeros(pad)])
    words = flat.view(torch.int64)
    total = 0
    chunk = 1 << 22
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        place = torch.arange(start, start + part.numel(), device=flat.device, dtype=torch.int64)
        weights = (place * -7046029254386353131) ^ (place << 17) | 1
        total += int((part * weights).sum().item())
    return total & ((1 << 64) - 1)
