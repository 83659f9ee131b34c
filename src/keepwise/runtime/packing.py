"""A lossless smaller form of tensors that hold two values: dropout masks, one bit an element.

A mask costs a draw an element to make again (on the CPU several times what reading it costs), and 4 bytes an element to keep as
floats. Its bits are small enough to keep and cheap to expand. Values are compared as bit patterns, so that signed zeros and NaNs
come back as they were. What does not hold exactly two values has no such form.
"""

from __future__ import annotations

import time

import numpy as np
import torch

Tensor = torch.Tensor
Bits = tuple[Tensor, Tensor]
"""One bit an element, and the two values as integers of the element's size."""

MIN_BYTES = 1 << 12
"""Tensors smaller than this are not worth a packed form."""
_SAMPLE = 1 << 14
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD, _SELECT = 0x0101010101010101, 0x8040201008040201 - (1 << 64)
_GATHER = 0x0102040810204080


def pack(t: Tensor) -> Bits | None:
    """The packed form of the storage that `t` fills; None where it has none (no two values, or `t` is not all of its storage)."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        flat = _flat(t)
        if flat is None:
            return None
        low = flat[0]
        differs = flat.ne(low)
        at = int(differs[:_SAMPLE].view(torch.uint8).argmax()) or int(differs.view(torch.uint8).argmax())
        if not at:
            return None
        high = flat[at]
        if not torch.equal(differs[:_SAMPLE], flat[:_SAMPLE].eq(high)) or not torch.equal(differs, flat.eq(high)):
            return None
        return _to_bits(differs), torch.stack((low, high))


def unpack(
    bits: Tensor, pair: Tensor, numel: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """What `pack` packed, on a storage of its own: `numel` elements of `dtype`, seen with `shape` and `stride`."""
    flat = torch.where(_from_bits(bits, numel), pair[1], pair[0])
    return flat.view(dtype).as_strided(shape, stride, 0)


def packed_price(t: Tensor) -> tuple[int, float] | None:
    """Bytes of the packed form, and seconds to pack and unpack; None where there is none."""
    if t.nbytes < MIN_BYTES:
        return None
    best, size = float("inf"), 0
    for _ in range(2):  # the first run finds nothing warm
        began = time.perf_counter()
        bits = pack(t)
        if bits is None:
            return None
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            unpack(*bits, t.untyped_storage().nbytes() // t.element_size(), t.shape, t.stride(), t.dtype)
        best, size = min(best, time.perf_counter() - began), bits[0].nbytes + bits[1].nbytes
    return size, best


def _flat(t: Tensor) -> Tensor | None:
    """All elements of the storage as integers of their size."""
    integer = _INTEGERS.get(t.element_size())
    numel = t.untyped_storage().nbytes() // t.element_size()
    if integer is None or not numel or t.numel() != numel or t.storage_offset() or t.is_conj() or t.is_neg():
        return None
    return t.detach().as_strided((numel,), (1,), 0).view(integer)


def _to_bits(b: Tensor) -> Tensor:
    if b.device.type == "cpu":
        # In torch's memory, because they are held: what NumPy allocates nobody counts.
        return torch.from_numpy(np.packbits(b.numpy(), bitorder="little")).clone()
    pad = -b.numel() % 8
    if pad:
        b = torch.cat([b, b.new_zeros(pad)])
    return (b.view(torch.int64) * _GATHER).bitwise_right_shift_(56).to(torch.uint8)


def _from_bits(bits: Tensor, numel: int) -> Tensor:
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), count=numel, bitorder="little")).view(torch.bool)
    spread = bits.to(torch.int64).mul_(_SPREAD).bitwise_and_(_SELECT)
    return spread.view(torch.uint8).ne(0)[:numel]
