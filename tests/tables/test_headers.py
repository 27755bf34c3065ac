"""What columns are called, as the modules of ``report`` spell it."""

import ast
from collections import Counter
from pathlib import Path

import cs336sys


def column_headers():
    """The literal (header, unit) of the columns of each tuple of columns."""
    package = Path(cs336sys.__file__).parent
    for path in (*(package / "tables").rglob("*.py"), *(package / "commands").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Tuple):
                columns = [
                    call.args for call in node.elts if isinstance(call, ast.Call) and ast.unparse(call.func) == "Column"
                ]
                literal = [args[1:] for args in columns if isinstance(args[1], ast.Constant)]
                yield path.name, [tuple(ast.unparse(argument) for argument in args) for args in literal]


def test_a_header_says_what_stands_below_it():
    found = list(column_headers())
    assert sum(len(headers) for _, headers in found) > 200, "the search no longer sees the columns"
    bare = [
        (name, header[0])
        for name, headers in found
        for header in headers
        if header[0].strip("'") in ("in", "at", "of", "by")
    ]
    assert not bare


def test_no_table_has_two_columns_of_one_name():
    twice = [
        (name, header) for name, headers in column_headers() for header, count in Counter(headers).items() if count > 1
    ]
    assert not twice
