"""Keras 3: `keras.RematScope` around the lines that make the layers, which remember it from then on."""

from __future__ import annotations

from keepwise.estimator.emit.choice import PARALLEL, Option, System, numbered
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture

_MAKE = "model = make_model()  # layers remember the scope in which they are made"


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    del setup
    options = [
        Option(policy="none", values={"mode": None}),
        Option(policy="selective:mlp.activation,moe.experts.activation", values={"mode": "activations"}),
        Option(policy="full", values={"mode": "full"}),
    ]
    options += [
        Option(policy=f"first:{n}", values={"mode": "list_of_layers", "layers": n})
        for n in numbered("first", architecture.num_layers)
    ]
    return options


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    del architecture, setup
    mode = option.values["mode"]
    if "layers" in option.values:
        count = option.values["layers"]
        names = f'[f"transformer_layer_{{i}}" for i in range({count})]'
        return f'with keras.RematScope(mode="list_of_layers", layer_names={names}):\n    {_MAKE}'
    if mode is None:
        return "model = make_model()  # outside of any keras.RematScope"
    return f"with keras.RematScope(mode={mode!r}):\n    {_MAKE}"


SYSTEM = System(
    title="Keras",
    options=_options,
    write=_write,
    limits=(
        "layers by name or by the size of their result; layer names are those of keras_hub backbones",
        "no offload",
    ),
    kernels="fused",
    unwritten=PARALLEL,
    checked="Keras 3.15.1",
)
