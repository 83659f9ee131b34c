import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from keepwise import targets
from keepwise._errors import UsageError
from keepwise.integrations.stock import apply_stock, find_blocks
from keepwise.measure import allocator_peak, measure

CHECKPOINTING = ("full", "every2", "selective", "selective2")


def outcome(target, policy):
    """Loss and gradients of a step under a policy, always from the same random state."""
    target.model.zero_grad()
    torch.manual_seed(1)
    with apply_stock(target.model, policy, blocks=target.blocks):
        loss = target.step()
    return loss, {n: p.grad.clone() for n, p in target.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in targets.names() if name.endswith("-tiny")])
@pytest.mark.parametrize("policy", CHECKPOINTING)
def test_gradients_are_those_of_the_plain_step(name, policy):
    target = targets.build(name)
    loss, gradients = outcome(target, "none")
    under_policy, theirs = outcome(target, policy)
    assert torch.equal(loss, under_policy)
    assert gradients.keys() == theirs.keys()
    assert all(torch.equal(gradients[n], theirs[n]) for n in gradients)


def test_which_blocks_run_again():
    target = targets.build("mlp-tiny")
    runs = dict.fromkeys(target.blocks, 0)

    def count(path):
        def hook(*_):
            runs[path] += 1

        return hook

    for path in target.blocks:
        target.model.get_submodule(path + ".inner").register_forward_hook(count(path))
    for policy, expected in [("none", [1] * 8), ("full", [2] * 8), ("every2", [2, 1] * 4), ("selective", [2] * 8)]:
        runs.update(dict.fromkeys(runs, 0))
        outcome(target, policy)
        assert list(runs.values()) == expected


def test_more_is_kept_from_policy_to_policy():
    target = targets.build("gpt2-tiny")
    target.step()
    peaks = {}
    for policy in ("none", *CHECKPOINTING):
        with apply_stock(target.model, policy, blocks=target.blocks):
            peaks[policy] = allocator_peak(target.step)
    assert peaks["full"] < peaks["selective2"] < peaks["selective"] < peaks["none"]
    assert peaks["full"] < peaks["every2"] < peaks["none"]


def test_which_products_run_again():
    target = targets.build("gpt2-tiny")

    def flops(policy):
        with apply_stock(target.model, policy, blocks=target.blocks), FlopCounterMode(display=False) as counter:
            target.step()
        return counter.get_total_flops()

    tokens, width, layers = 2 * 32, 64, 2
    product = 2 * tokens * width * width  # From a width to the same width.
    plain = flops("none")
    assert flops("selective") == plain
    # Of the four products of a block the second and the fourth are not kept, and nobody needs the fourth one's result.
    assert flops("selective2") == plain + layers * product
    # The first three (3 x, 1 x and 4 x as wide) run again; attention does too, where the counter knows it.
    assert flops("full") >= plain + layers * 8 * product
    assert flops("every2") - plain == (flops("full") - plain) / 2


def test_batch_norm_counts_twice_under_stock_checkpointing():
    target = targets.build("resnet50-tiny")
    tracked = "resnet.encoder.stages.0.layers.0.layer.0.normalization.num_batches_tracked"
    moved = dict(target.model.named_buffers())[tracked]
    outcome(target, "full")
    assert moved.item() == 2


@pytest.mark.parametrize("policy", ["none", *CHECKPOINTING])
def test_the_model_is_as_before_afterwards(policy):
    target = targets.build("gpt2-tiny")
    block = target.model.get_submodule(target.blocks[0])
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    kept = block.forward
    before = [vars(module).get("forward") for module in target.model.modules()]
    with pytest.raises(ZeroDivisionError), apply_stock(target.model, policy, blocks=target.blocks):
        raise ZeroDivisionError
    assert [vars(module).get("forward") for module in target.model.modules()] == before
    assert block.forward is kept


@pytest.mark.parametrize("name", [name for name in targets.names() if name.endswith("-tiny") and name != "ode-tiny"])
def test_blocks_are_found_where_none_are_named(name):
    target = targets.build(name)
    found = find_blocks(target.model)
    if name.startswith(("resnet50", "convnext")):
        # Stages stand in a list too, around the blocks.
        assert all(any(path.startswith(stage + ".") for stage in found) for path in target.blocks)
    elif name == "unet-tiny":
        # The middle is in no list: that is what goes wrong for users as well.
        assert found == tuple(path for path in target.blocks if path != "middle")
    else:
        assert found == target.blocks


def test_no_blocks_are_an_error_that_says_so():
    with pytest.raises(UsageError, match="Linear has no repeated blocks"), apply_stock(nn.Linear(1, 1), "full"):
        pass
    with pytest.raises(UsageError, match=r"no module 'h\.0'"), apply_stock(nn.Linear(1, 1), "full", blocks=("h.0",)):
        pass


@pytest.mark.parametrize("policy", ["sometimes", "full:2", "compile:2", "compile:x"])
def test_a_wrong_policy(policy):
    with pytest.raises(UsageError, match=r"no stock policy|from 0 to 1"), apply_stock(nn.Linear(1, 1), policy):
        pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile_is_taken_off_again():
    import torch._functorch.config as functorch

    target = targets.build("mlp-tiny")
    budget = functorch.activation_memory_budget
    plain = target.step()
    with apply_stock(target.model, "compile:0.5"):
        compiled = target.step()
        assert target.model._compiled_call_impl is not None
    assert target.model._compiled_call_impl is None
    assert functorch.activation_memory_budget == budget
    torch.testing.assert_close(compiled, plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_keep_their_own_budget():
    target = targets.build("gpt2-tiny")
    peaks = []
    with contextlib.ExitStack() as stack:
        models = [copy.deepcopy(target.model) for _ in range(2)]
        for model, policy in zip(models, ("compile", "compile:0.1"), strict=True):
            stack.enter_context(apply_stock(model, policy))
        for model in models:

            def step(model=model):
                model(**target.kwargs).loss.backward()

            step()
            peaks.append(allocator_peak(step))
    assert peaks[1] < 0.95 * peaks[0]


def test_the_alias_is_the_same_policy():
    target = targets.build("gpt2-tiny")
    peaks = []
    for policy in ("sac", "selective"):
        with apply_stock(target.model, policy, blocks=target.blocks):
            peaks.append(measure(target.step, steps=1).peak_bytes)
    assert peaks[0] == peaks[1]
