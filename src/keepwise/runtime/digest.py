"""Digests of tensors' bits that depend on position.

A transpose has the same bytes in another order, so the digest mixes each word with its place before adding up. It detects
accidents (a wrong replay), not attacks.
"""

from __future__ import annotations

import zlib

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
    flat = t.contiguous().reshape(-1).view(torch.uint8)
    if t.device.type == "cpu":
        return zlib.crc32(memoryview(flat.numpy()), seed)
    return seed ^ _mix(flat)


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
