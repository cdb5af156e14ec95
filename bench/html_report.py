"""A report as one HTML file that needs nothing else: light and dark, any width."""

import json
from collections.abc import Sequence
from html import escape

from specdeft.bench.charts import Chart
from specdeft.bench.report import Report, Table, is_right, show
from specdeft.bench.svg import NUM_COLOURS, draw, is_wide

_LIGHT = ("#0067a5", "#c8500a", "#00805a", "#a8518a", "#8a6d00", "#5a5f66")
_DARK = ("#5ab4ec", "#ff9a5c", "#4fd1a1", "#eda6d2", "#e8c547", "#a9b0b8")

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1d21; --soft: #59616b;
  --rule: #dfe3e8; --shade-ink: #0067a5; --on-shade: #fff; --card: #f6f8fa; COLOURS_LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e9ec; --soft: #a0a8b1;
  --rule: #333a42; --shade-ink: #5ab4ec; --on-shade: #0b1014; --card: #1c2126; COLOURS_DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 20px 16px 48px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 32px 0 8px; }
ul { margin: 0; padding-left: 1.2em; color: var(--soft); }
li { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--rule); text-align: left;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
.right { text-align: right; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr));
  grid-auto-flow: dense; align-items: start; gap: 16px; margin-top: 12px; }
figure { margin: 0; padding: 12px; background: var(--card); border-radius: 8px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 8px; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; font-size: 12px; }
svg text { fill: var(--ink); } svg .label { fill: var(--soft); }
svg .on-dark { fill: var(--on-shade); }
svg .grid { stroke: var(--rule); } svg .edge { stroke: var(--soft); stroke-width: 0.6; }
svg polyline, svg .hollow { fill: none; stroke-width: 2; }
svg .cell, svg .node { fill: color-mix(in srgb, var(--shade-ink) calc(var(--shade) * 100%),
  var(--paper)); stroke: var(--rule); }
details { margin-top: 32px; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: var(--card); padding: 12px; border-radius: 8px;
  font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (min-width: 820px) { .wide { grid-column: span 2; } }
@media (max-width: 640px) {
  /* A row becomes a card: nothing has to be scrolled sideways. */
  thead { display: none; } table, tbody { display: block; width: 100%; }
  tr { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 2px 12px;
    padding: 10px 0; border-bottom: 1px solid var(--rule); }
  td, td.right { display: block; border: 0; padding: 0; text-align: left; white-space: normal;
    overflow-wrap: anywhere; }
  td::before { content: attr(data-name); display: block; color: var(--soft); font-size: 12px; }
  td:first-child { grid-column: 1 / -1; font-weight: 600; }
  td:first-child::before { display: none; }
}
"""


def as_html(report: Report) -> str:
    """The whole file."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in report.remarks)
    first, *others = report.tables
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f"<ul>{notes}</ul>",
        _table(first),
        f"<h2>Remarks</h2><ul>{remarks}</ul>" if remarks else "",
        _charts(report.charts),
        *(_table(table) for table in others),
        _manifest(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_style()}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _style() -> str:
    def colours(values: Sequence[str]) -> str:
        return " ".join(f"--colour{index}: {value};" for index, value in enumerate(values))

    classes = "".join(
        f"svg .fill{index} {{ fill: var(--colour{index}); }} "
        f"svg .line{index} {{ stroke: var(--colour{index}); }}\n"
        for index in range(NUM_COLOURS)
    )
    light = _STYLE.replace("COLOURS_LIGHT", colours(_LIGHT))
    return light.replace("COLOURS_DARK", colours(_DARK)) + classes


def _charts(charts: Sequence[Chart]) -> str:
    if not charts:
        return ""
    figures = "".join(
        f"<figure{' class=wide' if is_wide(chart) else ''}>"
        f"<figcaption>{escape(chart.title)}</figcaption>{draw(chart)}</figure>"
        for chart in charts
    )
    return f'<h2>Drawings</h2><div class="charts">{figures}</div>'


def _table(table: Table) -> str:
    right = [is_right(table, column) for column in range(len(table.columns))]
    marks = [' class="right"' if is_number else "" for is_number in right]
    head = "".join(
        f"<th{mark}>{escape(name)}</th>" for mark, name in zip(marks, table.columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{mark} data-name="{escape(name)}">{escape(show(cell))}</td>'
            for mark, name, cell in zip(marks, table.columns, row, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _manifest(report: Report) -> str:
    manifest = report.data.get("manifest")
    if manifest is None:
        return ""
    text = escape(json.dumps(manifest, indent=1))
    return f"<details><summary>Manifest</summary><pre>{text}</pre></details>"
