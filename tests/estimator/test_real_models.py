"""The operator model against real models: parameters, operations, what autograd saves, and the allocator's peak."""

import warnings

import pytest

import keepwise

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from keepwise.measure.events import allocator_timeline  # noqa: E402
from tests.estimator.models import FAMILIES, make  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; ours are errors elsewhere


def saved_bytes(case):
    """Bytes of the distinct storages that autograd saves, without parameters, buffers and the batch."""
    tensors = [*case.model.parameters(), *case.model.buffers(), *case.batch.values()]
    own = {t.untyped_storage()._cdata for t in tensors}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage  # held, so that the number is not given away again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        case.loss()
    return sum(storage.nbytes() for storage in saved.values())


def peak_bytes(case):
    """Most bytes that one forward and backward has alive above parameters, gradients and batch."""

    def step():
        case.output = None
        case.loss().backward()

    step()  # gradients exist from here on
    case.model.zero_grad(set_to_none=False)
    case.output = None
    live = peak = 0
    for event in allocator_timeline(step):
        live += event.delta_bytes
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters(name):
    case = make(name, meta=True)
    answer = keepwise.estimate(**case.estimate)
    assert answer.num_parameters == sum(p.numel() for p in case.model.parameters())
    assert answer.num_trained == sum(p.numel() for p in case.model.parameters() if p.requires_grad)


# T5's position biases and Whisper's encoder output are held by Python, not saved: the estimate counts them all the same.
HELD_BY_PYTHON = {"t5": 0.03, "whisper": 0.02}


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_bytes(name, mode):
    case = make(name, mode)
    real = saved_bytes(case)
    assert keepwise.estimate(**case.estimate).kept_bytes == pytest.approx(real, rel=HELD_BY_PYTHON.get(name, 0.01))


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt2-dropout", "bert", "gpt_neox", "opt", "vit", "whisper", "t5", "mixtral"]
)
def test_saved_bytes_with_the_attention_matrix(name, mode):
    case = make(name, mode, attention="eager")
    real = saved_bytes(case)
    assert keepwise.estimate(**case.estimate).kept_bytes == pytest.approx(real, rel=HELD_BY_PYTHON.get(name, 0.01))


def test_the_square_of_the_sequence():
    """Twice the sequence doubles what a fused kernel keeps and more than doubles the matrix form."""
    for attention, least, most in (("sdpa", 1.99, 2.01), ("eager", 2.2, 4.0)):
        short, long = (saved_bytes(make("gpt2", attention=attention, sequence=n)) for n in (32, 64))
        asked = [make("gpt2", attention=attention, meta=True, sequence=n).estimate for n in (32, 64)]
        ratio = keepwise.estimate(**asked[1]).kept_bytes / keepwise.estimate(**asked[0]).kept_bytes
        assert ratio == pytest.approx(long / short, rel=0.01)
        assert least < ratio < most


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "gpt2",
        "gpt2-dropout",
        "bert",
        "gpt_neox",
        "phi3",
        "opt",
        "whisper",
        "t5",
        "mixtral",
        "qwen2_moe",
    ],
)
def test_peak(name, checkpointing):
    case = make(name, sequence=64, batch=4)
    if checkpointing == "full":
        enable = getattr(case.model, "activation_checkpointing_enable", case.model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    answer = keepwise.estimate(**case.estimate, checkpointing=checkpointing)
    assert answer.activation_bytes == pytest.approx(peak_bytes(case), rel=0.05)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("name", "mode", "attention"),
    [
        ("llama", "autocast", "sdpa"),  # narrow weights stay in autocast's cache until forward ends
        ("bert", "autocast", "sdpa"),  # and the hidden states in the model's variables
        ("llama", "fp32", "eager"),  # checkpoints hold the mask
        ("gemma2", "fp32", "eager"),  # both of them
        ("mistral-window", "fp32", "sdpa"),
    ],
)
def test_peak_in_other_modes(name, mode, attention, checkpointing):
    case = make(name, mode, attention=attention, sequence=64, batch=4)
    if checkpointing == "full":
        enable = getattr(case.model, "activation_checkpointing_enable", case.model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    answer = keepwise.estimate(**case.estimate, checkpointing=checkpointing)
    assert answer.activation_bytes == pytest.approx(peak_bytes(case), rel=0.05)


@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "o", "gate", "up", "down")])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
def test_adapters(mode, targets):
    peft = pytest.importorskip("peft")
    case = make("llama", mode)
    names = [f"{t}_proj" for t in targets]
    case.model = peft.get_peft_model(case.model, peft.LoraConfig(r=4, target_modules=names))
    case.model.enable_input_require_grads()
    case.model.train()
    answer = keepwise.estimate(**case.estimate, lora_rank=4, lora_targets=",".join(targets))
    assert answer.num_trained == sum(p.numel() for p in case.model.parameters() if p.requires_grad)
    assert answer.kept_bytes == pytest.approx(saved_bytes(case), rel=0.01)


