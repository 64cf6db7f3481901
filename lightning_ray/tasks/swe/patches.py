"""Unified diffs as text: what they touch, and the way back.

`files` lists what a diff as git writes it does to each file; `reverse` is the diff that undoes it.
SWE-smith stores the patch that *makes* a bug, SWE-bench the one that mends it, so each needs the
other's direction. Invariant: `reverse(reverse(diff)) == diff` for text diffs without renames of
unequal headers; a diff that cannot be read is a PatchError with its line.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)", re.DOTALL)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # str.splitlines also ends lines at a form feed
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_PATH = re.compile(rf"(?:---|\+\+\+|(?:rename|copy) (?:from|to)) ({_QUOTED}|[^\t\n]+)")
_BOTH = re.compile(rf"diff --git (?:({_QUOTED}|\S+) ({_QUOTED}|\S+)$|(.+))")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED = dict(zip(b"abtnvfr", b"\a\b\t\n\v\f\r", strict=True))
_PAIRS = {  # header lines that change places or names when a diff is turned round
    "rename from ": "rename to ",
    "copy from ": "copy to ",
    "old mode ": "new mode ",
    "new file mode ": "deleted file mode ",
}
_SWAPPED = _PAIRS | {after: before for before, after in _PAIRS.items()}


class PatchError(ValueError):
    """The text is no unified diff; the message says which line is wrong."""


@dataclass(frozen=True)
class FilePatch:
    """What a diff does to one file: `before` and `after` are its paths (None: made or deleted),
    `header` the lines up to the first hunk, `hunks` the lines after."""

    before: str | None
    after: str | None
    header: tuple[str, ...]
    hunks: tuple[str, ...]

    @property
    def path(self) -> str:
        return self.after or self.before or ""


def files(diff: str) -> list[FilePatch]:
    """The parts of a diff, file by file.

    Raises:
        PatchError: the text is no unified diff, or a binary one.
    """
    return [_file(number, lines) for number, lines in _sections(diff)]


def reverse(diff: str) -> str:
    """The diff that undoes `diff`.

    >>> print(reverse("--- a/x\\n+++ b/x\\n@@ -1 +1,2 @@\\n-a\\n+b\\n+c\\n"), end="")
    --- a/x
    +++ b/x
    @@ -1,2 +1 @@
    -b
    -c
    +a
    """
    return "".join("".join(_reversed(part)) for part in files(diff))


def paths(diff: str) -> frozenset[str]:
    """Every path that a diff reads or writes."""
    return frozenset(p for part in files(diff) for p in (part.before, part.after) if p)


def new_lines(diff: str) -> dict[str, list[int]]:
    """The numbers of the lines of each file, as it is afterwards, that a diff adds, without those
    that it takes away elsewhere. Binary parts have none.

    >>> new_lines("--- a/x\\n+++ b/x\\n@@ -1,3 +1,4 @@\\n-a\\n+b\\n c\\n-d\\n+ a\\n+e\\n")
    {'x': [1, 4]}
    """
    every: list[FilePatch] = []
    for first, section in _sections(diff) if diff.strip() else ():
        with contextlib.suppress(PatchError):
            every.append(_file(first, section))
    gone = {line[1:].strip() for part in every for line in part.hunks if line[:1] == "-"}
    found: dict[str, list[int]] = {}
    for part in every:
        number, numbers = 0, found.setdefault(part.path, [])
        for line in part.hunks:
            if hunk := _HUNK.match(line):
                number = int(hunk[2].partition(",")[0])
            elif line[:1] in ("+", " ", "\n"):
                if line[:1] == "+" and line[1:].strip() not in gone:
                    numbers.append(number)
                number += 1
    return found


def touched(diff: str) -> frozenset[str]:
    """Every path that stands in the headers of a diff, old or new, also of one that `files` cannot
    read. Of a line `diff --git` with spaces in its paths, every way to part it counts.

    >>> sorted(touched('rename from x\\nrename to "t\\\\303\\\\251"'))
    ['té', 'x']
    """
    found: set[str] = set()
    left = (0, 0)  # lines of the open hunk that are still to come, before and after
    for line in diff.split("\n"):
        line = line.removesuffix("\r")
        if max(left) > 0 and not line.startswith("diff --git "):  # no line of a hunk begins so
            left = (left[0] - (line[:1] in " -"), left[1] - (line[:1] in " +"))
        elif hunk := _HUNK.match(line):
            before, after = (int(side.partition(",")[2] or 1) for side in hunk.groups()[:2])
            left = (before, after)
        elif match := _PATH.match(line):
            found.add(_plain(match[1], prefixed=line[:3] in ("---", "+++")))
        elif match := _BOTH.match(line):
            sides = [match[1], match[2]] if match[1] else []
            for place in re.finditer(' (?="?b/)', match[3] or ""):
                sides += [match[3][: place.start()], match[3][place.end() :]]
            found |= {_plain(side, prefixed=True) for side in sides}
    return frozenset(found - {"", "/dev/null"})


def _plain(written: str, *, prefixed: bool) -> str:
    """A path of a header, without quotes and without `a/` or `b/`."""
    if written[:1] == written[-1:] == '"' and len(written) > 1:

        def meant(match: re.Match[bytes]) -> bytes:
            code = match[1]
            return bytes([int(code, 8) & 255 if code.isdigit() else _ESCAPED.get(code[0], code[0])])

        written = _ESCAPE.sub(meant, written[1:-1].encode()).decode(errors="surrogateescape")
    return written[2:] if prefixed and written[:2] in ("a/", "b/") else written


def _sections(diff: str) -> Iterator[tuple[int, list[str]]]:
    """Each file's lines, with the number of the first; text before the first file is dropped."""
    lines = _LINE.findall(diff)
    starts = []
    left = [0, 0]  # lines of the open hunk that are still to come, before and after
    git = any(line.startswith("diff --git ") for line in lines)
    for number, line in enumerate(lines):
        if left[0] > 0 or left[1] > 0:
            kind = line[:1]
            left[0] -= kind in (" ", "-", "\n")
            left[1] -= kind in (" ", "+", "\n")
        elif found := _HUNK.match(line):
            left = [int(side.partition(",")[2] or 1) for side in found.groups()[:2]]
        elif line.startswith("diff --git " if git else "--- "):
            starts.append(number)
    if not starts:
        raise PatchError(f"no file's header in a text of {len(lines)} lines: it is no diff")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield start + 1, lines[start:end]


