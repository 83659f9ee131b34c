"""`KeepwiseCallback` for the Hugging Face Trainer: what it plans, when, what it says, and what it leaves behind."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keepwise
from keepwise import Status
from keepwise._errors import UsageError

transformers = pytest.importorskip("transformers")

from keepwise.integrations.transformers import MAX_REPLANS, KeepwiseCallback  # noqa: E402

from .test_recipes import same  # noqa: E402

UNEQUAL = [16 + 37 * i % 90 for i in range(64)]
"""Lengths of rows: each batch of four has another one, and padding."""


class Seen(transformers.TrainerCallback):
    """Losses and gradient norms; and, of each step, what its plan did."""

    def __init__(self, callback: KeepwiseCallback | None) -> None:
        self.callback = callback
        self.losses: list[tuple[float, float]] = []
        self.steps: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append((logs["loss"], logs["grad_norm"]))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(self.callback.plan if self.callback is not None else None)


def collate(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(
    callback: KeepwiseCallback | None,
    lengths: Sequence[int] = UNEQUAL,
    *,
    folder: Any,
    attention: str = "sdpa",
    trainer_options: dict[str, Any] | None = None,
    rounds: int = 1,
    also: Sequence[transformers.TrainerCallback] = (),
    **options: Any,
) -> tuple[Seen, Any]:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=200, n_positions=128, bos_token_id=1, eos_token_id=1
    )
    config._attn_implementation = attention
    model = transformers.GPT2LMHeadModel(config)
    rows = [torch.randint(2, 200, (n,)) for n in lengths]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **options,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings)
    seen = Seen(callback)
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=collate,
        callbacks=[seen, *([callback] if callback is not None else []), *also],
        **(trainer_options or {}),
    )
    for _ in range(rounds):
        trainer.train()
    return seen, model


def assert_same(a: tuple[Seen, Any], b: tuple[Seen, Any]) -> None:
    assert len(a[0].losses) >= 3
    assert a[0].losses == b[0].losses
    assert all(math.isfinite(x) for pair in a[0].losses for x in pair)
    assert same(a[1].state_dict(), b[1].state_dict())


@pytest.mark.parametrize(("attention", "bf16"), [("sdpa", True), ("eager", False)])
def test_training_is_the_same_and_the_plan_is_for_its_precision(tmp_path, attention: str, bf16: bool) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "bf16": bf16, "attention": attention}
    callback = KeepwiseCallback(budget="0.7x")
    planned = train(callback, **options)
    assert_same(planned, train(None, **options))
    plan = callback.plan
    assert plan is not None
    assert plan.dropped_bytes > 0
    dropped = {plan.step.values[save.value].dtype for save in plan.step.saves}
    assert ("bfloat16" in dropped) == bf16
    assert planned[0].steps[0] is None, "planned on the first batch, not before"
    assert all(step is plan for step in planned[0].steps[1:])


def test_a_handful_of_plans_serve_all_lengths(tmp_path) -> None:
    lengths = [16 + 37 * i % 97 for i in range(4 * 24)]
    options: dict[str, Any] = {"folder": tmp_path, "max_steps": 24}
    callback = KeepwiseCallback(budget="4MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = train(callback, lengths, **options)
    assert_same(planned, train(None, lengths, **options))
    shapes = {max(lengths[k : k + 4]) for k in range(0, len(lengths), 4)}
    assert len(shapes) > 12
    assert callback.plan is not None
    assert 2 <= callback.plan.runner.chooser.num_plans <= 8  # type: ignore[union-attr]
    assert callback.num_replans == 0


def test_a_batch_that_no_plan_can_hold_is_announced_once(tmp_path) -> None:
    lengths = [24, 23, 22, 21] + [90, 100, 110, 120] * 4
    options: dict[str, Any] = {"folder": tmp_path}
    callback = KeepwiseCallback(budget="0.9x")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned = train(callback, lengths, **options)
    said = [str(w.message) for w in caught if "keepwise: " in str(w.message)]
    assert len(said) == 1
    assert "needs about" in said[0]
    assert "4, 120" in said[0]
    assert callback.plan is not None
    assert callback.plan.stats.over_budget
    assert callback.plan.metrics()["keepwise/over_budget"] == 1
    assert_same(planned, train(None, lengths, **options))


def test_a_first_batch_without_padding_does_not_spoil_the_others(tmp_path) -> None:
    lengths = [48] * 4 + UNEQUAL
    options: dict[str, Any] = {"folder": tmp_path, "max_steps": 6}
    callback = KeepwiseCallback(budget="3MiB")
    planned = train(callback, lengths, **options)
    assert_same(planned, train(None, lengths, **options))
    assert callback.num_replans <= 1  # at most one, after which the padded batches are the recorded ones
    plans = planned[0].steps[1:]
    assert plans[0].budget_bytes == plans[-1].budget_bytes
    assert callback.plan is plans[-1]
    assert callback.plan.stats.num_deviations == 0
    assert callback.plan.stats.num_dropped > 0


class Switching(transformers.TrainerCallback):
    """Computes attention by other operators from a step on, or in turns."""

    def __init__(self, *after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.after:
            config = kwargs["model"].config
            kwargs["model"].set_attn_implementation("eager" if config._attn_implementation == "sdpa" else "sdpa")


@pytest.mark.filterwarnings("ignore:keepwise. this step differs")
def test_steps_that_differ_lead_to_another_plan(tmp_path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "max_steps": 8}
    callback = KeepwiseCallback(budget="max", planner="recompute_everything")
    planned = train(callback, [48] * 64, also=[Switching(2)], **options)
    assert_same(planned, train(None, [48] * 64, also=[Switching(2)], **options))
    assert callback.num_replans == 1
    plans = [id(plan) for plan in planned[0].steps]
    assert len({*plans[1:4]}) == 1, "the second plan is made in the step after the one that differed"
    assert plans[4:] == [id(callback.plan)] * 4 != plans[:4]
    assert callback.plan is not None
    assert callback.plan.stats.num_dropped > 0
    assert callback.plan.stats.num_deviations == 0


@pytest.mark.filterwarnings("ignore:keepwise. this step differs")
def test_new_plans_end_where_steps_differ_for_ever(tmp_path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "max_steps": 12}
    callback = KeepwiseCallback(budget="max", planner="recompute_everything")
    planned = train(callback, [48] * 64, also=[Switching(*range(1, 12))], **options)
    assert_same(planned, train(None, [48] * 64, also=[Switching(*range(1, 12))], **options))
    assert callback.num_replans == MAX_REPLANS


def test_accumulation(tmp_path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "gradient_accumulation_steps": 2, "max_steps": 3}
    callback = KeepwiseCallback(budget="0.7x")
    planned = train(callback, **options)
    assert_same(planned, train(None, **options))
    assert callback.plan is not None
    gradients = [s for s in callback.plan.step.storages if s.category.value == "gradient"]
    assert gradients
    assert all(s.birth < 0 for s in gradients), "they exist during the whole step"


def test_the_model_is_left_as_it_was(tmp_path) -> None:
    callback = KeepwiseCallback(budget="0.7x")
    _, model = train(callback, folder=tmp_path / "run", eval_strategy="steps", eval_steps=2, eval_on_start=True)
    assert type(model) is transformers.GPT2LMHeadModel
    assert "forward" not in model.__dict__
    model.save_pretrained(tmp_path / "model")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert same(again.state_dict(), model.state_dict())
    assert callback.plan is not None
    assert "tensors dropped" in repr(callback.plan)


def test_training_twice(tmp_path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "rounds": 2, "max_steps": 3, "bf16": True}
    callback = KeepwiseCallback(budget="0.7x")
    assert_same(train(callback, **options), train(None, **options))


def test_the_trainers_own_checkpointing_is_left_alone_and_said(tmp_path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "activation_checkpointing": True}
    callback = KeepwiseCallback(budget="max", planner="recompute_everything")
    with pytest.warns(UserWarning, match=r"activation checkpointing is on.*gradient_checkpointing=False"):
        planned = train(callback, **options)
    assert_same(planned, train(None, **options))


def test_only_the_first_process_speaks(tmp_path, caplog) -> None:
    class Second(KeepwiseCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.is_world_process_zero = False
            super().on_train_begin(args, state, control, **kwargs)

    def ours() -> list[str]:  # Not what transformers logs: other tests may have let it through.
        return [r.getMessage() for r in caplog.records if r.name.startswith("keepwise") or "keepwise" in r.getMessage()]

    lengths = [24, 23, 22, 21] + [120] * 40
    with caplog.at_level(logging.INFO, logger="keepwise"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = Second(budget="0.9x")
        train(callback, lengths, folder=tmp_path)
        assert callback.plan is not None
        assert not ours()
        assert not [w for w in caught if "keepwise" in str(w.message)]
        train(KeepwiseCallback(budget="0.9x"), lengths, folder=tmp_path)
    assert any(text.startswith("keepwise: ") for text in ours())


def test_a_copy_made_before_the_first_step_computes_with_its_own_weights() -> None:
    callback = KeepwiseCallback(budget="max")
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    arguments = SimpleNamespace(gradient_accumulation_steps=1)
    callback.on_train_begin(arguments, SimpleNamespace(is_world_process_zero=True), None, model=model)
    assert "forward" in model.__dict__
    average = copy.deepcopy(model)
    with torch.no_grad():
        for p in average.parameters():
            p.zero_()
    assert not average(x).any()
    assert callback.plan is None
    callback.on_train_end(arguments, None, None)
    assert "forward" not in model.__dict__


def test_switched_off(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KEEPWISE", "0")
    callback = KeepwiseCallback(budget=1)
    train(callback, folder=tmp_path)
    assert callback.plan is None


def test_an_impossible_budget_leaves_a_usable_model(tmp_path) -> None:
    transformers.set_seed(0)
    callback = KeepwiseCallback(budget="1MiB")
    models: list[Any] = []

    class Keep(KeepwiseCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            models.append(kwargs["model"])
            super().on_train_begin(args, state, control, **kwargs)

    with pytest.raises(keepwise.InfeasibleBudget, match="the smallest peak"):
        train(Keep(budget="0.2MiB"), folder=tmp_path)
    assert "forward" not in models[0].__dict__
    assert type(models[0]) is transformers.GPT2LMHeadModel
    callback = KeepwiseCallback(budget="0.2MiB", on_infeasible="floor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = train(callback, folder=tmp_path)
    assert callback.plan is not None
    assert callback.plan.status is Status.INFEASIBLE
    assert_same(planned, train(None, folder=tmp_path))


def test_a_loss_outside_of_the_model(tmp_path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "label_smoothing_factor": 0.1}
    with pytest.raises(UsageError, match="pass loss="):
        train(KeepwiseCallback(budget="0.8x"), **options)
    callback = KeepwiseCallback(budget="0.8x", loss=lambda output: output.logits.float().logsumexp(-1).mean())
    assert_same(train(callback, **options), train(None, **options))
    assert callback.plan is not None
    assert callback.plan.dropped_bytes > 0


@pytest.mark.parametrize("name", ["args", "kwargs", "step", "batches"])
def test_what_the_trainer_decides_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}= is not for KeepwiseCallback"):
        KeepwiseCallback(**{name: None})
