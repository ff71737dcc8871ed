"""Rows of text as a table, for a terminal or in Markdown.  The first row is the header; the first column goes left."""


def text(rows):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows):
    header, *others = rows
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *others))
