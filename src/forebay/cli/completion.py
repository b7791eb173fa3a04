"""``forebay completion``: the script that makes a shell complete forebay's commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["command"]


@click.command("completion", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    It completes commands, options, the names of runs and of known models. Put one line into the shell's start file:

    \b
      ~/.bashrc                    eval "$(forebay completion bash)"
      ~/.zshrc                     eval "$(forebay completion zsh)"      (after compinit)
      ~/.config/fish/config.fish   forebay completion fish | source
    """
    from forebay.cli.main import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"this version of click has no completion for {shell}")
    click.echo(kind(cli, {}, "forebay", "_FOREBAY_COMPLETE").source())
