"""Tests that must fail, made from tests that must pass: what forged results cannot tell apart.

A *twin* of a test is the same test with one token changed (a constant, an operator, an expected
exception), so that correct code fails it. Code under test shares a process with the tests and may
forge any result there; but to know whether it looks at a test or at its twin, it must know what the
right answer is, and then it need not cheat. `candidates` lists the changes that a test offers,
`edited` applies some to a file. Which of them do make correct code fail is measured once, when
tasks are made; which of those a bug does not tell from the test itself, by `traces.py`.

Invariants: a change stays on its line and inside its function, so a file's other tests and all line
numbers are what they were. Nobody can tell by style: all tokens but one stay as they are, byte for
byte; a constant keeps its prefix, quotes, length, and the class of each character; what stands for
an operator, a method or an exception is one that the file uses in that place, operators and methods
about as often as the first. *Not* promised is that it makes sense: a misspelt word or a sum that is
wrong can be seen by who understands it (such changes come last). Standard library only.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import random
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
    "assertNotEqual": "assertEqual",
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
}
RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_ERRORS = ("ValueError", "TypeError", "KeyError", "IndexError")  # if a file expects one kind only
# An operator that a file has less than this often for each time of its contrary would show.
_COMMON = 0.25
_OTHERS = 2  # constants of the same file, or altered ones, that are tried for each constant

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_STRING = re.compile(r"([A-Za-z]*)(\"\"\"|'''|\"|')(.*)(\2)", re.DOTALL)
_NUMBER = re.compile(r"(0[xXoObB])?()(.*)()", re.DOTALL)
_PLACE = re.compile(r"<[^<>]*>|{[^{}]*}|%\S|\\.|&\w+;")  # in a string: whose letters have a meaning
_LETTERS = ("aeiou", "bcdfghklmnprst", "AEIOU", "BCDFGHKLMNPRST")
_WORD = re.compile(r"[A-Za-z]{4,}")  # that a reader knows, and how it is spelt


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
    """Changes to the test `name` of a file: first the one of each line that looks least like a
    change, then the second of each, ..."""
    file = _read(source)
    function = file.functions[name]
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)]) - 1
    own = b"\n".join(file.lines[first : function.end_lineno]).decode()
    by_line: dict[int, dict[Edit, tuple[int, float]]] = {}
    for rank, edit in itertools.chain(
        _constants(file, function, first, rng), _assertions(file, function, rng)
    ):
        if _parses(edited(own, [_moved(edit, first)])):
            by_line.setdefault(edit[0], {}).setdefault(edit, (rank, rng.random()))
    ordered = [
        (turn, rank, chance, edit)
        for found in by_line.values()
        for turn, (edit, (rank, chance)) in enumerate(sorted(found.items(), key=lambda x: x[1]))
    ]
    return [edit for _, _, _, edit in sorted(ordered)]


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


# -- what a file is written like -------------------------------------------------------------------


@dataclass(frozen=True)
class _Constant:
    """A number or a string on one line. `where` is as in an edit."""

    where: tuple[int, int, int]
    text: str

    @functools.cached_property
    def parts(self) -> tuple[str, str, str]:
        """What stands before its characters, these, and what stands after them."""
        match = (_NUMBER if self.text[0] in ".0123456789" else _STRING).fullmatch(self.text)
        assert match is not None, self.text
        before, quote, body, after = match.groups()
        return (before or "") + quote, body, after

    @property
    def style(self) -> tuple[str, str, str]:
        """Constants of one style look alike: prefix, quotes, and each character's class."""
        before, body, after = self.parts
        return before, "".join(map(_class, body)), after


def _class(character: str) -> str:
    if character.isdigit():
        return "0"
    if character.isalpha():
        return "A" if character.isupper() else "a"
    return character


@dataclass(frozen=True)
class _File:
    """A file of tests: its constants, and what stands in the places where a twin can differ."""

    lines: list[bytes]
    functions: dict[str, _Function]
    constants: list[_Constant]
    styles: dict[tuple[str, str, str], Counter[str]]  # how often the file has each constant
    errors: Counter[str]  # that tests expect
    words: Counter[str]  # operators and methods of assertions


@functools.lru_cache(maxsize=8)
def _read(source: str) -> _File:
    tree = ast.parse(source)
    lines = [line.encode() for line in source.split("\n")]
    constants = list(_tokens(source, tree))
    styles: dict[tuple[str, str, str], Counter[str]] = {}
    for constant in constants:
        styles.setdefault(constant.style, Counter())[constant.text] += 1
    errors: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words[_name(node)] += 1
            if _name(node) in RAISES and node.args and isinstance(node.args[0], ast.Name):
                errors[node.args[0].id] += 1
        elif isinstance(node, ast.Assert):
            words[_operator(node.test)] += 1
    return _File(lines, functions(source), constants, styles, errors, words)


