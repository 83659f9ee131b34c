"""The `keepwise` command. One file a command, each imported only when it is asked for."""

from __future__ import annotations

import importlib
import os

import click

# Command name -> (module, one line for `keepwise --help`). The module defines a click command called `command`.
COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("keepwise.cli.fit", "Plan a step for a memory budget, prove it, measure it."),
    "frontier": ("keepwise.cli.frontier", "What each budget costs in time, and where the knee is."),
    "bench": ("keepwise.cli.bench", "Keepwise and the stock policies side by side, measured."),
    "verify": ("keepwise.cli.verify", "Prove a plan over training steps, bit for bit."),
    "explain": ("keepwise.cli.explain", "Why each tensor of a module is kept or recomputed."),
    "doctor": ("keepwise.cli.doctor", "Memory hardly drops, too slow, gradients change: why, and what to do."),
    "estimate": ("keepwise.cli.estimate", "Memory of a training step from a config or plain shapes; runs no model."),
    "lesson": ("keepwise.cli.lesson", "The algorithm from scratch, with the figures."),
    "env": ("keepwise.cli.env", "Versions, devices, memory and threads."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported on first use, so that `keepwise --help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[cmd_name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="keepwise")
def main() -> None:
    """Make a training step fit a memory budget at the least cost in time, bit for bit the same."""
    # Else torch's allocator says on stderr, once, that the profiler had not seen a block before it was freed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
