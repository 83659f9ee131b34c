"""The user's own hooks on saved tensors around a planned model, against the plain step, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import keepwise
from keepwise.runtime.foreign import Trust, Withheld, identity_of
from keepwise.runtime.guard import Guard
from keepwise.runtime.hooks import innermost_hooks

Tensor = torch.Tensor
Around = Callable[[], Any]


def _identity() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def _aliasing() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.detach(), lambda t: t.clone())


def _copying() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)


def _rounding(scale: float = 8.0) -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: (t.detach() * scale).round() / scale, lambda t: t)


def _sparing_leaves() -> saved_tensors_hooks:
    """Rounds what has a history."""
    return saved_tensors_hooks(lambda t: t if t.is_leaf else t.detach().round(decimals=1), lambda t: t)


def _whole_numbers_of_double() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.detach().double(), lambda t: t.float().contiguous())


KINDS = (_identity, _aliasing, _copying, _rounding, _sparing_leaves, _whole_numbers_of_double)


class Net(nn.Module):
    """Everything between its two layers is dropped under the stress plan; `kept` is what its user can write to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept: list[Tensor] = []
        self.keeps = self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = torch.tanh(h)
        b = torch.sin(a)
        if self.writes:
            with torch.no_grad():
                a.mul_(0.5)
        self.kept = [a.detach()] if self.keeps else []
        return self.last(b)


