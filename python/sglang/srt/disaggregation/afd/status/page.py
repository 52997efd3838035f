"""The status page: one HTML document without scripts, which the browser asks for again."""

from __future__ import annotations

from html import escape
from typing import Any, NamedTuple

REFRESH_S = 2
SILENT_S = 5.0  # a rank that said nothing for so long is marked

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child, .text { text-align: left; }
meter { width: 8rem; } .bad { color: #c00; font-weight: bold; } .quiet { opacity: .7; }
"""


class Column(NamedTuple):
    """A heading, and the key of the value below it."""

    heading: str
    key: str


_COMMON = (
    Column("host", "host"),
    Column("pid", "pid"),
    Column("device", "device"),
    Column("steps", "steps"),
)
ATTENTION = (
    *_COMMON,
    Column("tokens", "tokens"),
    Column("tokens/s", "tokens_per_s"),
    Column("running", "num_running_reqs"),
    Column("waiting", "num_waiting_reqs"),
)
FFN = (
    *_COMMON,
    Column("rows", "tokens"),
    Column("rows/s", "tokens_per_s"),
    Column("experts", "experts"),
)


def render(topology: dict[str, Any]) -> str:
    """The page of `topology.build`'s document, to whose ranks `tokens_per_s` may be added."""
    facts = ", ".join(
        escape(f"{name} {topology[key]}")
        for name, key in (
            ("connector", "connector"),
            ("microbatches", "microbatches"),
            ("capacity", "capacity"),
            ("MoE layers", "moe_layers"),
            ("sglang-afd", "afd_version"),
            ("SGLang", "sglang_version"),
        )
    )
    attention, ffn = topology["attention"], topology["ffn"]
    body = (
        f"<h1>Attention-FFN disaggregation: {len(attention)}A{len(ffn)}F</h1>"
        f'<p class="quiet">{facts}</p>'
        f"<h2>Attention ranks</h2>{_table('attn', ATTENTION, attention, _kv_cell)}"
        f"<h2>FFN ranks</h2>{_table('ffn', FFN, ffn, None)}"
        f'<p class="quiet">This page asks again every {REFRESH_S} s. '
        'The same as JSON: <a href="/afd/topology">/afd/topology</a>.</p>'
    )
    return document(body)


def document(body: str) -> str:
    """`body`, which is HTML, as a whole page that refreshes itself."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>SGLang-AFD</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _table(role: str, columns: tuple[Column, ...], ranks: list[dict[str, Any]], extra: Any) -> str:
    headings = ["rank", *(column.heading for column in columns)]
    headings += ["KV cache"] if extra else []
    headings.append("last heard")
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    rows = []
    for rank in ranks:
        cells = [f"{role} {rank['rank']}"]
        cells += [_text(rank.get(column.key, "")) for column in columns]
        html = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        html += extra(rank) if extra else ""
        rows.append(f'<tr id="{role}-{rank["rank"]}">{html}{_heard_cell(rank)}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _kv_cell(rank: dict[str, Any]) -> str:
    used, most = rank["num_used_tokens"], rank["max_total_num_tokens"]
    text = f"{used:,} of {most:,} tokens"
    return (
        f'<td><meter min="0" max="{max(most, 1)}" value="{used}" title="{text}">{text}</meter></td>'
    )


def _heard_cell(rank: dict[str, Any]) -> str:
    age = rank["heartbeat_age_s"]
    mark = ' class="bad"' if age > SILENT_S else ""
    return f"<td{mark}>{age:.1f} s ago</td>"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        first, end = value
        return f"{first} to {end - 1}"
    if isinstance(value, int):
        return f"{value:,}" if value > 9999 else str(value)
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
