"""Rows of text as a table: of a terminal, or in Markdown.  The first row is the header, the first column set left."""


def text(rows):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows, left=(0,)):
    """`left`: the columns that are set left; the others are numbers."""
    header, *others = rows
    rule = ["---" if column in left else "---:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *others))
