"""Text tables that are valid Markdown."""

from collections.abc import Sequence


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 2) -> str:
    """A table whose first `num_text_columns` columns are left-aligned and whose others (numbers) are right-aligned."""
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    rule = ["-" * width if i < num_text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = [_aligned(headers, widths, num_text_columns), rule]
    lines += [_aligned(row, widths, num_text_columns) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _aligned(cells: Sequence[str], widths: Sequence[int], num_text_columns: int) -> list[str]:
    pairs = enumerate(zip(cells, widths, strict=True))
    return [cell.ljust(width) if i < num_text_columns else cell.rjust(width) for i, (cell, width) in pairs]
