"""Which twins of a test a bug does not tell from the test itself.

Code under test can do more than swallow a failure: it can go on behind it and count how many
statements of a test fail. A bug breaks some of them; a twin that is changed elsewhere has one more,
so who forges a pass where one fails beats the coin. `alike` runs hidden tests and their twins on
the tree with the bug, all *softened* (each assertion, each call and each block that expects an
exception is tried and goes on), and keeps the twins in which the same statements fail with the same
exceptions, if possible with values that are no further from each other than in the test itself.

Invariants: of each test it keeps `MIN_TWINS` twins or more, or none; what it is given was seen to
fail on the clean tree, which is not asked again.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeGuard

from lightning_ray.tasks.swe import cleanroom, twins
from lightning_ray.tasks.swe.cleanroom import Protection
from lightning_ray.tasks.swe.evidence import Suite, Tree

MIN_TWINS = 2  # of a test that has any: one would be the same in every run
MOST = 6  # kept for a task, per test
TEST_SECONDS = 5.0  # of one test: a bug may be an endless loop

# A line, an exception's name, and how many words the two sides of a comparison differ in.
Trace = list[tuple[int, str, int]]

# What softened tests need, and how a trace comes out: behind the name of its test.
CONFTEST = """
import builtins, difflib, json, re
import pytest

seen, trace = [], []

def see(value):
    seen.append(value)
    return value

def apart():
    sides = [re.findall(r"\\w+|\\W", repr(value)[:5000]) for value in seen[-2:]]
    matcher = difflib.SequenceMatcher(None, *sides, autojunk=False)
    return max(map(len, sides)) - sum(block.size for block in matcher.get_matching_blocks())

def soft(line, error, compared):
    compared = compared and isinstance(error, AssertionError) and len(seen) > 1
    trace.append([line, type(error).__name__, apart() if compared else 0])

builtins.__see__, builtins.__soft__ = see, soft
builtins.__softened__ = (Exception, pytest.fail.Exception)

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == "call":
        if call.excinfo:
            trace.append([0, call.excinfo.typename, 0])
        outcome.get_result().nodeid += "\\n" + json.dumps(trace)
        trace.clear()
"""
_TRY = """
try:
    pass
except __softened__ as __error__:
    __soft__(0, __error__, False)
"""


def alike(
    tree: Tree,
    suite: Suite,
    names: Iterable[str],
    protection: Protection = cleanroom.UNPROTECTED,
) -> dict[str, list[twins.Edit]]:
    """The twins of these functions (`FILE::NAME`) that fail like them on a tree with a bug. A
    function that has not `MIN_TWINS` is left out.

    Raises:
        RoomFault: no process could be started.
    """
    found = traces(tree, suite, names, protection)
    kept: dict[str, list[twins.Edit]] = {}
    for name, (own, others) in found.items():
        pairs = list(zip(suite.twins[name], others, strict=True))
        same = [edit for edit, trace in pairs if like(own, trace)]
        close = [edit for edit, trace in pairs if like(own, trace, as_close=True)]
        chosen = close if len(close) >= MIN_TWINS else same
        if len(chosen) >= MIN_TWINS:
            kept[name] = chosen[:MOST]
    return kept


def like(own: list[Trace], other: list[Trace], *, as_close: bool = False) -> bool:
    """Do a twin's traces look like the test's? `as_close`: also in how far values are apart."""
    if [*map(len, own)] != [*map(len, other)] or not any(own):
        return False
    return all(
        a[:2] == b[:2] and (not as_close or b[2] <= a[2])
        for mine, its in zip(own, other, strict=True)
        for a, b in zip(mine, its, strict=True)
    )


def traces(
    tree: Tree,
    suite: Suite,
    names: Iterable[str],
    protection: Protection = cleanroom.UNPROTECTED,
) -> dict[str, tuple[list[Trace], list[list[Trace]]]]:
    """For each function: the traces of its tests as they are, and as each of its twins."""
    by_file: dict[str, list[str]] = {}
    for name in sorted(names):
        by_file.setdefault(name.partition("::")[0], []).append(name)
    copies: dict[str, tuple[str, int]] = {}
    changed = {**tree, "conftest.py": tree.get("conftest.py", b"") + CONFTEST.encode()}
    for path, inside in by_file.items():
        for number in range(1 + max(len(suite.twins[name]) for name in inside)):
            some = [n for n in inside if number <= len(suite.twins[n])]
            edits = [suite.twins[name][number - 1] for name in some if number]
            source = twins.edited(tree[path].decode(), edits)
            copy = f"{path.removesuffix('.py')}_{number}.py"
            copies[copy] = path, number
            changed[copy] = softened(source, {n.partition("::")[2] for n in some}).encode()
    whole = replace(suite, targets=tuple(copies))
    report = cleanroom.run(changed, whole, test_seconds=TEST_SECONDS, protection=protection)
    got: dict[tuple[str, int], list[Trace]] = {}
    for shown in sorted(report.outcomes):
        test, _, trace = shown.partition("\n")
        copy, _, rest = test.partition("::")
        if trace and copy in copies:
            path, number = copies[copy]
            name = suite.function(f"{path}::{rest}")
            got.setdefault((name, number), []).append([tuple(e) for e in json.loads(trace)])
    return {
        name: (
            got.get((name, 0), []),
            [got.get((name, n), []) for n in range(1, 1 + len(suite.twins[name]))],
        )
        for inside in by_file.values()
        for name in inside
    }


def softened(source: str, names: set[str]) -> str:
    """The file with no tests but these, in which what fails is noted, and the rest goes on."""
    tree = ast.parse(source)
    tree.body = _softened(tree.body, "", names)
    return ast.unparse(ast.fix_missing_locations(tree))


def _softened(body: list[ast.stmt], prefix: str, names: set[str]) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            node.body = _softened(node.body, f"{prefix}{node.name}::", names) or [ast.Pass()]
        elif _is_test(node):
            if f"{prefix}{node.name}" not in names:
                continue
            _Softener().generic_visit(node)
        kept.append(node)
    return kept


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:4] == "test"


class _Softener(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = node.test
        compared = isinstance(test, ast.Compare) and len(test.ops) == 1
        if isinstance(test, ast.Compare) and compared:
            test.left, test.comparators = _seen(test.left), [_seen(test.comparators[0])]
        return _tried(node, compared)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if not isinstance(node.value, ast.Call):
            return node
        compared = getattr(node.value.func, "attr", "") == "assertEqual"
        if compared:
            node.value.args[:2] = map(_seen, node.value.args[:2])
        return _tried(node, compared)

    def visit_With(self, node: ast.With) -> ast.AST:
        calls = [
            item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)
        ]
        if any(getattr(c.func, "attr", getattr(c.func, "id", "")) in twins.RAISES for c in calls):
            return _tried(node, False)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:  # one inside the test
        return node


def _seen(value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("__see__", ast.Load()), [value], [])


def _tried(node: ast.stmt, compared: bool) -> ast.stmt:
    [attempt] = ast.parse(_TRY.replace("0", str(node.lineno)).replace("False", str(compared))).body
    assert isinstance(attempt, ast.Try)
    attempt.body = [node]
    return attempt
