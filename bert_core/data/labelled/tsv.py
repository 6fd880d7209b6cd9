"""Tab-separated lines with literal quotes, as GLUE publishes its sets."""

from bert_core.data.formats import Errors
from bert_core.data.json_rows import Unread
from bert_core.data.labelled.lines import Line, Reader, lines_of
from bert_core.data.tables import check_header, not_utf8_in
from bert_core.errors import CorpusError


def tsv(*names: str, errors: Errors = "fail") -> Reader:
    """Return a reader of tab-separated lines with literal quotes; the header is `names`, or the
    first line if there are none.

    A first line that begins with `index` is always a header: GLUE's test files have one. If
    `errors` is "skip", None stands for a line with a different number of columns.
    """

    def read(data: bytes, source: str) -> list[Line]:
        rows = [
            (number, line.rstrip("\r").split("\t"))
            for number, line in enumerate(lines_of(data), 1)
            if line.strip(" \t\r")
        ]
        named = bool(names) and not (rows and rows[0][1][0] == "index")
        header = list(names) if named else (rows.pop(0)[1] if rows else [])
        if fault := not_utf8_in(header):
            raise CorpusError(f"{source}, line 1: {fault}")
        check_header(header, source)
        records: list[Line] = []
        for number, row in rows:
            # Files without a header may have more columns than are named.
            fits = len(row) >= len(header) if named else len(row) == len(header)
            if fault := not_utf8_in(row):
                records.append(Unread(f"line {number:,}: {fault}"))
            elif fits:
                records.append(dict(zip(header, row, strict=False)))
            elif errors == "skip":
                records.append(None)
            else:
                fault = (
                    f"wanted {len(header)} columns separated by tabs ({', '.join(header)}), "
                    f"got {len(row)}: correct or remove the line"
                )
                records.append(Unread(f"line {number:,}: {fault}"))
        return records

    return read
