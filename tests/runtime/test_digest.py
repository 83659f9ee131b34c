"""Digests of tensors' bits."""

from __future__ import annotations

import pytest
import torch

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
