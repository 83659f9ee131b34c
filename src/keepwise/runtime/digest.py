"""Digests of tensors' bits that depend on position.

A transpose has the same bytes in another order, so the digest mixes each word with its place before adding up: with an odd number
for its column and one for its row, so that no change of a single word is missed. It detects accidents (a wrong replay), not attacks.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from typing import Any

import torch

from keepwise.runtime.memory import bytes_at

Tensor = torch.Tensor

_WIDTH = 1024
"""Words in a row."""
_ROWS = 1 << 12
"""Rows that are multiplied at once on a device: their products take room."""
_SMALL_BYTES = 1 << 17
"""Below, a checksum is faster than a few small ops."""


def digest(t: Tensor) -> int:
    """Digest of the elements of `t` in index order, with its shape and dtype; strides do not matter."""
    seed = zlib.crc32(repr((tuple(t.shape), t.dtype)).encode())
    if not t.numel():
        return seed
    t = t.detach()
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    flat = bytes_of(t)
    if t.device.type == "cpu" and flat.numel() < _SMALL_BYTES:
        return zlib.crc32(bytes_at(flat, flat.numel()), seed)
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
        flat = bytes_of(t).cpu()
        h.update(bytes_at(flat, flat.numel()))


def _mix(flat: Tensor) -> int:
    """Sum over 64-bit words of the word times an odd number made from its row and column, modulo 2**64."""
    if flat.storage_offset() % 8:
        flat = flat.clone()
    row = 8 * _WIDTH
    whole = flat.numel() // row * row
    total = _rows(flat[:whole].view(torch.int64).view(-1, _WIDTH), 0) if whole else 0
    if whole < flat.numel():
        rest = torch.zeros(row, dtype=torch.uint8, device=flat.device)
        rest[: flat.numel() - whole] = flat[whole:]
        total += _rows(rest.view(torch.int64).view(1, _WIDTH), whole // row)
    return total & ((1 << 64) - 1)


def _rows(words: Tensor, first: int) -> int:
    columns = _columns(words.device)
    if words.device.type == "cpu":
        sums = torch.mv(words, columns)
    else:  # which has no product of integers
        parts = [(part * columns).sum(1) for part in words.split(_ROWS)]
        sums = torch.cat(parts)
    place = torch.arange(first, first + len(sums), device=words.device, dtype=torch.int64)
    return int((sums * ((place * -7046029254386353131) ^ (place << 17) | 1)).sum().item())


@functools.cache
def _columns(device: torch.device) -> Tensor:
    """An odd number for each column."""
    mixed = [
        int.from_bytes(hashlib.blake2b(i.to_bytes(4, "little"), digest_size=8).digest(), "little")
        for i in range(_WIDTH)
    ]
    with torch.inference_mode(False):
        return torch.tensor([(m | 1) - (1 << 63) * 2 * (m >> 63) for m in mixed], dtype=torch.int64, device=device)
