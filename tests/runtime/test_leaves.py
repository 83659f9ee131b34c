"""Copies of small leaves: one for all who read the same version, for as long as one of them holds it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from keepwise.runtime.geometry import SMALL_BYTES
from keepwise.runtime.leaves import LeafCopies


def memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


@pytest.mark.parametrize("num_bytes", [1, 7, 16, 1000, SMALL_BYTES])
def test_readers_of_a_version_share_a_copy_and_see_what_it_was(num_bytes: int) -> None:
    leaf = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    copies = LeafCopies()
    first, second = copies.of(leaf), copies.of(leaf[num_bytes // 2 :])
    assert memory(first) == memory(second) != memory(leaf)
    assert first.untyped_storage().nbytes() == num_bytes
    was = leaf.clone()
    leaf.add_(1)
    third = copies.of(leaf)
    assert memory(third) not in (memory(first), memory(leaf))
    for found, want in ((first, was), (second, was[num_bytes // 2 :]), (third, was + 1)):
        assert torch.equal(found, want)


def test_views_keep_their_form_and_parameters_lose_their_gradient() -> None:
    leaf = nn.Parameter(torch.randn(6, 4))
    copies = LeafCopies()
    views = [leaf, leaf.detach().t(), leaf[1:, ::2], leaf[0].expand(3, 4), leaf.detach().view(torch.int32)]
    found = [copies.of(t) for t in views]
    assert len({memory(t) for t in found}) == 1
    for t, view in zip(found, views, strict=True):
        assert torch.equal(t, view)
        assert (t.stride(), t.storage_offset(), t.dtype) == (view.stride(), view.storage_offset(), view.dtype)
        assert not t.requires_grad
    numbers = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(copies.of(numbers.conj()), numbers.conj())


@pytest.mark.parametrize("write", ["by an op", "by no op", "unseen"])
def test_a_leaf_that_was_written_is_copied_again(write: str) -> None:
    leaf = torch.zeros(5)
    copies = LeafCopies()
    before = copies.of(leaf)
    if write == "by an op":
        leaf.fill_(2.0)
    elif write == "by no op":
        leaf.numpy()[:] = 2.0
    else:
        leaf.data.fill_(2.0)
    assert copies.of(leaf).tolist() == [2.0] * 5
    assert before.tolist() == [0.0] * 5


def test_what_is_forgotten_is_not_shared() -> None:
    leaf = torch.zeros(5)
    copies = LeafCopies()
    before = copies.of(leaf)
    copies.forget(leaf.untyped_storage()._cdata)
    copies.forget(None)
    assert memory(copies.of(leaf)) != memory(before)


def test_a_copy_dies_with_its_last_reader_and_another_leaf_is_not_taken_for_it() -> None:
    leaf = torch.zeros(100)
    copies = LeafCopies()
    found = [copies.of(leaf), copies.of(leaf[3:])]
    died: list[bool] = []
    weakref.finalize(found[0].untyped_storage(), died.append, True)
    del found[0]
    gc.collect()
    assert not died
    found.clear()
    gc.collect()
    assert died
    kept = copies.of(leaf)
    key = leaf.untyped_storage()._cdata
    other = torch.zeros(100)
    copies.copies[other.untyped_storage()._cdata] = copies.copies.pop(
        key
    )  # as if the leaf had died, and this come to its place
    assert memory(copies.of(other)) != memory(kept)


def test_a_small_view_of_something_large_is_copied_alone() -> None:
    large = torch.zeros(SMALL_BYTES)
    copy = LeafCopies().of(large[:10])
    assert copy.untyped_storage().nbytes() == 40
