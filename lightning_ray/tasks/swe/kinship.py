"""Which bugs must be in one split, because who has seen one knows something of the other.

Bugs are kin if they are in the same outermost function (of a module, or of a class: a method), if
one is of a class and the other anywhere in it, or if they change the same lines, as they do in code
that was copied. `families` parts rows into sets that share no kin, also by way of third ones.

Invariant: what a bug is in is read off the clean source by line numbers, not off names alone: two
methods of one name are two, and a function in a function is its outer one.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from lightning_ray.records import Json
from lightning_ray.tasks.swe import patches
from lightning_ray.tasks.swe.evidence import Tree

_HUNK = re.compile(r"@@ -(\d+)")


@dataclass(frozen=True)
class _Span:
    """Lines of a class or of an outermost function; `name` is `Class.method` of a method."""

    name: str
    first: int
    last: int


def families(rows: Iterable[Json], trees: Mapping[str, Tree]) -> list[list[Json]]:
    """The rows by kin, in their order. `trees` are the clean sources by the rows' `package`."""
    rows, forest = list(rows), _Forest()
    used: set[tuple[str, str, str]] = set()
    for number, row in enumerate(rows):
        forest.join(number, (row["package"], changed(row["patch"])))
        for path, name in places(row, trees[row["package"]]):
            used.add((row["package"], path, name))
            forest.join(number, (row["package"], path, name))
    for package, path, name in used:
        for above in _above(name):
            if (package, path, above) in used:
                forest.join((package, path, name), (package, path, above))
    found: dict[Hashable, list[Json]] = defaultdict(list)
    for number, row in enumerate(rows):
        found[forest.root(number)].append(row)
    return list(found.values())


def changed(patch: str) -> frozenset[str]:
    """The lines that a patch removes or adds, without the spaces around them."""
    hunks = (line for part in patches.files(patch) for line in part.hunks)
    return frozenset(line[1:].strip() for line in hunks if line[:1] in "+-") - {""}


def places(row: Json, clean: Tree) -> set[tuple[str, str]]:
    """The path and the outermost function of each changed line; of a bug in a class as a whole the
    class, and of a line in neither the file, whose name is empty."""
    entity = row["function"].partition("::")[2]
    found = set()
    for part in patches.files(row["patch"]):
        source = clean[part.before or ""].decode()
        spans = _parsed(source)
        for line in _lines(part, source.split("\n")):
            around = [span.name for span in spans if span.first <= line <= span.last]
            whole = [name for name in around if name.rpartition(".")[2] == entity]
            found.add((part.path, (whole or around[::-1] or [""])[0]))
    return found


def _lines(part: patches.FilePatch, source: list[str]) -> Iterator[int]:
    """The numbers, before the patch, of the lines that it removes, and of those after which it
    adds some. Empty lines are nobody's."""
    number = 0
    for line in part.hunks:
        if hunk := _HUNK.match(line):
            number = int(hunk[1])
        elif line[:1] == "+" and line[1:].strip():
            # What is added behind an empty line belongs to what stands before that.
            yield next((n for n in range(number - 1, 0, -1) if source[n - 1].strip()), 0)
        elif line[:1] in "- \n":
            if line[:1] == "-" and line[1:].strip():
                yield number
            number += 1


@functools.lru_cache(maxsize=64)  # many bugs are in one file
def _parsed(source: str) -> tuple[_Span, ...]:
    return tuple(_spans(ast.parse(source)))


def _spans(node: ast.AST, owner: str = "") -> Iterator[_Span]:
    """Those below a node, a class before what is in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield _Span(owner + child.name, first, child.end_lineno or first)
        if isinstance(child, ast.ClassDef):
            yield from _spans(child, f"{owner}{child.name}.")
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _spans(child, owner)


def _above(name: str) -> Iterator[str]:
    """The classes that a name is in, and the file."""
    while name:
        name = name.rpartition(".")[0]
        yield name


class _Forest:
    """Disjoint sets of what was joined."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def root(self, one: Hashable) -> Hashable:
        while (parent := self._parent.get(one, one)) != one:
            one = parent
        return one

    def join(self, one: Hashable, other: Hashable) -> None:
        self._parent[self.root(one)] = self.root(other)
