import sys
import textwrap

import pytest
import torch

from keepwise import KeepwiseError, targets
from keepwise._errors import UsageError

CODE = """
import torch
from helper_beside import WIDTH
model = torch.nn.Linear(WIDTH, 1)
x = torch.ones(2, WIDTH)

def pair(): return model, (x,)
def tensor(): return model, x
def mapping(): return model, {"input": x}
def triple(): return model, (), {"input": x}
def quadruple(): return model, (x,), None, lambda out: out.sum()
def raising(): raise ValueError("no such data set\\nmore")
def lonely(): return model
def single(): return (model,)
def no_model(): return "gpt2", (x,)
def bad_args(): return model, 3
def bad_kwargs(): return model, (), 3
def needy(size, depth, width=3): return model, (x,)
def bad_loss(): return model, (x,), {}, "mse"
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper_beside.py").write_text("WIDTH = 3")
    path = tmp_path / "train.py"
    path.write_text(CODE)
    yield path
    sys.modules.pop("helper_beside", None)
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]


@pytest.mark.parametrize("function", ["pair", "tensor", "mapping", "triple", "quadruple"])
def test_every_documented_form(file, function):
    target = targets.load(f"{file}:{function}")
    output = target.model(*target.args, **target.kwargs)
    assert output.shape == (2, 1)
    assert target.batch(5) == (target.args, target.kwargs)
    if function == "quadruple":
        assert torch.equal(target.step(), output.sum())
    else:
        with pytest.raises(KeepwiseError, match="no scalar"):
            target.step()


@pytest.mark.parametrize("loss_of", ["scalar", "mapping", "attribute"])
def test_where_the_loss_is_found(loss_of):
    class Output(dict):
        pass

    class Model(torch.nn.Linear):
        def forward(self, input):
            value = super().forward(input).sum()
            if loss_of == "mapping":
                return {"loss": value, "logits": None}
            if loss_of == "attribute":
                output = Output()
                output.loss = value
                return output
            return value

    target = targets.Target(name="x", model=Model(3, 1), args=(torch.ones(2, 3),), kwargs={})
    assert target.step().ndim == 0
    assert target.model.weight.grad is not None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lonely", "returned a Linear; a tuple is needed"),
        ("single", "returned a tuple of 1"),
        ("no_model", "a str as model"),
        ("bad_args", "an int as args"),
        ("bad_kwargs", "an int as kwargs"),
        ("bad_loss", "a str as loss"),
        ("missing", "no function 'missing' .its functions: bad_args.*triple"),
        ("x", "x is a Tensor, not a function"),
        ("needy", "needs the arguments size, depth; a target's function takes none"),
    ],
)
def test_wrong_use(file, function, message):
    with pytest.raises(UsageError, match=message):
        targets.load(f"{file}:{function}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:make", "no file nowhere.py"),
        ("train.py", "write train.py:function"),
        ("no_such_package.module:make", "no module 'no_such_package'"),
        ("keepwise.no_such:make", "no module 'keepwise.no_such'"),
        (":make", "write file.py:function"),
        ("no-such-name", "no built-in target"),
    ],
)
def test_wrong_spec(spec, message):
    with pytest.raises(UsageError, match=message):
        targets.load(spec)


def test_the_users_own_exception_is_kept_as_the_cause(file):
    with pytest.raises(targets.TargetFailed, match=r"raised ValueError: no such data set$") as caught:
        targets.load(f"{file}:raising")
    assert isinstance(caught.value.__cause__, ValueError)
    assert not isinstance(caught.value, UsageError)


@pytest.mark.parametrize("body", ["1 / 0", "import sys; sys.exit(3)", "import no_such_thing", "def broken(:"])
def test_a_file_that_fails_on_import(tmp_path, body):
    path = tmp_path / "broken.py"
    path.write_text(body)
    with pytest.raises(targets.TargetFailed, match=r"broken\.py"):
        targets.load(f"{path}:make")


def test_a_module_that_fails_on_import(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import no_such_thing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(targets.TargetFailed, match="no_such_thing"):
        targets.load("broken_module:make")


def test_module_form(tmp_path, monkeypatch):
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text(
        textwrap.dedent("""
            import torch
            def make():
                return torch.nn.Linear(2, 1), torch.ones(1, 2), {}, torch.mean
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert targets.load("package_of_mine.models:make").step().ndim == 0


def test_a_built_in_name():
    assert targets.load("mlp-tiny").name == "mlp-tiny"


def test_a_file_called_like_a_loaded_module_shadows_nothing(tmp_path):
    import json

    path = tmp_path / "json.py"
    path.write_text("import torch\ndef make(): return torch.nn.Linear(1, 1), torch.ones(1, 1)")
    targets.load(f"{path}:make")
    assert sys.modules["json"] is json
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]
