"""`keepwise.estimate`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from keepwise._errors import UsageError
from keepwise._units import parse_bytes
from keepwise.estimator.answer import Estimate
from keepwise.estimator.compute import Estimator
from keepwise.estimator.families import FAMILIES, read
from keepwise.estimator.policy import Policy, parse_policy
from keepwise.estimator.rule import FUSED_BYTES, INPUT_BYTES
from keepwise.estimator.setup import Setup, lora_targets
from keepwise.estimator.shapes import by_rule
from keepwise.estimator.spec import Architecture
from keepwise.estimator.units import parse_count

_SETUP_FIELDS = set(Setup.__struct_fields__) - {"checkpointing", "budget_bytes"}
_GPT_LIKE = ("gpt2", "gpt_neox", "opt", "phi", "bert")


def estimate(
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    layers: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    tokens: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    inner: int | None = None,
    vocab: int | None = None,
    family: str = "llama",
    layer_bytes: float = FUSED_BYTES,
    input_bytes: float = INPUT_BYTES,
    segment: int | None = None,
    parameters: int | float | str | None = None,
    checkpointing: str | Policy = "none",
    budget: int | float | str | None = None,
    seq: int | None = None,
    **setup: Any,
) -> Estimate:
    """Memory and cost of a training step from shapes alone: no model is built, no framework is loaded.

    Three ways of saying what the model is:

    - `config`: a Hugging Face `config.json` (its path or its mapping): the operator model of that family;
    - `layers`, `width` and `heads` (with `kv_heads`, `inner`, `vocab`, `family`): the same for plain shapes;
    - `layers`, `width` and `tokens` alone: the rule of thumb, `layer_bytes` (A) for each token and unit, `input_bytes` (b)
      for a stored input (see `keepwise.estimator.rule`); `parameters` adds weights, gradients and optimizer state.

    Args:
        config: path or mapping of a configuration.
        layers: L.
        width: d, the hidden size; `hidden` is the same.
        hidden: another name of `width`.
        tokens: T, micro-batch times sequence, for the rule of thumb.
        heads: attention heads.
        kv_heads: key and value heads, as `heads` by default.
        inner: feed-forward width.
        vocab: vocabulary.
        family: architecture of plain shapes.
        layer_bytes: A, bytes.
        input_bytes: b, bytes.
        segment: k, the same as checkpointing "every:k".
        parameters: how many parameters, for the rule of thumb ("7B" too).
        checkpointing: none, full, every:K, sqrt, first:N, selective, selective:PART,..., sac, sac:2, keepwise, keepwise:BYTES.
        budget: bytes that `keepwise` plans for ("70GiB" too); the device's usable memory by default.
        seq: another name of `sequence`.
        **setup: fields of `keepwise.estimator.setup.Setup` (batch, sequence, precision, attention, optimizer,
            tensor_parallel, zero, ...).

    Returns:
        The answer by category, for each rank that differs.

    Raises:
        UsageError: with what was wrong and what is accepted.

    Example:
        >>> import keepwise
        >>> keepwise.estimate(layers=32, width=4096, tokens=2048, segment=1).activation_bytes
        822083584
    """
    if seq is not None:
        setup["sequence"] = seq
    made = make_setup(checkpointing=checkpointing, segment=segment, budget=budget, **setup)
    width = hidden if width is None else width
    if config is None and heads is None:
        if layers is None or width is None:
            raise UsageError("give a config, or layers, width and tokens (and heads for the operator model)")
        return by_rule(
            layers=layers,
            width=width,
            tokens=tokens if tokens is not None else made.batch * made.sequence,
            layer_bytes=layer_bytes,
            input_bytes=input_bytes,
            parameters=None if parameters is None else parse_count(parameters),
            setup=made,
        )
    if tokens is not None:
        if "sequence" in setup or tokens % made.batch:
            raise UsageError("tokens is batch times sequence: give tokens and batch, or batch and sequence")
        made = replace(made, sequence=tokens // made.batch)
    architecture = architecture_of(
        config, layers=layers, width=width, heads=heads, kv_heads=kv_heads, inner=inner, vocab=vocab, family=family
    )
    return Estimator(architecture).run(made)


def make_setup(
    *, checkpointing: str | Policy, segment: int | None = None, budget: int | float | str | None = None, **values: Any
) -> Setup:
    """A checked setup from keyword arguments; text is accepted where people type it.

    Raises:
        UsageError: when a name is not known or a value is not accepted.
    """
    unknown = sorted(set(values) - _SETUP_FIELDS)
    if unknown:
        raise UsageError(f"estimate has no option {unknown[0]!r}; options: {', '.join(sorted(_SETUP_FIELDS))}")
    policy = parse_policy(checkpointing) if isinstance(checkpointing, str) else checkpointing
    if segment is not None:
        if segment < 1:
            raise UsageError(f"segment must be at least 1, not {segment}")
        policy = Policy(kind="every", number=segment)
    if isinstance(values.get("lora_targets"), str):
        values["lora_targets"] = lora_targets(values["lora_targets"])
    if "offload" in values:
        offload = values["offload"]
        names: Iterable[str] = offload.split(",") if isinstance(offload, str) else offload
        values["offload"] = frozenset(name.strip() for name in names if name.strip())
    for name in ("batch", "sequence"):
        if isinstance(values.get(name), str):
            values[name] = parse_count(values[name])
    return Setup(checkpointing=policy, budget_bytes=None if budget is None else parse_bytes(budget), **values)


def architecture_of(
    config: Mapping[str, Any] | str | Path | None,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    inner: int | None = None,
    vocab: int | None = None,
    family: str = "llama",
) -> Architecture:
    """The architecture of a configuration, or of plain shapes.

    Raises:
        UsageError: when the file is not there or no JSON object, or a shape is missing.
    """
    if config is not None:
        given = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "inner": inner, "vocab": vocab}
        both = [name for name, value in given.items() if value is not None]
        if both:
            raise UsageError(f"{both[0]} is in the configuration: give a config or shapes, not both")
        return read(config if isinstance(config, Mapping) else _load(Path(config)))
    if layers is None or width is None or heads is None:
        raise UsageError("plain shapes need layers, width and heads")
    if family not in FAMILIES:
        raise UsageError(f"family {family!r} is not known; known: {', '.join(FAMILIES)}")
    if layers < 1 or heads < 1 or width < 1:
        raise UsageError(f"layers, width and heads must be at least 1, not {layers}, {width} and {heads}")
    if width % heads:
        raise UsageError(f"width {width} is not divisible by {heads} heads")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise UsageError(f"{heads} heads are not divisible by {kv_heads} key heads")
    gated = family not in _GPT_LIKE
    inner = inner or (-(-(8 * width // 3) // 256) * 256 if gated else 4 * width)
    values = {
        "model_type": family,
        "hidden_size": width, "n_embd": width, "d_model": width,
        "num_hidden_layers": layers, "n_layer": layers, "num_layers": layers,
        "num_attention_heads": heads, "n_head": heads, "num_heads": heads,
        "num_key_value_heads": kv_heads or heads, "head_dim": width // heads, "d_kv": width // heads,
        "intermediate_size": inner, "n_inner": inner, "ffn_dim": inner, "d_ff": inner, "moe_intermediate_size": inner,
        "attention_dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "dropout": 0.0, "dropout_rate": 0.0,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        **({"vocab_size": vocab} if vocab else {}),
    }  # fmt: skip
    return read(values)


def _load(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no JSON object, but {type(data).__name__}")
    return data
