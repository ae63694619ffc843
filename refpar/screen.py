"""Where tables are printed: whole, on a terminal of any width."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


class Screen(Console):
    """Folds lines at the edge of the terminal. A table that is wider goes beyond the edge before any of it is cut.

    Rich would leave out a whole column of it without a word, or the last letters of each: at 80 columns those are the
    layout, and the "ok" or "WRONG" at the end.
    """

    def __init__(self, out: Any, width: int) -> None:
        """Print to ``out``, in ``width`` columns where that is no terminal."""
        super().__init__(file=out, width=None if out.isatty() else width, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as :class:`rich.console.Console` does."""
        edge = self.width
        self.width = max(edge, *(least(self, each) for each in objects if isinstance(each, Table)), 0)
        super().print(*objects, **options)
        self.width = edge


def least(console: Console, table: Table) -> int:
    """Return how many columns a table without lines takes at least: what may be folded is folded at every space."""
    options = console.options.update(max_width=10_000)  # or it measures no more than there is
    total = 2 * (len(table.columns) - 1)
    for column in table.columns:
        widths = []
        for cell in (column.header, *column.cells):
            text = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
            indent = len(text.plain) - len(text.plain.lstrip())  # no place to fold
            measured = Measurement.get(console, options, text)
            widths.append(measured.maximum if column.no_wrap else indent + measured.minimum)
        total += max(widths)
    return total
