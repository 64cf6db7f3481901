"""Tests that must fail, made from tests that must pass: what forged results cannot tell apart.

A *twin* of a test is the same test with one place changed (a constant, a comparison, an expected
exception), so that correct code fails it. Code under test shares a process with the tests and may
forge any result there; but to know whether it looks at a test or at its twin, it must know what the
right answer is, and then it need not cheat. `candidates` lists the changes that a test offers,
`edited` applies some to a file. Which of them do make correct code fail is measured once, when
tasks are made.

Invariants: a change stays on its line and inside its function, so a file's other tests and all line
numbers are what they were; what a constant becomes looks like what it was. Standard library only.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator

Edit = tuple[int, int, int, str]  # line (from 1), first and last column in UTF-8 bytes, new text

_OPERATORS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Lt: ("<", ">="),
    ast.GtE: (">=", "<"),
    ast.Gt: (">", "<="),
    ast.LtE: ("<=", ">"),
}
_METHODS = {
    "assertEqual": "assertNotEqual",
    "assertEquals": "assertNotEqual",
    "assertNotEqual": "assertEqual",
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
}
_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_OTHER_ERROR = "BufferError"  # that no test here expects

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> dict[str, _Function]:
    """The tests of a file by their name within it, as in `test_a` or `TestB::test_c`."""
    found: dict[str, _Function] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, _Function) and node.name.startswith("test"):
                found[prefix + node.name] = node

    visit(ast.parse(source).body, "")
    return found


def owners(source: str) -> dict[str, str]:
    """Which function an inherited test is, for the tests that a class of the file has from another
    one: `{"Derived::test_a": "Base::test_a"}`."""
    defined = functions(source)
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    found: dict[str, str] = {}

    def line(name: str) -> Iterator[str]:
        yield name
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id in classes and base.id != name:
                yield from line(base.id)

    for name in classes:
        for base in line(name):
            for full in defined:
                prefix, _, test = full.rpartition("::")
                if prefix == base:
                    found.setdefault(f"{name}::{test}", full)
    return {test: owner for test, owner in found.items() if test != owner}


def function_of(test_id: str) -> str:
    """`tests/test_a.py::T::test_b` of `tests/test_a.py::T::test_b[x-1]`."""
    return test_id.partition("[")[0]


def candidates(source: str, name: str, rng: random.Random) -> list[Edit]:
    """Changes to the test `name` of a file, those first that look least like a change."""
    node = functions(source)[name]
    lines = [line.encode() for line in source.split("\n")]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    own = b"\n".join(lines[first : node.end_lineno]).decode()
    ranked: list[tuple[int, float, Edit]] = []
    for rank, place, text in _places(node, lines, rng):
        edit = (place.lineno, place.col_offset, place.end_col_offset or 0, text)
        if place.lineno == place.end_lineno and _parses(edited(own, [_moved(edit, first)])):
            ranked.append((rank, rng.random(), edit))
    return [edit for _, _, edit in sorted(ranked)]


def edited(source: str, edits: Iterable[Edit]) -> str:
    """The file with changes made, of which no two overlap."""
    lines = [line.encode() for line in source.split("\n")]
    for line, start, end, text in sorted(edits, reverse=True):
        before = lines[line - 1]
        lines[line - 1] = before[:start] + text.encode() + before[end:]
    return b"\n".join(lines).decode()


def _moved(edit: Edit, lines: int) -> Edit:
    line, start, end, text = edit
    return line - lines, start, end, text


def _parses(function: str) -> bool:
    try:
        ast.parse(f"if 1:\n{function}" if function[:1].isspace() else function)
    except (SyntaxError, ValueError):
        return False
    return True


def _places(
    function: _Function, lines: list[bytes], rng: random.Random
) -> Iterator[tuple[int, ast.expr, str]]:
    """(rank, what to replace, by what) for everything in a test that can be changed."""
    silent = {
        id(part)
        for node in ast.walk(function)
        if isinstance(node, ast.JoinedStr) or _is_docstring(node)
        for part in ast.walk(node)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and id(node) not in silent:
            new = _other(node.value, rng)
            if new is not None and _literal(node, lines) == node.value:
                yield 0, node, new
        elif isinstance(node, ast.Call):
            yield from _calls(node)
        elif isinstance(node, ast.Assert):
            yield from _assertions(node.test, lines)


def _calls(call: ast.Call) -> Iterator[tuple[int, ast.expr, str]]:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in _METHODS and isinstance(call.func, ast.Attribute):
        yield 2, _tail(call.func, len(name)), _METHODS[name]
    elif name in _RAISES and call.args:
        yield 1, call.args[0], _OTHER_ERROR


def _tail(node: ast.Attribute, length: int) -> ast.expr:
    place = ast.Name("attribute")
    place.lineno = node.end_lineno or 0
    place.end_lineno = node.end_lineno
    place.end_col_offset = node.end_col_offset
    place.col_offset = (node.end_col_offset or 0) - length
    return place


def _assertions(test: ast.expr, lines: list[bytes]) -> Iterator[tuple[int, ast.expr, str]]:
    segment = _segment(test, lines)
    if segment is None:
        return
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        was, becomes = _OPERATORS[type(test.ops[0])]
        left, right = _segment(test.left, lines), _segment(test.comparators[0], lines)
        between = segment[len(left or "") : len(segment) - len(right or "")]
        if left and right and segment.startswith(left) and between.strip() == was:
            yield 2, test, left + between.replace(was, becomes) + right
            return
    yield 3, test, f"not ({segment})"


def _segment(node: ast.expr, lines: list[bytes]) -> str | None:
    if node.lineno != node.end_lineno:
        return None
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def _literal(node: ast.Constant, lines: list[bytes]) -> object:
    segment = _segment(node, lines)
    try:
        return None if segment is None else ast.literal_eval(segment)
    except (ValueError, SyntaxError):
        return None


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _other(value: object, rng: random.Random) -> str | None:
    """A constant of the same kind that is not `value`, as source."""
    match value:
        case bool():
            return repr(not value)
        case int():
            return repr(value + rng.choice((1, 2, 3)))
        case float():
            return repr(value + rng.choice((1.0, 2.0, 0.5)))
        case str():
            return repr(_altered(value, rng))
        case bytes() if value.isascii():
            return repr(_altered(value.decode(), rng).encode())
    return None


def _altered(text: str, rng: random.Random) -> str:
    letters = [at for at, character in enumerate(text) if character.isalnum()]
    if not letters:
        return text + rng.choice("aeio")
    at = rng.choice(letters)
    pool = "123456789" if text[at].isdigit() else "bcdfghklmnprstvw"
    return text[:at] + rng.choice([c for c in pool if c != text[at]]) + text[at + 1 :]