def _file(number: int, lines: list[str]) -> FilePatch:
    first = next((i for i, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    header, hunks = lines[:first], lines[first:]
    names: dict[str, str] = {}
    for line in header:
        if line.startswith(("GIT binary patch", "Binary files ")):
            raise PatchError(f"line {number}: a binary patch")
        for key in ("--- ", "+++ ", "rename from ", "rename to "):
            if line.startswith(key):
                names[key] = line[len(key) :].split("\t")[0].rstrip("\n")
    if "--- " in names and "+++ " in names:
        before, after = _name(names["--- "], "a/"), _name(names["+++ "], "b/")
    elif "rename from " in names:
        before, after = names["rename from "], names["rename to "]
    elif match := re.fullmatch(r"diff --git a/(.+) b/\1\n?", header[0] if header else ""):
        before = None if any(x.startswith("new file") for x in header) else match[1]
        after = None if any(x.startswith("deleted file") for x in header) else match[1]
    else:
        raise PatchError(f"line {number}: no `--- ` and `+++ ` lines: {lines[0][:80]!r}")
    for offset, line in enumerate(hunks):
        if line[:1] not in (" ", "+", "-", "@", "\\", "\n"):
            raise PatchError(f"line {number + first + offset}: not part of a hunk: {line[:80]!r}")
    return FilePatch(before, after, tuple(header), tuple(hunks))


def _name(written: str, prefix: str) -> str | None:
    if written == "/dev/null":
        return None
    if written.startswith('"'):
        raise PatchError(f"a quoted path: {written}")
    return written.removeprefix(prefix)


def _reversed(part: FilePatch) -> Iterator[str]:
    swapped = {"a/": "b/", "b/": "a/"}
    late: list[str] = []  # `rename to`, `new mode` and `+++` stand after their counterparts
    for line in part.header:
        key = next((key for key in _SWAPPED if line.startswith(key)), None)
        if line.startswith("diff --git "):
            found = re.fullmatch(r"diff --git a/(.+) b/(.+)(\n?)", line)
            yield f"diff --git a/{found[2]} b/{found[1]}{found[3]}" if found else line
        elif found := re.fullmatch(r"index (\w+)\.\.(\w+)(.*\n?)", line, re.DOTALL):
            yield f"index {found[2]}..{found[1]}{found[3]}"
        elif line.startswith(("--- ", "+++ ")):
            written = line[4:]
            turned = swapped.get(written[:2], written[:2]) + written[2:]
            if line.startswith("--- "):
                late.append("+++ " + turned)
            else:
                yield "--- " + turned
                yield from late
                late = []
        elif key in ("rename from ", "copy from ", "old mode "):
            late.append(_SWAPPED[key] + line[len(key) :])
        elif key in ("rename to ", "copy to ", "new mode "):
            yield _SWAPPED[key] + line[len(key) :]
            yield from late
            late = []
        elif key:
            yield _SWAPPED[key] + line[len(key) :]
        else:
            yield line
    yield from late
    removed: list[str] = []
    added: list[str] = []
    last: list[str] | None = None
    for line in part.hunks:
        if line.startswith("+"):
            last = removed
            removed.append("-" + line[1:])
        elif line.startswith("-"):
            last = added
            if removed:  # a new run of changes, although no context lies between
                yield from removed
                yield from added
                removed, added = [], []
                last = added
            added.append("+" + line[1:])
        elif line.startswith("\\") and last is not None:
            last.append(line)
        else:
            yield from removed
            yield from added
            removed, added, last = [], [], None
            found = _HUNK.fullmatch(line)
            yield f"@@ -{found[2]} +{found[1]} @@{found[3]}" if found else line
    yield from removed
    yield from added
