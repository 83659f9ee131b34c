"""Without the packages that they are for, the callbacks say how to get them; nothing else imports those packages."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_a_missing_package_is_named(package: str, monkeypatch) -> None:
    for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"keepwise.integrations.{package}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'keepwise\[{package}\]'"):
        importlib.import_module(f"keepwise.integrations.{package}")


def test_nothing_is_imported_unless_asked_for() -> None:
    code = (
        "import keepwise, keepwise.integrations, sys; keepwise.fit; "
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'transformers', 'lightning', 'peft', 'accelerate'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
