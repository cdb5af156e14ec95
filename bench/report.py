"""Results as text: a table for people, Markdown, CSV, or JSON."""

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdeft.bench.charts import Chart

Cell = str | int | float | None
MISSING = "-"


@dataclass(frozen=True)
class Table:
    """Rows under named columns; numbers stand right, text left."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of {self.title!r} has not {len(self.columns)} cells")


@dataclass(frozen=True)
class Report:
    """What a command found.

    Attributes:
        title: one line.
        notes: how it was measured, a sentence each.
        tables: the figures; the first is the main one.
        remarks: what to know about the figures, a sentence each (differences, losses, warnings).
        data: everything, for programs: the manifest and the metrics by name.
        charts: for the HTML report and the PNG files.
    """

    title: str
    notes: tuple[str, ...]
    tables: tuple[Table, ...]
    remarks: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    charts: tuple[Chart, ...] = ()


class Finished(NamedTuple):
    """What a command hands back: its report, the format asked for, and the exit code."""

    report: Report
    output: str
    exit_code: int = 0


def as_text(report: Report, width: int | None = None) -> str:
    """Plain text with aligned columns.

    Args:
        report: what to show.
        width: columns of the terminal; a wider table is turned on its side if that helps.
    """
    parts = ["\n".join([report.title, *(f"  {note}" for note in report.notes)])]
    parts += [_text_table(table, width) for table in report.tables]
    if report.remarks:
        parts.append("\n".join(report.remarks))
    return "\n\n".join(parts) + "\n"


def as_markdown(report: Report) -> str:
    """Markdown with a table for each table."""
    parts = [f"# {report.title}", "\n".join(f"- {note}" for note in report.notes)]
    for table in report.tables:
        parts += [f"## {table.title}", _markdown_table(table)]
    if report.remarks:
        parts += ["## Remarks", "\n".join(f"- {remark}" for remark in report.remarks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_csv(report: Report) -> str:
    """The main table, its numbers unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(report.tables[0].columns)
    writer.writerows(
        ["" if cell is None else cell for cell in row] for row in report.tables[0].rows
    )
    return out.getvalue()


# A list without strings or lists in it, as json.dumps breaks it over lines.
_PLAIN_LIST = re.compile(r"\[\n([^\[\]{}\"]*?)\n *\]")


def as_json(report: Report) -> str:
    """One document with all the data; lists of numbers stand on one line."""
    text = json.dumps(report.data, indent=1)
    return _PLAIN_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def as_jsonl(report: Report) -> str:
    """The main table, an object a line, its numbers unrounded."""
    table = report.tables[0]
    objects = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return "".join(json.dumps(entry) + "\n" for entry in objects)


FORMATS: dict[str, Callable[[Report], str]] = {
    "table": as_text,
    "md": as_markdown,
    "csv": as_csv,
    "json": as_json,
    "jsonl": as_jsonl,
}


def show(cell: Cell) -> str:
    """A cell for people: three significant digits where that is a fraction."""
    if cell is None:
        return MISSING
    if isinstance(cell, float):
        digits = 3 if abs(cell) < 1 else 2 if abs(cell) < 100 else 0
        return f"{cell:.{digits}f}"
    return str(cell)


def is_right(table: Table, column: int) -> bool:
    """Whether a column holds numbers only."""
    cells = [row[column] for row in table.rows if row[column] is not None]
    return bool(cells) and all(isinstance(cell, int | float) for cell in cells)


def _text_table(table: Table, width: int | None) -> str:
    upright = _aligned(
        _cells(table),
        [is_right(table, column) for column in range(len(table.columns))],
    )
    if width is not None and _width(upright) > width:
        turned = [list(line) for line in zip(*_cells(table), strict=True)]
        sideways = _aligned(turned, [False] + [True] * len(table.rows))
        if _width(sideways) < _width(upright):
            upright = sideways
    return "\n".join([table.title, *upright])


def _cells(table: Table) -> list[list[str]]:
    """The column names, then every row, as shown."""
    return [list(table.columns), *([show(cell) for cell in row] for row in table.rows)]


def _aligned(lines: list[list[str]], right: Sequence[bool]) -> list[str]:
    """Lines of equal columns, a rule below the first."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(right))]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return [
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in ruled
    ]


def _width(lines: Sequence[str]) -> int:
    return max(map(len, lines))


def _markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    marks = ["---:" if is_right(table, column) else "---" for column in range(len(table.columns))]
    rows = [line([show(cell) for cell in row]) for row in table.rows]
    return "\n".join([line(table.columns), line(marks), *rows])