@pytest.mark.parametrize("every", [1, 2])
def test_selective_checkpointing_of_operators(every):
    """PyTorch's selective checkpointing with matrix products and attention kept, against the same policy here."""
    import functools

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    case = make("llama", sequence=64, batch=4)
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default

    def contexts():
        seen = {False: 0, True: 0}

        def policy(ctx, op, *args, **kwargs):
            if op in (aten.mm.default, aten.addmm.default):
                seen[ctx.is_recompute] += 1
                if (seen[ctx.is_recompute] - 1) % every == 0:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.MUST_SAVE if op == flash else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for block in case.model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    answer = keepwise.estimate(**case.estimate, checkpointing="sac" if every == 1 else "sac:2")
    assert answer.activation_bytes == pytest.approx(peak_bytes(case), rel=0.06)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gpt_neox", "whisper", "qwen3"])
def test_operations(name):
    """Matrix products of forward and backward, counted by PyTorch."""
    from torch.utils.flop_counter import FlopCounterMode

    case = make(name, attention="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FlopCounterMode(display=False) as forward:
            loss = case.loss()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    answer = keepwise.estimate(**case.estimate).ranks[0]
    # Convolutions of a spectrogram have no gradient of their input, which the estimate does not know.
    assert answer.forward_flops == pytest.approx(forward.get_total_flops(), rel=0.005)
    assert answer.backward_flops == pytest.approx(backward.get_total_flops(), rel=0.03)


def test_recomputed_operations():
    """Full checkpointing runs all matrix products of each block again but the last one (early stop)."""
    from torch.utils.flop_counter import FlopCounterMode

    totals = {}
    for checkpointing in ("none", "full"):
        case = make("llama", attention="eager")
        if checkpointing == "full":
            getattr(case.model, "activation_checkpointing_enable", case.model.gradient_checkpointing_enable)(
                {"use_reentrant": False}
            )
        with FlopCounterMode(display=False) as counter:
            case.loss().backward()
        totals[checkpointing] = counter.get_total_flops()
    answer = keepwise.estimate(**case.estimate, checkpointing="full")
    assert answer.ranks[0].rebuilt_flops == pytest.approx(totals["full"] - totals["none"], rel=1e-9)
    assert answer.recompute_overhead == pytest.approx(totals["full"] / totals["none"] - 1, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "make_optimizer"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("sgd-momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adafactor", lambda p: torch.optim.Adafactor(p)),
    ],
)
def test_optimizer_state(name, make_optimizer):
    case = make("llama")
    optimizer = make_optimizer(case.model.parameters())
    case.loss().backward()
    optimizer.step()
    tensors = [
        t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.numel() > 1
    ]
    real = sum(t.numel() * t.element_size() for t in tensors)
    assert keepwise.estimate(**case.estimate, optimizer=name).categories.optimizer == pytest.approx(real, rel=0.001)