def _tokens(source: str, tree: ast.Module) -> Iterator[_Constant]:
    """Docstrings and formatted strings are left out, and what goes over several lines."""
    lines = source.split("\n")
    silent = [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (line, first), (last_line, last) = token.start, token.end
        if token.type not in (tokenize.NUMBER, tokenize.STRING) or line != last_line:
            continue
        start, end = (len(lines[line - 1][:column].encode()) for column in (first, last))
        if not any(low <= (line, start) < high for low, high in silent):
            yield _Constant((line, start, end), token.string)


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _operator(test: ast.expr) -> str:
    """What an assertion hangs on: `==`, `not`, `` of a plain one, ..."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _OPERATORS[type(test.ops[0])][0]
    return "not" if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else ""


# -- what can be changed ---------------------------------------------------------------------------


def _constants(
    file: _File, function: _Function, first: int, rng: random.Random
) -> Iterator[tuple[int, Edit]]:
    """(rank, edit): constants of the test that become others of the file, or others at all."""
    own = [c for c in file.constants if first < c.where[0] <= (function.end_lineno or 0)]
    times = Counter(constant.text for constant in own)
    for constant in own:
        # One that must be the same elsewhere in the test would show, if but one of them changes.
        twice = 2 * (times[constant.text] > 1 and len(constant.parts[1]) > 1)
        pool = file.styles[constant.style].copy()
        del pool[constant.text]
        for other in _drawn(pool, _OTHERS, rng):
            yield twice, (*constant.where, other)
        for _ in range(_OTHERS):
            if altered := _altered(constant, rng):
                yield twice + altered[0], (*constant.where, altered[1])
    yield from (
        (1, (node.lineno, node.col_offset, node.end_col_offset or 0, str(not node.value)))
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, bool)
    )


def _drawn(pool: Counter[str], most: int, rng: random.Random) -> Iterator[str]:
    """Some texts, those first that are frequent."""
    pool = pool.copy()
    for _ in range(min(most, len(pool))):
        [text] = rng.choices(sorted(pool), [pool[text] for text in sorted(pool)])
        del pool[text]
        yield text


def _altered(constant: _Constant, rng: random.Random) -> tuple[int, str] | None:
    """(rank, text) of a constant of the same style that differs in one character."""
    before, body, after = constant.parts
    number = not after
    places = [place.span() for place in _PLACE.finditer(body)] if after else []
    words = [word.span() for word in _WORD.finditer(body)] if after else []
    exponent = re.search(r"[eE]", body) if number and not before else None
    options = []
    for at, character in enumerate(body[: exponent.start()] if exponent else body):
        kind = _pool(character, before, number)
        others = [c for c in kind if c != character and not (number and at == 0 and c == "0")]
        if others:
            spelt = any(low <= at < high for low, high in words)
            meant = any(low <= at < high for low, high in places)
            options.append((2 * spelt + 3 * meant, rng.random(), at, rng.choice(others)))
    if not options:
        return None
    rank, _, at, new = min(options)
    return rank, before + body[:at] + new + body[at + 1 :] + after


def _pool(character: str, before: str, number: bool) -> str:
    """Characters that may stand in the place of one."""
    if number:
        digits = {"0b": "01", "0o": "01234567", "0x": "0123456789"}.get(
            before.lower(), "0123456789"
        )
        if before.lower() == "0x" and character in "abcdef":
            return "abcdef"
        if before.lower() == "0x" and character in "ABCDEF":
            return "ABCDEF"
        return digits if character in digits else ""
    if character in "0123456789":
        return "123456789"
    return next((kind for kind in _LETTERS if character in kind), "")


def _assertions(file: _File, function: _Function, rng: random.Random) -> Iterator[tuple[int, Edit]]:
    """(rank, edit): expected exceptions, methods and operators."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            yield from _comparison(file, node.test)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            was = node.func.attr
            becomes = _METHODS.get(was, "")
            end = node.func.end_col_offset or 0
            if _common(file, was, becomes):
                yield 1, (node.func.end_lineno or 0, end - len(was), end, becomes)
        if isinstance(node, ast.Call) and _name(node) in RAISES and node.args:
            error = node.args[0]
            if not isinstance(error, ast.Name):
                continue
            pool = file.errors.copy()
            del pool[error.id]
            pool = pool or Counter(name for name in _ERRORS if name != error.id)
            for other in _drawn(pool, _OTHERS, rng):
                yield 0, (error.lineno, error.col_offset, error.end_col_offset or 0, other)


def _common(file: _File, was: str, becomes: str) -> bool:
    return 0 < file.words[becomes] >= _COMMON * file.words[was]


def _comparison(file: _File, test: ast.expr) -> Iterator[tuple[int, Edit]]:
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return
    left, right = test.left, test.comparators[0]
    was, becomes = _OPERATORS[type(test.ops[0])]
    line, start = left.end_lineno or 0, left.end_col_offset or 0
    if line == right.lineno and _common(file, was, becomes):
        between = file.lines[line - 1][start : right.col_offset].decode()
        if between.strip() == was:
            at = start + between.index(was)
            yield 1, (line, at, at + len(was), becomes)
