"""What a shell offers for an argument: names of runs, names of known models, or files."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

__all__ = ["model_names", "run_names", "runs_or_files"]


def run_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the runs on this machine."""
    from forebay.paths import runs_dir

    folder = runs_dir()
    names = (path.parent.name for path in folder.glob("*/run.json")) if folder.is_dir() else ()
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def runs_or_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of runs; files where no run begins like that."""
    return run_names(context, parameter, incomplete) or [CompletionItem(incomplete, type="file")]


def model_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the catalogue; files (a model's folder, a GGUF file) where none begins like that."""
    from forebay.model.catalogue import names

    known = sorted({"smollm2", *names()})
    found = [CompletionItem(name) for name in known if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]
