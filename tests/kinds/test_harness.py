"""The programs and the harness themselves: no false alarm, and no fault missed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from .compare import difference, frozen, tensor_difference
from .harness import InertPlan, check, evidence, inert_fit, programs, stock_fit
from .parts import Block, Stack
from .program import Collection, Program, case

BY_ID = {program.id: program for program in programs()}


def test_every_kind_has_at_least_three_programs() -> None:
    kinds = [program.kind for program in programs()]
    assert {kind: kinds.count(kind) for kind in kinds if kinds.count(kind) < 3} == {}
    assert len(BY_ID) == len(kinds)


def _marked(program: Program) -> Any:
    return pytest.param(program, id=program.id, marks=[pytest.mark.slow] if program.slow else [])


@pytest.mark.parametrize("program", [_marked(program) for program in programs()])
def test_plain_repeats_and_shows_its_effect(program: Program) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert evidence(program) == []
        assert check(program, fit=inert_fit) == []


# What checkpointing a model with torch's own tool is known to get wrong.
WRONG_UNDER_STOCK = {
    "randomness-own_generators": "gradient of",
    "randomness-rrelu_last": "gradient of",
    "randomness-one_equal_layer_skipped": "gradient of",
    "mutation-batch_norm_statistics": "running_mean",
    "mutation-moving_mean": "mean",
    "mutation-weights_edited_before_backward": "plain raised RuntimeError",
    "mutation-saved_activation_edited": "plain raised RuntimeError",
    "structure-counter_and_auxiliary_losses": "steps",
    "modes-function_mode": "gradient of",
    "precision-default_dtype_double": "gradient of",
    "differing_steps-random_numbers": "gradient of",
    "differing_steps-copy_of_planned_model": "loss",
}


@pytest.mark.parametrize("name", WRONG_UNDER_STOCK)
def test_the_harness_finds_the_faults_of_whole_model_checkpointing(name: str) -> None:
    found = check(BY_ID[name], fit=stock_fit)
    assert any(WRONG_UNDER_STOCK[name] in text for text in found), found


@pytest.mark.parametrize("name", ["randomness-dropout_module", "structure-long_skips", "autograd-forces"])
def test_the_harness_passes_what_checkpointing_gets_right(name: str) -> None:
    assert check(BY_ID[name], fit=stock_fit) == []


PLANTED = Collection("planted")


@PLANTED.add("a stack")
def _stack() -> Any:
    return case(Stack(), torch.randn(4, 8))


def _edited_fit(edit: Any) -> Any:
    def fit(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        edit(model)
        return InertPlan()

    return fit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda m: torch.rand(1), "generators: torch"),
        (lambda m: m.inp.weight.data.mul_(1 + 1e-6), "tensors: inp.weight"),
        (lambda m: m.inp.weight.requires_grad_(False), "requires_grad: inp.weight"),
        (lambda m: m.eval(), "training"),
        (lambda m: setattr(m.inp.weight, "grad", torch.zeros(8, 8)), "gradients: inp.weight"),
    ],
)
def test_a_fit_that_leaves_traces_is_found(edit: Any, said: str) -> None:
    found = check(_stack, fit=_edited_fit(edit))
    assert any("after fit" in text and said in text for text in found), found


class _Faulty(InertPlan):
    """Changes the last bit of one gradient of the second step."""

    def apply(self, model: Any) -> None:
        seen: list[int] = []

        def hook(grad: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return grad if len(seen) != 2 else torch.nextafter(grad, grad + 1)

        model.blocks[1].up.bias.register_hook(hook)


def test_one_bit_of_one_gradient_in_the_second_step_is_found() -> None:
    found = check(_stack, fit=lambda *args, **kwargs: _Faulty())
    assert any("applied, step 1: gradient of blocks.1.up.bias" in text for text in found), found
    assert not any("step 0" in text for text in found)


def test_a_plan_that_drops_nothing_is_found() -> None:
    class Nothing(InertPlan):
        dropped_bytes = 0

    assert check(_stack, fit=lambda *args, **kwargs: Nothing()) == ["the stress plan drops nothing"]


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), "0 of 1"),
        (torch.ones(2, 3), torch.ones(3, 2).t(), "strides"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float64"),
        (torch.ones(2), torch.ones(3), "shape"),
        (torch.ones(2), nn.Parameter(torch.ones(2)), "Parameter"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2"),
        (torch.eye(2).to_sparse(), (torch.eye(2) * 2).to_sparse(), "values"),
        ([1, torch.ones(1)], [1, torch.zeros(1)], "[1]"),
        ({"a": 1}, {"b": 1}, "gone"),
    ],
)
def test_values_that_differ(a: Any, b: Any, said: str) -> None:
    assert said in (difference(a, b) or "")
    assert difference(a, frozen(a)) is None


def test_nan_equals_the_same_nan() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert tensor_difference(nan, nan.clone()) is None


def test_parts_are_residual_blocks() -> None:
    block = Block()
    x = torch.randn(2, 8)
    assert torch.equal(block(x), x + block.down(torch.tanh(block.up(x))))
