"""Tables for a terminal, by rich: columns without lines, as wide as their content or the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["print_table"]

_MIN_WIDTH = 100  # into a file or a pipe, where there is no terminal to ask


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), err: bool = False
) -> None:
    """Print ``rows`` below ``headers`` (none: no heading line).

    Args:
        right: numbers of the columns that are aligned to the right.
        err: to stderr.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream = sys.stderr if err else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else 10 * _MIN_WIDTH, highlight=False)
    table = Table(box=None, show_header=any(headers), pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
