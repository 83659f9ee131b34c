"""A target from its name on the command line: a built-in one, or a function of the user's."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from keepwise._errors import UsageError
from keepwise.targets.registry import build
from keepwise.targets.target import Target, TargetFailed

FORMS = "(model, args), (model, args, kwargs) or (model, args, kwargs, loss)"


def load(spec: str) -> Target:
    """The target that `spec` names.

    Args:
        spec: a built-in name, `file.py:function` or `package.module:function`. The function takes no argument and
            returns `(model, args)`, `(model, args, kwargs)` or `(model, args, kwargs, loss)`; `args` is a tuple, a
            mapping (keywords) or one tensor.

    Raises:
        UsageError: the spec, the file, the module or the function is not there, or it does not return what it should.
        TargetFailed: the user's file or function raised; the original exception is the cause.
    """
    where, colon, function_name = spec.rpartition(":")
    if not colon:
        if spec.endswith(".py"):
            raise UsageError(f"target {spec!r} names no function: write {spec}:function")
        return build(spec)
    if not where or not function_name:
        raise UsageError(f"target {spec!r}: write file.py:function or package.module:function")
    module = _load_file(where) if where.endswith(".py") else _load_module(where)
    function = getattr(module, function_name, None)
    if function is None:
        offered = ", ".join(sorted(n for n in _own_functions(module))) or "none"
        raise UsageError(f"target {spec!r}: {where} has no function {function_name!r} (its functions: {offered})")
    if not callable(function):
        raise UsageError(f"target {spec!r}: {function_name} is {_a(function)}, not a function")
    needed = _arguments_without_default(function)
    if needed:
        raise UsageError(
            f"target {spec!r}: {function_name} needs the argument{'s' * (len(needed) > 1)} {', '.join(needed)}; a target's function takes "
            f"none and returns {FORMS}"
        )
    return _target(spec, _call(spec, function))


def _a(thing: Any) -> str:
    """`a Linear`, `an int`."""
    name = type(thing).__name__
    return f"{'an' if name[:1] in 'aeiouAEIO' else 'a'} {name}"


def _arguments_without_default(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C do not tell
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _own_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and getattr(value, "__module__", None) == module.__name__
    ]


def _load_file(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise UsageError(f"there is no file {where}")
    # A name of its own, so that train.py and json.py of the user shadow no module that is already loaded.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"keepwise_target_{path.stem}_{digest}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UsageError(f"{where} cannot be read as Python")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # As `python file.py` does: modules beside the file can be imported.
    try:
        found.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise TargetFailed(f"{where} raised {_line(error)}") from error
    except SystemExit as error:
        sys.modules.pop(name, None)
        raise TargetFailed(f"{where} ended the process when it was imported (sys.exit outside a function?)") from error
    return module


def _load_module(where: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # As `python -m` does.
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if where == missing or where.startswith(missing + "."):
            raise UsageError(f"there is no module {missing!r} (a file is written file.py:function)") from error
        raise TargetFailed(f"module {where} raised {_line(error)}") from error
    except Exception as error:
        raise TargetFailed(f"module {where} raised {_line(error)}") from error


def _call(spec: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise TargetFailed(f"{spec} raised {_line(error)}") from error


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _target(spec: str, made: Any) -> Target:
    from torch import Tensor, nn

    def wrong(what: str, needed: str) -> UsageError:
        return UsageError(f"{spec} returned {what}; {needed} is needed: {FORMS}")

    if not isinstance(made, tuple | list) or not 2 <= len(made) <= 4:
        what = _a(made) + (f" of {len(made)}" if isinstance(made, tuple | list) else "")
        raise wrong(what, "a tuple")
    model, args = made[:2]
    keywords: Any = {} if len(made) < 3 or made[2] is None else made[2]
    loss: Any = made[3] if len(made) > 3 else None
    if not isinstance(model, nn.Module):
        raise wrong(f"{_a(model)} as model", "a torch.nn.Module")
    if not isinstance(keywords, Mapping):
        raise wrong(f"{_a(keywords)} as kwargs", "a dict")
    if loss is not None and not callable(loss):
        raise wrong(f"{_a(loss)} as loss", "a function of the model's output")
    if isinstance(args, Mapping):
        args, keywords = (), {**args, **keywords}
    elif isinstance(args, Tensor):
        args = (args,)
    elif args is not None and not isinstance(args, tuple | list):
        raise wrong(f"{_a(args)} as args", "a tuple, a dict or a tensor")
    return Target(
        name=spec,
        model=model,
        args=tuple(args or ()),
        kwargs=dict(keywords),
        loss=cast(Callable[[Any], Any] | None, loss),
        description=_describe(model, args, keywords),
    )


def _describe(model: Any, args: Any, keywords: Mapping[str, Any]) -> str:
    """`LM, 0.24 M parameters, [8, 64]`: the class, its size and the shapes of the batch."""
    from torch import Tensor

    count = sum(p.numel() for p in model.parameters())
    tensors = [a for a in (*(args or ()), *keywords.values()) if isinstance(a, Tensor)]
    shapes = [str(list(t.shape)) for t in tensors[:4]] + ["..."] * (len(tensors) > 4)
    return ", ".join([type(model).__name__, f"{count / 1e6:.3g} M parameters", *shapes])
