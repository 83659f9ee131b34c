"""The size of a batch beside the recorded one, guessed and learned."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from keepwise.session.sizes import Key, Sizes, growth, key_of


class Pair(NamedTuple):
    ids: torch.Tensor
    rest: list[torch.Tensor]


@dataclasses.dataclass
class Sample:
    ids: torch.Tensor
    mask: torch.Tensor | None = None


class Holder:
    def __init__(self) -> None:
        self.x = torch.zeros(2, 3)
        self.name = "x"


def tokens(batch: int, length: int, **more: tuple[int, ...]) -> Key:
    return (("ids", (batch, length)), *more.items())


@pytest.mark.parametrize(
    ("tree", "places"),
    [
        (UserDict(ids=torch.zeros(2, 3)), [("ids", (2, 3))]),
        ((Sample(torch.zeros(2)),), [("[0].ids", (2,))]),
        ((Sample(torch.zeros(2), torch.ones(3)),), [("[0].ids", (2,)), ("[0].mask", (3,))]),
        (Pair(torch.zeros(1), [torch.zeros(4), torch.zeros(5)]), [("[0]", (1,)), ("[1][0]", (4,)), ("[1][1]", (5,))]),
        ((Holder(),), [("[0].x", (2, 3))]),
        ((torch.nn.Linear(2, 2), None, "x", 3), []),
    ],
)
def test_tensors_are_found_in_any_container(tree: object, places: list[tuple[str, tuple[int, ...]]]) -> None:
    assert list(key_of(tree, {})) == places


def test_packed_and_nested() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    assert [shape for _, shape in key_of((packed,), {})][:2] == [(4, 2), (3,)]
    ragged = torch.nested.nested_tensor([torch.zeros(2, 5), torch.zeros(3, 5)], layout=torch.jagged)
    assert key_of((ragged,), {}) == (("[0]", (2, 25)),)


def test_a_mask_that_is_added_makes_a_batch_no_larger() -> None:
    assert growth(tokens(2, 8), tokens(2, 8, mask=(2, 8))).linear == 1
    assert growth(tokens(2, 8), tokens(2, 4, mask=(2, 4))).linear == 0.5


def test_labels_do_not_hide_a_shorter_sequence() -> None:
    assert growth(tokens(8, 100, labels=(8,)), tokens(4, 10, labels=(4,))).linear == pytest.approx(0.05)
    assert growth((("labels", (8,)),), (("labels", (4,)),)).linear == 0.5


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("constant", [0.0, 0.2])
def test_one_learned_shape_tells_all_others(share: float, constant: float) -> None:
    """Exact for models whose activations are a mix of two of the three terms; close between the shapes that were seen."""

    def truth(batch: int, length: int) -> float:
        b, s = batch / 8, length / 64
        return constant + (1 - constant) * b * ((1 - share) * s + share * s * s)

    sizes = Sizes(tokens(8, 64), share)
    sizes.learn(tokens(8, 32), truth(8, 32))
    for batch, length in ((8, 8), (8, 16), (8, 48), (4, 16)):
        guess, real = sizes.scale(tokens(batch, length)), truth(batch, length)
        if not (share and constant):
            assert guess == pytest.approx(real)
        elif length > 32:
            assert guess == pytest.approx(real, rel=0.05)
    assert sizes.scale(tokens(8, 32)) == truth(8, 32)
    assert sizes.scale(tokens(8, 64)) == 1


def test_unseen_shapes_err_on_the_side_of_more_memory() -> None:
    sizes = Sizes(tokens(8, 64), 0.5)
    assert sizes.scale(tokens(8, 32)) >= 0.5 * 0.5 + 0.5 * 0.25
    assert sizes.scale(tokens(8, 128)) == pytest.approx(0.5 * 2 + 0.5 * 4)
    assert sizes.scale(tokens(16, 64)) == 2


def test_an_empty_batch_teaches_nothing_about_others() -> None:
    sizes = Sizes(tokens(4, 8), 0.0)
    sizes.learn(tokens(0, 8), 1.4)
    assert sizes.scale(tokens(0, 8)) == 1.4
    assert sizes.scale(tokens(2, 8)) == 0.5
    assert sizes.scale(tokens(8, 8)) == 2.0
