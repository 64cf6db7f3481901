"""Twins: tests that correct code fails, which look and fail like what they were made from."""

from __future__ import annotations

import ast
import functools
import io
import random
import re
import tokenize

from lightning_ray.tasks.swe import offline, sources, traces, twins
from lightning_ray.tasks.swe.evidence import Suite

TESTS = '''\
import unittest
import pytest


def test_words():
    """A docstring stays."""
    assert "abc".upper() == "ABC"  # ä
    assert len([1, 2, 3]) == 3 and True


@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4)])
def test_sum(a, b):
    assert a + 1 == b


class CaseTest(unittest.TestCase):
    def test_case(self):
        value = [1, "two"]
        self.assertEqual(value, [1, "two"])
        with self.assertRaises(KeyError):
            {}["x"]


class OtherTest(CaseTest):
    pass
'''


def test_a_twin_differs_in_one_line_of_its_own_test():
    lines = TESTS.split("\n")
    for name, node in twins.functions(TESTS).items():
        found = twins.candidates(TESTS, name, random.Random(1))
        assert len(found) >= 3
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        for edit in found:
            changed = twins.edited(TESTS, [edit])
            ast.parse(changed)
            pairs = zip(lines, changed.split("\n"), strict=True)
            different = [number for number, (a, b) in enumerate(pairs, 1) if a != b]
            assert len(different) == 1 and first <= different[0] <= node.end_lineno
            assert "A docstring stays." in changed
    assert twins.owners(TESTS) == {"OtherTest::test_case": "CaseTest::test_case"}


# -- style -----------------------------------------------------------------------------------------


@functools.cache
def tokens(source: str) -> list[str]:
    return [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline)]


def shape(constant: str) -> str:
    """A constant without what it is: prefix, quotes, length, the class of each character."""
    prefix = re.match(r"0[xob]|[A-Za-z]*(?=[\"'])|", constant, re.IGNORECASE)[0]
    rest = re.sub(r"[^\W\d_]", lambda m: "A" if m[0].isupper() else "a", constant[len(prefix) :])
    return prefix + re.sub(r"\d", "0", rest)


def assert_in_style(source: str, edit: twins.Edit) -> None:
    before, after = tokens(source), tokens(twins.edited(source, [edit]))
    start = next(n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    longer = len(after) - len(before)  # `is not` has one more than `is`
    assert after[start + 1 + max(longer, 0) :] == before[start + 1 - min(longer, 0) :]
    was, becomes = before[start], after[start]
    if was[0] in "\"'.0123456789" or was[-1] in "\"'":
        assert longer == 0 and shape(was) == shape(becomes)
    else:
        usual = {"True", "False", "ValueError", "TypeError", "KeyError", "IndexError"}
        assert becomes in {*before} | usual


STYLES = r"""
def test_styles():
    assert f(0xff, 0XAB, 0b101, 1_000, 1.5e10, 2j, .5) == 'a' "b" r'\d+' "c"
    assert h(b"x" Rb'y')
    assert g("it's", u'ab', f"{1}", "<tag>x</tag>", "{:d}", "é", "")
    assert 1 < 2
    assert f() is not None
    assert "k" not in {}
    with raises(OSError): h("frog", True)
"""


def test_nobody_can_tell_a_twin_by_its_style():
    seen = []
    for _ in range(5):
        seen += twins.candidates(STYLES, "test_styles", random.Random(len(seen)))
    for edit in {*seen}:
        assert_in_style(STYLES, edit)
    assert len({edit[:3] for edit in seen}) > 15
    assert not [edit for edit in seen if edit[3] in ("!=", "is", ">=", "in")]  # not used there


def test_the_twins_of_the_offline_tasks_are_in_the_style_of_their_files():
    for record in offline.records()[::15]:
        tree = sources.tree(record.package)
        for name, edits in offline.hidden_twins()[record.bug_patch].items():
            source = tree[name.partition("::")[0]].decode()
            for edit in edits[:1]:
                assert_in_style(source, edit)


def test_what_stands_for_an_operator_is_as_usual_as_the_operator():
    one = "def test_a():\n    assert f() == 'x'\n"
    rare = one * 9 + "    assert f() != 'x'\n"
    usual = one * 2 + "    assert f() != 'x'\n"
    for source, offered in ((rare, False), (usual, True)):
        edits = twins.candidates(source, "test_a", random.Random(0))
        assert ("!=" in {edit[3] for edit in edits}) is offered


# -- how they fail ---------------------------------------------------------------------------------

CODE = "def double(x): return 2 * x\ndef negative(x): return -x\n"
BUG = "def double(x): return 2 * x + 1\ndef negative(x): return -x\n"
DOUBLE = """
import pytest
from code_under import double, negative

class TestDouble:
    def test_both(self):
        assert double(2) == 4
        assert negative(1) == -1
        with pytest.raises(TypeError):
            negative(None)
"""


def test_kept_are_twins_in_which_the_same_statements_fail_as_in_the_test():
    name = "test_a.py::TestDouble::test_both"
    here, near = (7, 28, 29, "7"), (7, 28, 29, "6")
    exact, elsewhere = (7, 22, 23, "3"), (8, 31, 32, "2")
    block, passing = (9, 27, 36, "KeyError"), (7, 28, 29, "5")
    edits = [here, near, elsewhere, block, passing, exact]
    python = str(sources.environment() / "bin" / "python")
    suite = Suite(python, ("test_a.py",), frozenset({name}), frozenset(), {name: edits})
    tree = {"code_under.py": BUG.encode(), "test_a.py": DOUBLE.encode()}
    own, others = traces.traces(tree, suite, [name])[name]
    assert own == [[(7, "AssertionError", 1)]]
    assert [len(trace[0]) for trace in others] == [1, 1, 2, 2, 0, 1]
    assert traces.alike(tree, suite, [name]) == {name: [here, near, exact]}
    few = {name: [here, elsewhere, block, passing]}
    assert traces.alike(tree, Suite(python, (), suite.expected, frozenset(), few), [name]) == {}
