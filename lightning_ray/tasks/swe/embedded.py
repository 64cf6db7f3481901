"""Small repair tasks that need no download: data for a first run, for CI and for small models.

Each task is a micro-repository: a Python package that reads one word from a file beside it. The
file is missing or holds another word, so the package misbehaves; one shell command that writes
the file mends it. Hidden unit tests check the behaviour that is broken and the behaviour that
must stay.

Invariants: the same seed gives the same tasks; no validation task shares a (file, word) pair or a
package name with a training task.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from lightning_ray.records import Split, Task
from lightning_ray.tasks.swe.twins import Edit

TRAIN_TASKS = 128  # three times what the nine-step example consumes
FEW_TASKS = 4
VALIDATION_TASKS = 32  # enough to tell 3 % from 30 %, few enough for two cores
# Who forges results without knowing the word picks the right file of tests once in 16 times.
TWINS = 15
SEED = 20  # of the shuffles below; part of the data set's identity


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


STEMS = _words(
    "alpha beta data notes report todo log out result list plan test draft index main info"
)
SUFFIXES = (".txt", ".md", ".log", ".cfg")
WORDS = _words(
    "apple river stone cloud tiger lemon piano green happy ocean bread silver winter paper candle "
    "garden window music bridge forest orange coffee summer castle"
)
PACKAGES = {
    Split.TRAIN: _words("acorn anvil basil cedar comet coral daisy ember falcon fern glade hazel"),
    Split.VALIDATION: _words("harbor kelp lantern meadow nimbus orchid pebble quartz"),
}


@dataclass(frozen=True)
class Use:
    """What a package does with its word: a function's source and one call of it with its answer."""

    source: str
    call: str
    answer: str


USES = (
    Use(
        'def greet(name, root=ROOT):\n    return f"{word(root)}, {name}!"',
        'greet("Ada")',
        "{word}, Ada!",
    ),
    Use(
        'def label(number, root=ROOT):\n    return f"{word(root)}-{number:03d}"',
        "label(7)",
        "{word}-007",
    ),
    Use('def shout(root=ROOT):\n    return word(root).upper() + "!"', "shout()", "{WORD}!"),
    Use(
        'def repeat(times, root=ROOT):\n    return " ".join([word(root)] * times)',
        "repeat(2)",
        "{word} {word}",
    ),
)

_PACKAGE = '''\
"""{package} reads its word from {file}."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def word(root=ROOT):
    return (root / "{file}").read_text().strip()


{use}
'''

_TEXT = '''\
"""Text helpers of {package}."""


def tidy(text):
    return " ".join(text.split())
'''

_VISIBLE_TEST = """\
import unittest

from {package} import text


class TextTest(unittest.TestCase):
    def test_tidy(self):
        self.assertEqual(text.tidy(" a  b "), "a b")
"""

_HIDDEN_TEST = """\
import tempfile
import unittest
from pathlib import Path

import {package}
from {package} import text


class BrokenTest(unittest.TestCase):
    def test_word(self):
        self.assertIs(type({package}.word()), str)
        self.assertEqual({package}.word(), {word!r})

    def test_use(self):
        self.assertIs(type({package}.{call}), str)
        self.assertEqual({package}.{call}, {answer!r})


class KeptTest(unittest.TestCase):
    def test_the_word_is_read_from_the_file(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, {file!r}).write_text("kept\\n")
            self.assertEqual({package}.word(Path(folder)), "kept")

    def test_tidy(self):
        self.assertEqual(text.tidy(" c   d "), "c d")
"""


def train() -> list[Task]:
    """The training tasks, in a fixed shuffled order."""
    return _tasks(Split.TRAIN)


def validation() -> list[Task]:
    """The validation tasks, in a fixed shuffled order."""
    return _tasks(Split.VALIDATION)


def few() -> list[Task]:
    """Some validation tasks: for rehearsals, where they are many enough."""
    return validation()[:FEW_TASKS]


def pairs(split: Split) -> list[tuple[str, str]]:
    """The (file, word) pairs of a split, cut from one shuffled list of all pairs."""
    files = [stem + suffix for stem, suffix in itertools.product(STEMS, SUFFIXES)]
    every = list(itertools.product(files, WORDS))
    random.Random(SEED).shuffle(every)
    held_out = every[:VALIDATION_TASKS]
    return held_out if split is Split.VALIDATION else every[VALIDATION_TASKS:]


def statement(package: str, file: str, word: str) -> str:
    """What the agent reads."""
    return f"Package {package} is broken. Create a file named {file} that contains the word {word}."


def _tasks(split: Split) -> list[Task]:
    count = VALIDATION_TASKS if split is Split.VALIDATION else TRAIN_TASKS
    rng = random.Random(f"{SEED}-{split}")
    return [_task(split, number, *pair, rng) for number, pair in enumerate(pairs(split)[:count])]


def _task(split: Split, number: int, file: str, word: str, rng: random.Random) -> Task:
    package, use = rng.choice(PACKAGES[split]), rng.choice(USES)
    answer = use.answer.format(word=word, WORD=word.upper())
    names = {"package": package, "file": file, "word": word, "call": use.call, "answer": answer}
    files = {
        "README.md": f"# {package}\n\nReads its word from {file}.\n",
        f"{package}/__init__.py": _PACKAGE.format(**names, use=use.source),
        f"{package}/text.py": _TEXT.format(**names),
        "tests/test_text.py": _VISIBLE_TEST.format(**names),
    }
    if rng.random() < 0.5:  # half of the files hold a wrong word, the others are missing
        files[file] = rng.choice([other for other in WORDS if other != word]) + "\n"
    module, hidden = f"tests.test_{package}", _HIDDEN_TEST.format(**names)
    # A generator of their own: the tasks are what they were without twins.
    others = random.Random(f"{SEED}-{split}-{number}").sample(
        [other for other in WORDS if other not in (word, files.get(file, "").strip())], TWINS
    )
    twins = [_twin(hidden, word, other, answer, use) for other in others]
    return Task(
        task_id=f"embedded-{split}-{number:03d}",
        statement=statement(package, file, word),
        fields={
            "files": files,
            "hidden_tests": {f"tests/test_{package}.py": hidden},
            "twins": {f"tests/test_{package}.py": twins},
            "fail_to_pass": [f"{module}.BrokenTest.{name}" for name in ("test_use", "test_word")],
            "pass_to_pass": [
                f"{module}.KeptTest.{name}"
                for name in ("test_the_word_is_read_from_the_file", "test_tidy")
            ],
            "expected_file": file,
            "expected_word": word,
        },
    )


def _twin(hidden: str, word: str, other: str, answer: str, use: Use) -> list[Edit]:
    """The edits that make the hidden tests ask for another word, and keep for another one."""
    edits: list[Edit] = []
    for old, new in (
        (f", {word!r})", f", {other!r})"),
        (f", {answer!r})", f", {use.answer.format(word=other, WORD=other.upper())!r})"),
        ('"kept")', f'"{other}")'),
        ('"c d")', f'"c {other[0]}")'),
    ):
        before, _, _ = hidden.partition(old)
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n") - 1
        edits.append((line, column, column + len(old), new))
    return edits
