"""The callbacks under DDP: two processes, each with batches and a plan of its own, train as they do without."""

from __future__ import annotations

import pytest

from .processes import run_both

TRAINER = """
import os, torch
from tests.groups import leave_group
from tests.recipes import test_trainer_callback as t

class Shuffled(t.InOrder):
    _get_train_sampler = t.transformers.Trainer._get_train_sampler

t.InOrder = Shuffled
rank = os.environ["RANK"]
callback = t.KeepwiseCallback(budget="0.7x")
options = {"folder": rank, "ddp_backend": "gloo", "bf16": True}
plain, planned = t.train(None, **options), t.train(callback, **options)
assert torch.distributed.get_world_size() == 2
t.assert_same(planned, plain) if rank == "0" else None  # The Trainer logs in the first process only.
assert t.same(planned[1].state_dict(), plain[1].state_dict())
assert callback.plan.stats.num_dropped > 0
torch.save(planned[1].state_dict(), f"result-{rank}.pt")
leave_group()
"""

LIGHTNING = """
import os, torch, warnings
from tests.groups import leave_group
warnings.simplefilter("ignore")
from tests.recipes import test_lightning_callback as t

rank = os.environ["RANK"]
lengths = [n + 3 * int(rank) for n in t.LENGTHS]
callback = t.KeepwiseCallback(budget="0.85x")
options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "precision": "bf16-mixed"}
plain, planned = t.train(None, lengths, **options), t.train(callback, lengths, **options)
assert torch.distributed.get_world_size() == 2
t.assert_same(planned, plain)
assert callback.plan.stats.num_dropped > 0
torch.save(planned[0].state_dict(), f"result-{rank}.pt")
leave_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("package", "code"), [("transformers", TRAINER), ("lightning", LIGHTNING)])
def test_two_processes(tmp_path, package: str, code: str) -> None:
    pytest.importorskip(package)
    results, said = run_both({package: code}, tmp_path)
    first, second = results[package]
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first), "the processes stay together"
    assert "keepwise" not in said[1]
