from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from keepwise.cli import main

MODELS = str(Path(__file__).with_name("models.py"))


class Keepwise:
    """Runs the command in this process."""

    def __call__(self, *args: object, **env: str) -> Result:
        environment = {"COLUMNS": "160", "NO_COLOR": "1", **env}
        result = CliRunner(env=environment).invoke(main, [str(a) for a in args], prog_name="keepwise")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def json(self, *args: object, code: int = 0, **env: str) -> dict:
        result = self(*args, "--json", **env)
        assert result.exit_code == code, result.stderr
        found = json.loads(result.stdout)  # one object and nothing else
        assert found["exit_code"] == code
        assert found["ok"] == (code == 0)
        return found

    def fails(self, *args: object, code: int, **env: str) -> str:
        """The one line of an error; nothing on stdout, no traceback."""
        result = self(*args, **env)
        assert result.exit_code == code, (result.stdout, result.stderr)
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
        assert len(lines) == 1, result.stderr
        return result.stderr


@pytest.fixture(scope="session")
def keepwise() -> Keepwise:
    return Keepwise()


@pytest.fixture(scope="session")
def target():
    return lambda name: f"{MODELS}:{name}"


@pytest.fixture(scope="session")
def plan_file(keepwise, target, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = keepwise("fit", target("make"), "--budget", "0.7x", "--no-measure", "--no-verify", "--save", path)
    assert result.exit_code == 0, result.stderr
    return path
