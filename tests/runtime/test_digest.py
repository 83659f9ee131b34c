"""Digests of tensors' bits."""

from __future__ import annotations

import pytest
import torch

from keepwise.runtime import digest as digests
from keepwise.runtime.digest import bytes_of, digest, strong_digest


@pytest.mark.parametrize("how", [digest, strong_digest])
def test_equal_elements_have_equal_digests_whatever_the_strides(how: object) -> None:
    assert callable(how)
    x = torch.randn(5, 7)
    same = [x.clone(), x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0], x.expand(2, 5, 7)[1]]
    assert {how(t) for t in same} == {how(x)}
    one = torch.randn(1)
    assert how(one) == how(torch.cat([one, torch.randn(20)]).as_strided((1,), (11,)))
    assert how(torch._efficientzerotensor((3, 4), dtype=torch.float32)) == how(torch.zeros(3, 4))
    z = torch.randn(3, dtype=torch.complex64)
    assert how(z.conj()) == how(z.conj().resolve_conj())
    assert how(z.conj().imag) == how(z.conj().imag.resolve_neg())


@pytest.mark.parametrize("how", [digest, strong_digest])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64])
def test_any_flipped_bit_place_shape_or_dtype_changes_it(how: object, dtype: torch.dtype) -> None:
    assert callable(how)
    torch.manual_seed(0)
    for size in (1, 3, 8, 1000, 70001):
        x = torch.randint(0, 2, (size,)).to(dtype)
        seen = {how(x), how(x.unsqueeze(0))}
        assert len(seen) == 2
        for place in {0, size // 2, size - 1}:
            raw = bytes_of(x).clone()
            raw[place * dtype.itemsize] ^= 1
            assert how(raw.view(dtype)) not in seen
    square = torch.randn(64, 64)
    assert how(square) != how(square.t().contiguous())
    assert how(square) != how(square.roll(1, 0))
    assert how(torch.tensor(0.0)) != how(torch.tensor(-0.0))
    assert how(torch.zeros(0)) != how(torch.zeros(0, dtype=torch.int32))


def test_the_mix_is_what_it_says() -> None:
    """Against whole numbers of Python, a misaligned beginning and a short last row included."""
    columns = [int(c) % 2**64 for c in digests._columns(torch.device("cpu"))]
    assert all(c % 2 for c in columns)
    for start, size in ((0, 8192), (3, 8192 + 8), (8, 3 * 8192 + 5), (0, 7)):
        flat = torch.randint(0, 256, (start + size,), dtype=torch.uint8)[start:]
        raw = bytes(flat.tolist()) + bytes(-size % 8192)
        total = 0
        for row in range(len(raw) // 8192):
            words = [int.from_bytes(raw[8192 * row + 8 * j :][:8], "little") for j in range(1024)]
            place = ((row * -7046029254386353131) % 2**64) ^ (row << 17) | 1
            total += sum(w * c for w, c in zip(words, columns, strict=True)) * place
        assert digests._mix(flat) == total % 2**64
