"""The command as a process of its own: streams, exit codes, imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).with_name("models.py")


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        timeout=300,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a job in the background would pass on that it is ignored
    )


def keepwise(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "keepwise", *map(str, args), **env)


@pytest.mark.parametrize("args", ["['--help']", "['fit', '--help']", "['fit', '--list']"])
def test_help_and_list_load_no_framework(args):
    code = (
        "import sys, contextlib; from keepwise.cli import main\n"
        f"with contextlib.suppress(SystemExit): main({args})\n"
        "assert not {'torch', 'transformers', 'highspy'} & sys.modules.keys(), sorted(sys.modules)"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert result.stderr == ""


def test_import_is_silent():
    result = python("-c", "import keepwise, sys; assert 'torch' not in sys.modules")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_json_keeps_stdout_clean_of_what_is_written_below_python():
    result = keepwise("fit", f"{MODELS}:noisy", "--budget", "0.8x", "--no-verify", "--no-measure", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["command"] == "fit"
    assert "noise from Python" in result.stderr
    assert "noise from below" in result.stderr


def test_exit_codes_reach_the_shell():
    assert keepwise("fit", "nowhere.py:make").returncode == 2
    failed = keepwise("fit", f"{MODELS}:raises")
    assert failed.returncode == 3
    assert failed.stderr.splitlines()[0].startswith("error: ")
    assert "Traceback" not in failed.stderr


def test_ctrl_c_ends_without_a_traceback():
    stopped = keepwise("fit", f"{MODELS}:signalled")
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "error: interrupted\n")
