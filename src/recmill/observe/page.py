"""The page of a report: one HTML file without scripts, requests or fonts of its own, for screens and for paper."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from recmill.observe.figures import text

# The browser itself refuses whatever is not in the file.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = Path(__file__).with_name("report.css")


def page(title: str, body: str) -> str:
    """Return the complete file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def section(title: str, *parts: str, name: str = "") -> str:
    """Return a headed section of what is not empty; `name`: what links lead to."""
    anchor = f' id="{text(name)}"' if name else ""
    return f"<section><h2{anchor}>{text(title)}</h2>{''.join(parts)}</section>\n"


def missing(sentence: str) -> str:
    """Say why something is not shown."""
    return f'<p class="missing">{text(sentence)}</p>'


def figures(*drawn: str) -> str:
    """Return figures side by side."""
    found = "".join(drawn)
    return f'<div class="grid-of-figures">{found}</div>' if found else ""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table without its empty columns; those whose cells are all numbers are aligned to the right."""
    filled = [column for column in range(len(header)) if any(str(row[column]) for row in rows)]
    header, rows = [header[column] for column in filled], [[row[column] for column in filled] for row in rows]
    is_number = [all(_looks_like_number(row[column]) for row in rows) for column in range(len(header))]
    classes = [' class="number"' if right else "" for right in is_number]
    head = "".join(f"<th{kind}>{text(cell)}</th>" for kind, cell in zip(classes, header, strict=True))
    lines = []
    for row in rows:
        kinds = [
            kind or (' class="long"' if len(str(cell)) > 30 else "") for kind, cell in zip(classes, row, strict=True)
        ]
        lines.append("".join(f"<td{kind}>{text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _looks_like_number(cell: object) -> bool:
    written = str(cell).split(" ")[0].replace(",", "").lstrip("+-")
    return not written or written[:1].isdigit()


def pairs(facts: Mapping[str, object]) -> str:
    """Return names and values as a table without a header."""
    rows = "".join(
        f'<tr><th>{text(name)}</th><td class="long">{text(value)}</td></tr>' for name, value in facts.items()
    )
    return f'<div class="scroll"><table class="pairs"><tbody>{rows}</tbody></table></div>'


def numbers(facts: Mapping[str, tuple[str, str]]) -> str:
    """Return the few numbers that matter most: by name the value and a note."""
    cells = [
        f"<div><dt>{text(name)}</dt><dd>{text(value)}{f'<small>{text(note)}</small>' if note else ''}</dd></div>"
        for name, (value, note) in facts.items()
    ]
    return f'<dl class="numbers">{"".join(cells)}</dl>'


def preformatted(content: str, kind: str = "") -> str:
    return f'<pre class="{kind}">{text(content)}</pre>'
