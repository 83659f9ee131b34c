import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepwise import targets
from keepwise._errors import UsageError
from keepwise.targets import data

TINY = [name for name in targets.names() if name.endswith("-tiny")]
WANTED = {
    "gpt2", "gpt2-dropout", "gpt2-eager", "llama", "llama-lora", "mixtral", "bert", "t5", "whisper", "vit", "resnet50",
    "convnext", "unet", "lstm", "ode", "mlp",
}  # fmt: skip


def test_every_target_has_a_default_and_a_tiny_size():
    assert set(targets.names()) == WANTED | {name + "-tiny" for name in WANTED}
    assert len({targets.describe(name) for name in targets.names()}) == 2 * len(WANTED)


@pytest.mark.parametrize("name", TINY)
def test_a_description_has_the_sizes_of_what_is_built(name):
    target = targets.build(name)
    assert target.description == targets.describe(name)
    shapes = [t.shape for t in (*target.args, *target.kwargs.values()) if isinstance(t, torch.Tensor)]
    numbers = {int(n) for n in re.findall(r"\d+", target.description)}
    assert shapes[0][0] in numbers
    widths = {p.shape[-1] for p in target.model.parameters()} | {len(target.blocks)}
    for said, _ in re.findall(r"width (\d+)|(?<!8) (\d+) blocks", target.description):
        assert not said or int(said) in widths


def test_names_are_known_without_a_framework():
    code = "import sys; from keepwise import targets; targets.names(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "keepwise.targets" in done.stdout.split()
    assert not {"torch", "transformers", "numpy"} & set(done.stdout.split())


@pytest.mark.parametrize("name", TINY)
def test_a_step_gives_a_loss_and_gradients(name):
    target = targets.build(name)
    loss = target.step()
    assert loss.ndim == 0
    assert math.isfinite(loss.item())
    missing = [n for n, p in target.model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    assert target.tokens
    assert target.tokens > 0


@pytest.mark.parametrize("name", TINY)
def test_the_same_bits_on_every_build_and_no_trace_in_the_global_generator(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = targets.build(name)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    second = targets.build(name)
    state = second.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in first.model.state_dict().items())
    torch.manual_seed(9)
    loss = first.step()
    torch.manual_seed(9)
    assert torch.equal(second.step(), loss)


@pytest.mark.parametrize("name", TINY)
def test_batches_differ_in_data_and_not_in_shape(name):
    target = targets.build(name)
    args, kwargs = target.batch(0)
    first = [*args, *kwargs.values()]
    assert all(torch.equal(a, b) for a, b in zip(first, [*target.args, *target.kwargs.values()], strict=True))
    args, kwargs = target.batch(3)
    other = [*args, *kwargs.values()]
    assert [t.shape for t in first] == [t.shape for t in other]
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    again = targets.build(name, step=3)
    assert all(torch.equal(a, b) for a, b in zip(other, [*again.args, *again.kwargs.values()], strict=True))


@pytest.mark.parametrize("name", TINY)
def test_blocks_are_modules_that_run_in_the_order_given(name):
    target = targets.build(name)
    modules = dict(target.model.named_modules())
    ran: list[str] = []
    for path in target.blocks:
        modules[path].register_forward_hook(lambda *_, path=path: ran.append(path))
    target.step()
    assert tuple(dict.fromkeys(ran)) == target.blocks
    assert len(target.blocks) > 1 or name == "ode-tiny"


def test_the_text_is_that_of_the_standard_library():
    first = min(Path(os.__file__).parent.glob("*.py")).read_bytes()
    batch = data.text(0, 2, 16)
    assert bytes(batch.flatten().tolist()) == first[:32]
    assert bytes(data.text(1, 2, 16).flatten().tolist()) == first[32:64]
    assert data.text(10**6, 2, 16).max() < 256


def test_masked_text_hides_what_is_to_be_guessed_and_nothing_else():
    inputs, labels = data.masked_text(0, 4, 256, mask_id=319)
    hidden = labels != -100
    plain = data.text(0, 4, 256)
    assert torch.equal(hidden, inputs == 319)
    assert torch.equal(labels[hidden], plain[hidden])
    assert torch.equal(inputs[~hidden], plain[~hidden])
    assert 0.1 < hidden.float().mean() < 0.2


def test_pictures_show_their_label():
    pixels, labels = data.pictures(0, 64, 32, classes=4)
    assert pixels.shape == (64, 3, 32, 32)
    assert len(set(labels.tolist())) == 4
    # Waves run along x for class 0 and along y for class 2: the mean difference between neighbours says which.
    across = (pixels[..., 1:] - pixels[..., :-1]).abs().mean((1, 2, 3))
    down = (pixels[:, :, 1:] - pixels[:, :, :-1]).abs().mean((1, 2, 3))
    assert (across > down)[labels == 0].all()
    assert (across < down)[labels == 2].all()


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet50-tiny", "lstm-tiny", "ode-tiny"])
def test_the_data_can_be_learned(name):
    torch.manual_seed(0)
    target = targets.build(name)
    optimizer = torch.optim.Adam(target.model.parameters(), 3e-3)
    losses = []
    for index in range(150):
        optimizer.zero_grad()
        losses.append(target.step(index).item())
        optimizer.step()
    assert sum(losses[-20:]) < 0.85 * sum(losses[:20])


def test_the_targets_of_the_published_figures_have_their_sizes():
    config = targets.build("gpt2").model.config
    sizes = (config.n_layer, config.n_embd, config.n_head, config.vocab_size, config.n_positions)
    assert sizes == (6, 768, 12, 2048, 512)
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop, config.use_cache) == (0, 0, 0, False)
    llama = targets.build("llama")
    config = llama.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (6, 768, 2048)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (12, 4, 2048)
    assert llama.kwargs["input_ids"].shape == (4, 512)
    resnet = targets.build("resnet50")
    assert list(resnet.model.config.depths) == [3, 4, 6, 3]
    assert resnet.kwargs["pixel_values"].shape == (8, 3, 160, 160)


def test_lora_trains_adapters_only():
    model = targets.build("llama-lora-tiny").model
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


@pytest.mark.parametrize(("name", "package"), [("gpt2-tiny", "transformers"), ("llama-lora-tiny", "peft")])
def test_a_missing_extra_is_named_with_its_command(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"pip install 'keepwise\[{package}\]'"):
        targets.build(name)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean gpt2-tiny"):
        targets.build("gpt2-tny")
