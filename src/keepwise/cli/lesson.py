"""`keepwise lesson`: activation checkpointing from scratch, with the figures."""

from __future__ import annotations

import sys

import click


@click.command("lesson")
@click.argument("chapters", nargs=-1)
@click.option("--ask", is_flag=True, help="Stop at each question for your prediction, before the run.")
@click.option("--list", "list_only", is_flag=True, help="Print the chapters' names and titles.")
@click.option("--torch", "with_torch", is_flag=True, help="The same lesson in PyTorch, with keepwise.checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print the measured rows as one JSON object.")
def command(chapters: tuple[str, ...], ask: bool, list_only: bool, with_torch: bool, as_json: bool) -> None:
    """The algorithm from scratch: every figure is counted while it runs, none is written down.

    CHAPTERS are names from `keepwise lesson --list`; without any, the whole lesson runs.
    """
    from keepwise.lessons import CHAPTERS

    unknown = [name for name in chapters if name not in CHAPTERS]
    if unknown:
        raise click.UsageError(f"no chapter {unknown[0]!r}; the chapters are {', '.join(CHAPTERS)}")
    if ask and as_json:
        raise click.UsageError("--ask waits for you and --json is for programs: use one of them")
    if with_torch and (chapters or ask):
        raise click.UsageError("--torch runs one experiment without chapters or questions: use it alone or with --json")
    if with_torch:
        _torch(as_json=as_json)
        return
    if list_only:
        for name, run in CHAPTERS.items():
            click.echo(f"{name:<14}{run.__doc__}")
        return
    runs = [CHAPTERS[name] for name in chapters or CHAPTERS]
    if as_json:
        _write_json({"chapters": [_plain(run()) for run in runs]})
        return
    from rich.console import Console

    from keepwise.lessons.terminal import print_chapter

    console = Console(highlight=False, soft_wrap=False)
    right = 0
    for number, run in enumerate(runs, start=1):
        right += print_chapter(run(), console, number=number, ask=click.prompt if ask else None)
    if ask:
        console.print(f"\n{right} of {len(runs)} predicted.")
    console.print("\nThe code: keepwise/lessons/scratch.py, to be read from top to bottom.")


def _torch(*, as_json: bool) -> None:
    from keepwise.lessons import torch_lesson

    chapter = torch_lesson.chapter()
    if as_json:
        _write_json({"chapters": [_plain(chapter)]})
        return
    from rich.console import Console

    from keepwise.lessons.terminal import print_chapter

    print_chapter(chapter, Console(highlight=False), number=1)


def _plain(chapter: object) -> dict[str, object]:
    """A chapter as plain data, without its drawing."""
    import dataclasses

    fields = dataclasses.asdict(chapter)  # type: ignore[call-overload]
    del fields["plot"]
    return fields


def _write_json(data: dict[str, object]) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
