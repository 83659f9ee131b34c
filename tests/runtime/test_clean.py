"""Random ops run again from a captured state, and nobody else's draws notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keepwise.runtime import clean

aten = torch.ops.aten
X = torch.linspace(0.1, 0.9, 12).view(3, 4)
DRAWS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.bernoulli.default, (X,), {}),
    (aten.multinomial.default, (X, 3), {}),
    (aten.normal.Tensor_float, (X,), {}),
    (aten.rrelu_with_noise.default, (X, torch.zeros(3, 4), 0.1, 0.3, True), {}),
    (aten.rand.default, ([3, 4],), {"dtype": torch.float64}),
    (aten.rand_like.default, (X,), {"memory_format": torch.preserve_format}),
    (aten.randn.default, ([3, 4],), {}),
    (aten.randn_like.default, (X,), {}),
    (aten.randint.default, (9, [3, 4]), {}),
    (aten.randint.low, (-9, 9, [3, 4]), {}),
    (aten.randint_like.low_dtype, (X, -9, 9), {}),
    (aten.randperm.default, (9,), {}),
]


@pytest.mark.parametrize("draw", DRAWS, ids=[str(draw[0]) for draw in DRAWS])
@pytest.mark.parametrize("own", [False, True])
def test_a_draw_is_repeated_without_the_default_generator(
    draw: Any, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may draw from it at this very moment."""
    func, args, kwargs = draw
    if not clean.takes_generator(func) and not hasattr(func.overloadpacket, "generator"):
        pytest.skip("this PyTorch has no form of it that takes a generator")
    given = {"generator": torch.Generator().manual_seed(5)} if own and clean.takes_generator(func) else {}
    torch.manual_seed(7)
    generator, is_own = clean.generator_of(func, args, given, torch.device("cpu"))
    assert generator is not None
    state = clean.RandomState(generator, own=is_own)
    with torch.random.fork_rng(devices=[]):
        original = func(*args, **kwargs, **given)
    monkeypatch.setattr(clean, "default_generator", lambda device: pytest.fail("the default generator was asked for"))
    before = torch.get_rng_state()
    again = clean.call_with_state(func, args, {**kwargs, **given}, state)
    assert torch.equal(original, again)
    assert original.dtype == again.dtype
    assert torch.equal(before, torch.get_rng_state())


def test_a_fused_draw_leaves_the_default_generator_as_it_was() -> None:
    torch.manual_seed(7)
    state = clean.RandomState(torch.default_generator, own=False)
    original = aten.native_dropout.default(X, 0.5, True)
    before = torch.get_rng_state()
    again = clean.call_with_state(aten.native_dropout.default, (X, 0.5, True), {}, state)
    assert all(torch.equal(a, b) for a, b in zip(original, again, strict=True))
    assert torch.equal(before, torch.get_rng_state())
