"""`python -m keepwise` is the `keepwise` command."""

from __future__ import annotations

from keepwise.cli import main

main(prog_name="keepwise")