def _step(model: Net, around: Around, then: Callable[[Net], None] | None = None) -> list[Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with around():
        loss = model(x).square().sum()
    if then is not None:
        then(model)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _write_kept(model: Net) -> None:
    with torch.no_grad():
        for t in model.kept:
            t.mul_(0.25)


def _run_again(model: Net) -> None:
    """Another forward, whose graph is gone at once, and only then the write."""
    kept = model.kept
    model(torch.ones(4, 8)).sum().backward()
    model.zero_grad()
    model.kept = kept
    _write_kept(model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _made() -> Net:
    torch.manual_seed(0)
    return Net()


def _compared(around: Around, change: Callable[[Net], None], then: Callable[[Net], None] | None) -> list[int]:
    """Three usual steps under hooks, and one that is changed, plain and planned; how many tensors each planned one dropped."""
    plain, model = _made(), _made()
    with _quiet():
        plan = keepwise.fit(
            model, torch.ones(4, 8), loss=lambda out: out.square().sum(), planner="recompute_everything"
        )
    dropped = []
    for i in range(4):
        if i == 3:
            change(plain)
            change(model)
        with _quiet():
            got = _step(model, around, then if i == 3 else None)
        want = _step(plain, around, then if i == 3 else None)
        assert len(got) == len(want)
        assert all(map(torch.equal, got, want)), i
        dropped.append(plan.stats.num_dropped)
    return dropped


def _nothing(model: Net) -> None: ...


def _keeping(model: Net) -> None:
    model.keeps = True


def _writing(model: Net) -> None:
    model.writes = True


@pytest.mark.parametrize("around", KINDS)
@pytest.mark.parametrize(
    ("change", "then"), [(_nothing, None), (_writing, None), (_keeping, _write_kept), (_keeping, _run_again)]
)
def test_hooks_that_come_after_the_plan_was_made_see_or_do_not_miss_what_is_saved(
    around: Around, change: Callable[[Net], None], then: Callable[[Net], None] | None
) -> None:
    dropped = _compared(around, change, then)
    assert dropped[0] == 0  # nobody knows yet what the hooks give back
    if around in (_identity, _aliasing, _copying, _whole_numbers_of_double):
        assert dropped[1] > 0
    else:
        assert dropped[1:3] == [0, 0]


def _inside(model: Net, i: int, entered: dict[str, Any]) -> None:
    """Hooks that are entered in the second forward and left in the third."""
    if i == 1:
        entered["hooks"] = _rounding()
        entered["hooks"].__enter__()
    if i == 2:
        entered["hooks"].__exit__()


def _fails(t: Tensor) -> Any:
    raise ValueError("full")


def _raising(i: int) -> saved_tensors_hooks:
    return saved_tensors_hooks(_fails if i == 1 else torch.Tensor.detach, _fails if i == 2 else torch.clone)


def _of_other_form(i: int) -> saved_tensors_hooks:
    unpacks: tuple[Any, ...] = (torch.clone, torch.Tensor.double, torch.Tensor.flatten, lambda t: 3)
    return saved_tensors_hooks(torch.Tensor.detach, unpacks[i])


def _writing_pack(i: int) -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.detach().mul_(1 + i), lambda t: t)


def _nested(i: int) -> Any:
    both = contextlib.ExitStack()
    both.enter_context(_rounding())
    both.enter_context(_copying() if i < 2 else torch.autograd.graph.save_on_cpu())
    return both


def _outcome(model: Net, around: Around) -> list[Any]:
    try:
        return _step(model, around)
    except Exception as error:
        return [type(error), str(error)]


def _equal(got: list[Any], want: list[Any]) -> bool:
    pairs = list(zip(got, want, strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("kind", [_raising, _of_other_form, _writing_pack, _nested])
def test_hooks_that_change_from_step_to_step(kind: Callable[[int], Any]) -> None:
    plain, model = _made(), _made()
    with _quiet():
        keepwise.fit(model, torch.ones(4, 8), loss=lambda out: out.square().sum(), planner="recompute_everything")
        for i in range(4):
            around = functools.partial(kind, i)
            assert _equal(_outcome(model, around), _outcome(plain, around)), i


@pytest.mark.parametrize("where", [(True, True), (True, False), (False, True)])
def test_hooks_that_are_entered_in_one_forward_and_left_in_another_or_outside(where: tuple[bool, bool]) -> None:
    results = []
    for planned in (False, True):
        model, entered, step = _made(), {}, [0]

        def change(inside: bool, model: Net = model, step: list[int] = step, entered: dict[str, Any] = entered) -> None:
            if step[0] in (1, 2) and where[step[0] - 1] == inside:
                _inside(model, step[0], entered)

        with _quiet():
            if planned:
                keepwise.fit(
                    model, torch.ones(4, 8), loss=lambda out: out.square().sum(), planner="recompute_everything"
                )
            model.first.register_forward_hook(lambda *_, change=change: change(True))
            for i in range(4):
                step[0] = i
                change(False)
                results.append(_step(model, contextlib.nullcontext))
        assert innermost_hooks() is None
    assert all(_equal(a, b) for a, b in zip(results[:4], results[4:], strict=True))
    assert not torch.equal(results[1][1], results[3][1])


def test_another_precision_of_the_same_hooks_is_another_pair() -> None:
    plain, model = _made(), _made()
    with _quiet():
        plan = keepwise.fit(
            model, torch.ones(4, 8), loss=lambda out: out.square().sum(), planner="recompute_everything"
        )
        dropped = []
        for scale in (None, None, 8.0):

            def around(scale: float | None = scale) -> saved_tensors_hooks:
                return saved_tensors_hooks(
                    lambda t: t.detach() if scale is None else (t.detach() * scale).round() / scale, lambda t: t
                )

            assert all(map(torch.equal, _step(model, around), _step(plain, around)))
            dropped.append(plan.stats.num_dropped)
    assert dropped[1] > dropped[0] == dropped[2] == 0


def test_hooks_around_all_when_the_plan_was_made() -> None:
    plain, model = _made(), _made()
    x = torch.randn(4, 8)
    for around in (_copying, _rounding):
        with _quiet():
            with around():
                plan = keepwise.fit(model, x, loss=lambda out: out.square().sum(), planner="recompute_everything")
            for _ in range(2):
                assert _equal(_step(model, around), _step(plain, around))
        assert (plan.stats.num_dropped > 0) == (around is _copying)
        plan.remove()


@pytest.mark.parametrize("around", KINDS)
def test_hooks_in_the_step_that_the_plan_was_made_for_are_left_out_at_once(around: Around) -> None:
    plain, model = _made(), _made()
    with _quiet():
        plan = keepwise.fit(model, step=functools.partial(_step, model, around), planner="recompute_everything")
        for _ in range(2):
            want = _step(plain, around)
            with plan:
                got = _step(model, around)
            assert _equal(got, want)
            if around is _copying:
                assert plan.stats.num_dropped > 0
            if around in (_rounding, _sparing_leaves):
                assert plan.stats.num_dropped == 0


class _Store:
    def __init__(self, bits: int) -> None:
        self.bits = bits

    def pack(self, t: Tensor) -> Tensor:
        return t

    def __call__(self, t: Tensor) -> Tensor:
        return t


def _paired(bits: int, log: list[int]) -> Any:
    return lambda t: (log.append(bits), t)[1], _Store(bits).pack


def _known(*hooks: Any) -> str:
    return identity_of((hooks[0], hooks[1]))


def test_pairs_are_known_by_their_code_and_the_plain_values_at_hand() -> None:
    assert identity_of(_paired(8, [])) == identity_of(_paired(8, [1, 2]))
    assert identity_of(_paired(8, [])) != identity_of(_paired(4, []))
    calls = _Store(8), functools.partial(_Store.pack, _Store(8))
    assert _known(*calls) == _known(_Store(8), functools.partial(_Store.pack, _Store(8)))
    assert _known(*calls) != _known(_Store(8), functools.partial(_Store.pack, _Store(4)))
    assert _known(*calls) != _known(_Store(4), calls[1])
    assert _known(len, len) != _known(abs, len)
    nets = _made(), _made()
    nets[1].keeps = True
    first, second = (_known(lambda t, net=net: (net, t), len) for net in nets)
    assert first == second
    assert len({identity_of(_paired(8, [])), _known(*calls), _known([].append, len)}) == 3


@pytest.mark.parametrize(
    ("place", "name", "around", "change", "then"),
    [
        (Trust, "__contains__", _rounding, _nothing, None),
        (Trust, "came_back", _copying, _nothing, None),
        (Withheld, "hand_over", _copying, _writing, None),
        (Withheld, "hand_over_all", _copying, _keeping, _write_kept),
        (Guard, "_stop_watching", _aliasing, _keeping, _write_kept),
    ],
)
def test_each_part_is_missed(
    monkeypatch: pytest.MonkeyPatch,
    place: type,
    name: str,
    around: Around,
    change: Callable[[Net], None],
    then: Callable[[Net], None] | None,
) -> None:
    monkeypatch.setattr(place, name, lambda *args, **kwargs: [1] if name == "__contains__" else [])
    with pytest.raises((AssertionError, RuntimeError)):
        assert _compared(around, change, then)[2] > 0
