"""The ``forebay`` command: finds the subcommand and turns every error into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import click
from click.shell_completion import CompletionItem

from forebay import __version__
from forebay.errors import ExitCode, ForebayError

__all__ = ["main"]

_BROKEN_PIPE = 141  # what a shell reports for SIGPIPE

# command -> (module under forebay.cli, one-line help); a module is imported only when its command runs
COMMANDS = {
    "serve": ("serve", "Run the embedded inference server in the foreground."),
    "plan": ("plan", "Will it fit? The memory arithmetic, before anything is loaded."),
    "machine": ("machine", "What this machine has, as a table or a JSON file for `plan --machine`."),
    "up": ("up", "Plan, launch, watch and verify a server (embedded, SGLang or vLLM)."),
    "wait": ("wait", "Wait for a server that anyone started, and show what it is doing."),
    "verify": ("verify", "Is the cache in effect? Asked for, effective, observed."),
    "doctor": ("doctor", "Why did it fail? The cause, its evidence and the fix."),
    "status": ("status", "The runs on this machine and their state."),
    "logs": ("logs", "Show or follow a run's log."),
    "down": ("down", "End a run and check that nothing is left."),
    "forward": ("forward", "Reach a server on another machine through a port of this one."),
    "bench": ("bench", "Measure a server over HTTP."),
    "generate": ("generate", "Generate a data set from a served model, exactly once."),
    "completion": ("completion", "Print the script that completes commands in bash, zsh or fish."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"forebay.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Subcommands and this group's options, without importing every subcommand for its help text."""
        found = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="forebay")
def cli() -> None:
    """Bring up LLM servers with a tiered KV cache; check that they fit, are up and really use the cache.

    \b
    Try:
      forebay plan smollm2              will it fit here?
      forebay up smollm2                start it, watch it, verify it
      forebay status                    what runs on this machine
      forebay down NAME                 end it and check that nothing is left
      forebay up MODEL --on HOST        the same on another machine, over SSH

    Exit codes: 0 done, 1 a bug in forebay, 2 bad usage or input, 3 refused, 4 dead, 5 time is up, 6 stalled or hung,
    7 asked for but not in effect, 8 something left behind, 9 finished with failed rows, 130 Ctrl-C.
    """


def main() -> None:
    """Console entry point: every failure is one line on stderr and an exit code."""
    try:
        result = cli(prog_name="forebay", standalone_mode=False)
    except ForebayError as error:
        sys.exit(_report(error))
    except (click.exceptions.Abort, KeyboardInterrupt):  # click turns the second into the first
        click.echo("forebay: interrupted", err=True)
        sys.exit(int(ExitCode.INTERRUPTED))
    except click.ClickException as error:
        sys.exit(_report_usage(error))
    except BrokenPipeError:  # the reader of a pipe (`| head`) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(_BROKEN_PIPE)
    except Exception as error:  # noqa: BLE001 - a bug in forebay: one line, the traceback goes to a file
        sys.exit(_report_bug(error))
    sys.exit(result if isinstance(result, int) else 0)


def _report(error: ForebayError) -> int:
    code = f" [{error.code}]" if error.code else ""
    click.echo(f"forebay: {error.message}{code}", err=True)
    if error.fix:
        click.echo(f"  fix: {error.fix}", err=True)
    return int(error.exit_code)


def _report_usage(error: click.ClickException) -> int:
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else "forebay"
    click.echo(f"{command}: {error.format_message()}", err=True)
    click.echo(f"  fix: see `{command} --help`", err=True)
    return int(ExitCode.USAGE)


def _report_bug(error: Exception) -> int:
    from forebay.paths import home_dir

    text = "".join(traceback.format_exception(error))
    path = home_dir() / "last_error.txt"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        place = f"the traceback is in {path}"
    except OSError:
        place = f"at {traceback.extract_tb(error.__traceback__)[-1]}"
    what = str(error).strip().split("\n")[0][:300]
    click.echo(f"forebay: internal error, {type(error).__name__}: {what}; {place}", err=True)
    return int(ExitCode.BUG)
