"""Small faults to plant in Python source: each changes the syntax tree by the replacement of a text at a place."""

import ast
import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
}
# Comparisons whose replacement is their negation.
NEGATED = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)
# Calls that only tell a reader something, or the type checker.
UNTOUCHED_CALLS = frozenset(("print", "warn", "debug", "info", "warning", "error", "cast", "TypeVar", "ParamSpec"))
# Each of their arguments has its own kind, or their order does not matter.
UNORDERED_CALLS = frozenset(
    ("isinstance", "issubclass", "getattr", "setattr", "hasattr", "suppress", "min", "max", "minimum", "maximum")
)
UNTOUCHED_FIELDS = frozenset(("annotation", "returns", "msg", "decorator_list", "type_params"))
# A text without blanks is a key; others are sentences.
KEY = re.compile(r"[A-Za-z_][\w./:-]*")


@dataclass(frozen=True)
class Mutant:
    """A fault: ``replacement`` takes the place of ``expected`` at a line (from 1) and column (bytes, from 0).

    Attributes:
        statement_lines: the first and last line of the statement around it, without the body of a compound one.
        at_import: it runs, or is read, when the module is imported.
    """

    path: str
    operator: str
    line: int
    column: int
    expected: str
    replacement: str
    statement_lines: tuple[int, int]
    at_import: bool

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.operator}"


def apply(mutant: Mutant, source: bytes) -> bytes | None:
    """Return the source with the fault; None if the text is not at its place, or the result is equal or no program."""
    start = sum(len(line) for line in source.splitlines(keepends=True)[: mutant.line - 1]) + mutant.column
    end = start + len(mutant.expected.encode())
    if source[start:end] != mutant.expected.encode():
        return None
    changed = source[:start] + mutant.replacement.encode() + source[end:]
    try:
        compile(changed, mutant.path, "exec")
    except SyntaxError:
        return None
    return None if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)) else changed


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return every fault that can be planted in a source file, in its order."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.mutants


class _Finder:
    def __init__(self, path: str, source: bytes):
        self.path, self.source, self.mutants = path, source, []
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.statement_lines, self.depth = (1, 1), 0

    def start(self, node: ast.AST) -> int:
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def add(self, operator: str, start: int, end: int, replacement: str) -> None:
        line = bisect.bisect(self.line_starts, start)
        column, expected = start - self.line_starts[line - 1], self.text(start, end)
        at_import = self.depth == 0
        self.mutants.append(
            Mutant(self.path, operator, line, column, expected, replacement, self.statement_lines, at_import)
        )

    def visit(self, node: ast.AST) -> None:
        if is_untouched(node):
            return
        outer = self.statement_lines, self.depth
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            self.statement_lines = (node.lineno, last)
        self.plant(node)
        for field, child in children(node):
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and field == "body"
            self.depth = outer[1] + inside
            self.visit(child)
        self.statement_lines, self.depth = outer

    def plant(self, node: ast.AST) -> None:
        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, operation, right in zip(sides, node.ops, sides[1:], strict=False):
                    self.replace_operator("comparison", left, right, COMPARISONS.get(type(operation)))
            case ast.BinOp() if not (is_text(node.left) or is_text(node.right)):
                self.replace_operator("arithmetic", node.left, node.right, ARITHMETIC.get(type(node.op)))
            case ast.AugAssign() if type(node.op) in ARITHMETIC:
                self.replace_operator("arithmetic", node.target, node.value, ARITHMETIC[type(node.op)])
            case ast.Expr(value=ast.Call()):
                self.add("removed call", self.start(node), self.end(node), "pass")
            case ast.Call(args=[first, second, *_]) if name_of(node.func) not in UNORDERED_CALLS:
                self.swap(first, second)
            case ast.Constant():
                self.change_constant(node)
        test = getattr(node, "test", None)
        for condition in getattr(node, "ifs", [test] if test else []):
            if not isinstance(condition, ast.Constant) and not is_negated_by_comparison(condition):
                start, end = self.start(condition), self.end(condition)
                self.add("negated condition", start, end, f"(not ({self.text(start, end)}))")

    def replace_operator(self, kind: str, left: ast.AST, right: ast.AST, change: tuple[str, str] | None) -> None:
        if change:
            gap = self.text(self.end(left), self.start(right))
            place = re.search(r"\s+".join(map(re.escape, change[0].split())), gap)
            start = self.end(left) + len(gap[: place.start()].encode())
            self.add(kind, start, start + len(place.group().encode()), change[1])

    def swap(self, first: ast.AST, second: ast.AST) -> None:
        if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
            return
        spans = [(self.start(node), self.end(node)) for node in (first, second)]
        between = self.text(spans[0][1], spans[1][0])
        texts = [self.text(*span) for span in spans]
        if texts[0] != texts[1]:
            self.add("swapped arguments", spans[0][0], spans[1][1], f"{texts[1]}{between}{texts[0]}")

    def change_constant(self, node: ast.Constant) -> None:
        value, span = node.value, (self.start(node), self.end(node))
        if isinstance(value, bool):
            self.add("constant", *span, str(not value))
        elif isinstance(value, int):
            self.add("off by one", *span, str(value + 1))
        elif isinstance(value, float):
            self.add("constant", *span, repr(value * 2 or 1.0))
        elif isinstance(value, str) and KEY.fullmatch(value):
            self.add("constant", *span, repr(value + "_"))


def is_untouched(node: ast.AST) -> bool:
    """Return whether no fault is planted in this: messages, representations, types, and names that a module exports."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg="kind", value=ast.Constant(value="stable")):
            # numpy looks at the first letter alone.
            return True
        case ast.keyword(arg="strict", value=ast.Constant(value=True)):
            # An assertion of zip: without it nothing changes where both sides have one length, as they all should.
            return True
        case ast.Call(func=function) | ast.Expr(value=ast.Call(func=function)):
            return name_of(function) in UNTOUCHED_CALLS
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name.startswith("__")
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Subscript(value=ast.Name(id="Literal")):
            return True
    return False


def children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes below in which faults are planted, with the field in which each stands."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in UNTOUCHED_FIELDS:
                yield field, child


def name_of(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_negated_by_comparison(condition: ast.AST) -> bool:
    return isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], NEGATED)
