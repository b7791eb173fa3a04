"""The report of ``verify`` for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from forebay.cli._tables import print_table

__all__ = ["show_rows"]


def show_rows(rows: Sequence[Mapping[str, str | None]], *, err: bool = False) -> None:
    """Print the rows (``VerifyRow.as_json``) as a table, then the evidence of each and the fix where one is needed."""
    cells = [[str(row[key] or "-") for key in ("name", "asked", "effective", "observed", "status")] for row in rows]
    print_table(("", "asked", "effective", "observed", ""), cells, err=err)
    click.echo("evidence:", err=err)
    for row in rows:
        click.echo(f"  {row['name']}: {row['evidence']}", err=err)
        if row["fix"] and row["status"] != "ok":
            click.echo(f"    fix: {row['fix']}", err=err)
