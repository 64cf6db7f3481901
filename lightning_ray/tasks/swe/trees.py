"""Repositories as `{path: bytes}`: broken by a patch, without the tests that would tell.

`apply` is `git apply` on such a tree; `without_tests` takes single tests out of their files.

Invariants: trees are never changed in place; what is left of a test file parses, and its other
tests are what they were.
"""

from __future__ import annotations

import ast
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lightning_ray.tasks.swe import patches, twins
from lightning_ray.tasks.swe.cleanroom import stage
from lightning_ray.tasks.swe.evidence import Tree


def apply(tree: Tree, diff: str) -> Tree:
    """The tree after a diff. Raises PatchError: it does not apply, exactly and in every hunk, or
    changes nothing."""
    touched = patches.paths(diff)
    before = {path: content for path, content in tree.items() if path in touched}
    with tempfile.TemporaryDirectory(prefix="lr-apply-") as name:
        folder = Path(name)
        stage(before, folder)
        argv = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"]
        # Where temporary files lie in a repository, git would skip paths that are not below it.
        ceiling = str(folder.resolve().parent)
        path = "/usr/local/bin:/usr/bin:/bin"
        env = {"PATH": path, "GIT_CEILING_DIRECTORIES": ceiling, "HOME": name}
        done = subprocess.run(argv, input=diff.encode(), cwd=folder, capture_output=True, env=env)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise patches.PatchError(f"the patch does not apply: {said[0]}")
        after = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        }
    if after == before:
        raise patches.PatchError("the patch changes nothing")
    return {path: content for path, content in tree.items() if path not in touched} | after


def without_tests(tree: Tree, test_ids: Iterable[str]) -> Tree:
    """The tree without these tests: each one's function is cut out of its file."""
    names: dict[str, set[str]] = {}
    for test_id in test_ids:
        path, _, name = twins.function_of(test_id).partition("::")
        names.setdefault(path, set()).add(name)
    return {**tree, **{path: _cut(tree[path].decode(), found) for path, found in names.items()}}


def _cut(source: str, names: set[str]) -> bytes:
    lines = source.split("\n")
    found = twins.functions(source)
    gone: set[int] = set()
    for name in names:
        node = found[name]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        gone |= set(range(first - 1, node.end_lineno or node.lineno))
    kept = [line for number, line in enumerate(lines) if number not in gone]
    text = "\n".join(kept)
    try:
        ast.parse(text)
    except SyntaxError:  # a class lost its last test
        text = "\n".join(_with_pass(lines, gone, source))
    return text.encode()


def _with_pass(lines: list[str], gone: set[int], source: str) -> list[str]:
    """Like cutting, but where a whole body goes its first line becomes `pass`."""
    stand_ins: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            body = [n for part in node.body for n in range(part.lineno - 1, part.end_lineno or 0)]
            if body and all(number in gone or not lines[number].strip() for number in body):
                stand_ins[min(body)] = " " * node.body[0].col_offset + "pass"
    return [
        stand_ins.get(number, line)
        for number, line in enumerate(lines)
        if number not in gone or number in stand_ins
    ]
