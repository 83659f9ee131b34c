"""`KeepwiseCallback` for Lightning: what it plans, when, what it says, and what it leaves behind."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import keepwise
from keepwise._errors import UsageError

pl = pytest.importorskip("lightning.pytorch")

from keepwise.integrations.lightning import KeepwiseCallback  # noqa: E402

from .test_recipes import same  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Lightning's use of torch
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

LENGTHS = (24, 16, 40, 29, 35, 18)


class Module(pl.LightningModule):
    def __init__(self, *, as_dict: bool = False) -> None:
        super().__init__()
        blocks = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(2)]
        self.network = nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50))
        self.as_dict = as_dict
        self.losses: list[float] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(ids)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, targets = (batch["ids"], batch["targets"]) if isinstance(batch, dict) else batch
        loss = nn.functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
        self.log("train", loss, on_step=True, on_epoch=True)
        self.log_dict({"position": float(batch_idx)}, on_epoch=True)
        self.losses.append(loss.item())
        return {"loss": loss, "ids": ids} if self.as_dict else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, targets = batch
        self.log("validation", nn.functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def batches(lengths: Sequence[int], *, as_dict: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 50, (4, n), generator=generator) for n in lengths]
    return [{"ids": x, "targets": x.roll(1, 1)} if as_dict else (x, x.roll(1, 1)) for x in ids]


def train(
    callback: Any, lengths: Sequence[int] = LENGTHS, *, as_dict: bool = False, rounds: int = 1, **options: Any
) -> tuple[Module, dict[str, float]]:
    pl.seed_everything(0, verbose=False)
    model = Module(as_dict=as_dict)
    metrics: dict[str, float] = {}
    for _ in range(rounds):
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback] if callback is not None else [],
            **{"devices": 1, **options},
        )
        trainer.fit(
            model,
            torch.utils.data.DataLoader(batches(lengths, as_dict=as_dict), batch_size=None),
            torch.utils.data.DataLoader(batches((20,)), batch_size=None),
        )
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return model, metrics


def assert_same(a: tuple[Module, dict[str, float]], b: tuple[Module, dict[str, float]]) -> None:
    assert len(set(a[0].losses)) >= 6
    assert a[0].losses == b[0].losses
    assert a[1] == b[1]
    assert {"train_epoch", "position", "validation"} <= a[1].keys()
    assert same(a[0].state_dict(), b[0].state_dict())


@pytest.mark.filterwarnings("ignore:keepwise.*needs about")
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"accumulate_grad_batches": 2, "as_dict": True},
        {"gradient_clip_val": 0.1, "rounds": 2},
    ],
    ids=["bf16", "accumulation", "twice"],
)
def test_training_and_what_it_logs_are_the_same(options: dict[str, Any]) -> None:
    callback = KeepwiseCallback(budget="0.8x")
    planned = train(callback, **options)
    assert_same(planned, train(None, **options))
    plan = callback.plan
    assert plan is not None
    assert plan.dropped_bytes > 0
    assert plan.stats.num_saved > 0
    assert ("bfloat16" in {v.dtype for v in plan.step.values}) == ("precision" in options)
    assert not {"training_step", "log", "forward"} & planned[0].__dict__.keys()
    assert type(planned[0]) is Module


def test_a_handful_of_plans_serve_all_lengths() -> None:
    lengths = range(16, 40)
    callback = KeepwiseCallback(budget="1MiB")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="keepwise")
        planned = train(callback, lengths)
    assert_same(planned, train(None, lengths))
    assert callback.plan is not None
    assert 2 <= callback.plan.runner.chooser.num_plans <= 8  # type: ignore[union-attr]


def test_the_loss_in_training_step_is_planned_too() -> None:
    class Doubled(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx).exp().log()

    pl.seed_everything(0, verbose=False)
    model = Doubled()
    callback = KeepwiseCallback(budget="max", planner="recompute_everything", pin={"network.1": "keep"})
    trainer = pl.Trainer(
        fast_dev_run=2, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[callback]
    )
    trainer.fit(model, torch.utils.data.DataLoader(batches((24, 24)), batch_size=None))
    plan = callback.plan
    assert plan is not None
    kinds = {d.path: type(d).__name__ for d in plan.decisions}
    assert kinds[""] == "Recompute", "what training_step itself computes"
    assert {kind for path, kind in kinds.items() if path.startswith("module.network.1")} == {"Keep"}
    assert "Recompute" in {kind for path, kind in kinds.items() if path.startswith("module.network.2")}
    assert not any(d.why.startswith("saved outside") for d in plan.decisions)


def test_only_the_first_process_speaks(caplog) -> None:
    class Second(KeepwiseCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            type(trainer).is_global_zero = property(lambda _: False)
            super().on_train_start(trainer, pl_module)

    was = pl.Trainer.is_global_zero
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            callback = Second(budget="0.8x")
            train(callback, (16, 60))
        finally:
            pl.Trainer.is_global_zero = was
        assert callback.plan is not None
        assert callback.plan.stats.over_budget
        assert not [w for w in caught if "keepwise" in str(w.message)]
        assert not [r for r in caplog.records if "keepwise" in r.getMessage()]
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="keepwise: .* needs about"):
        train(KeepwiseCallback(budget="0.8x"), (16, 60))
    assert [r for r in caplog.records if r.getMessage().startswith("keepwise: ")]


def test_an_impossible_budget_leaves_the_module_as_it_was() -> None:
    pl.seed_everything(0, verbose=False)
    model = Module()
    trainer = pl.Trainer(
        fast_dev_run=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[KeepwiseCallback(budget=1000)],
    )
    with pytest.raises(keepwise.InfeasibleBudget, match="the smallest peak"):
        trainer.fit(model, torch.utils.data.DataLoader(batches((24,)), batch_size=None))
    assert not {"training_step", "log"} & model.__dict__.keys()


def test_optimization_by_hand_is_refused() -> None:
    model = Module()
    model.automatic_optimization = False
    trainer = pl.Trainer(
        fast_dev_run=1, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[KeepwiseCallback()]
    )
    with pytest.raises(UsageError, match="automatic_optimization"):
        trainer.fit(model, torch.utils.data.DataLoader(batches((24,)), batch_size=None))


def test_switched_off(monkeypatch) -> None:
    monkeypatch.setenv("KEEPWISE", "0")
    callback = KeepwiseCallback(budget=1)
    train(callback, (24,))
    assert callback.plan is None


@pytest.mark.parametrize("name", ["args", "kwargs", "step", "batches", "loss"])
def test_what_the_module_decides_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}= is not for KeepwiseCallback"):
        KeepwiseCallback(**{name: None})
