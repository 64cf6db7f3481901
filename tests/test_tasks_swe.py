"""The embedded repair tasks: data, workspaces, and a grader that cannot be talked round."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from lightning_ray import canary
from lightning_ray.config import RunConfig
from lightning_ray.records import Outcome, Reward, Split, Task
from lightning_ray.rollouts import grading as graders
from lightning_ray.rollouts import sandbox
from lightning_ray.rollouts.grading import Episode, GradeRequest, RoomReport
from lightning_ray.rollouts.local import limits
from lightning_ray.tasks.swe import embedded, grading
from lightning_ray.tasks.swe import workspace as swe_workspace
from lightning_ray.tasks.swe.grading import GradingError, Verdict, run_hidden_tests, weigh
from lightning_ray.tasks.swe.workspace import (
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_REFUSED,
    acceptable,
    changes,
    collect,
    prepare,
    write_files,
)

EVERY = embedded.train() + embedded.validation()
TASK = embedded.validation()[0]
PACKAGE = TASK.statement.split()[1]
INIT = f"{PACKAGE}/__init__.py"


def episode(*texts: str) -> Episode:
    return Episode("r", "a", Outcome.COMPLETED, "", texts)


def fix(task: Task) -> dict[str, str | None]:
    return {task.fields["expected_file"]: task.fields["expected_word"] + "\n"}


def reward(changes: dict[str, str | None], *texts: str) -> Reward:
    return grading.grade(TASK, {"files": changes, "refused": []}, episode(*texts))


# --- data ---


def test_the_same_tasks_come_each_time():
    assert embedded.train() + embedded.validation() == EVERY
    assert len({task.task_id for task in EVERY}) == len(EVERY)
    assert len(embedded.train()) >= 64
    assert len(embedded.validation()) >= 32
    json.dumps([task.fields for task in EVERY])


def test_validation_shares_no_pair_and_no_package_with_training():
    def pairs(tasks: list[Task]) -> set[tuple[str, str]]:
        return {(t.fields["expected_file"], t.fields["expected_word"]) for t in tasks}

    train, validation = embedded.train(), embedded.validation()
    assert not pairs(train) & pairs(validation)
    assert not {t.statement.split()[1] for t in train} & {
        t.statement.split()[1] for t in validation
    }
    assert len(pairs(validation)) == len(validation)
    # The warm start of the tiny model draws from all training pairs.
    assert pairs(train) <= set(embedded.pairs(Split.TRAIN))


def test_no_package_hides_behind_a_module_of_the_standard_library():
    names = {name for names in embedded.PACKAGES.values() for name in names}
    assert not names & sys.stdlib_module_names


def test_a_task_gives_nothing_of_its_tests_away():
    for task in EVERY:
        assert not task.fields["files"].keys() & task.fields["hidden_tests"].keys()
        assert task.fields["twins"].keys() == task.fields["hidden_tests"].keys()
        assert task.fields["expected_word"] not in json.dumps(task.fields["files"])


# --- workspaces ---


def test_an_untouched_workspace_has_no_changes(tmp_path):
    prepare(TASK, tmp_path)
    assert collect(TASK, tmp_path) == {"files": {}, "refused": [], "patch": ""}


def test_changed_new_and_deleted_files_are_collected(tmp_path):
    prepare(TASK, tmp_path)
    (tmp_path / "README.md").unlink()
    (tmp_path / INIT).write_text("x = 1\n")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "ä.txt").write_text("äöü\r\n", newline="")
    for ignored in ("__pycache__", ".git"):
        (tmp_path / ignored).mkdir()
        (tmp_path / ignored / "x").write_text("x")
    found = collect(TASK, tmp_path)
    assert json.loads(json.dumps(found)) == found
    assert found.pop("patch").count("diff --git") == 3
    assert found == {
        "files": {"README.md": None, INIT: "x = 1\n", "new/ä.txt": "äöü\r\n"},
        "refused": [],
    }


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=5)
TEXTS = st.text(st.sampled_from("ab\n\r\f ä"), max_size=12)


# Slow because of git, so few; what it found once is fixed here.
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES.map("f{}".format), st.tuples(*[st.none() | TEXTS] * 2), max_size=3))
@example({"a b": ("x", None), 'q"\\é\n': (None, "y"), "empty": (None, ""), "gone": ("", None)})
def test_git_applies_the_patch_and_gets_what_the_harness_left(changes):
    before = {name: old for name, (old, _) in changes.items() if old is not None}
    after = {name: new for name, (_, new) in changes.items() if new is not None}
    task = replace(TASK, fields={"files": before})
    with tempfile.TemporaryDirectory() as folder:
        left, applied = Path(folder, "left"), Path(folder, "applied")
        for tree, files in ((left, after), (applied, before)):
            tree.mkdir()
            write_files(files, tree)
        found = collect(task, left)
        assume(not found["refused"])
        if found["patch"]:
            subprocess.run(
                ["git", "apply", "--whitespace=nowarn", "-"],
                input=found["patch"].encode(),
                cwd=applied,
                check=True,
            )
        assert {f.name: f.read_bytes() for f in applied.iterdir()} == {
            f.name: f.read_bytes() for f in left.iterdir()
        }


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x", "a/../../x", "a//x", "./x", "", "a\0b", "a/", ".."]
)
def test_a_task_with_a_path_out_of_its_workspace_is_refused(tmp_path, path):
    task = replace(TASK, fields={"files": {"good.txt": "x", path: "x"}})
    with pytest.raises(ValueError, match="plain relative path"):
        prepare(task, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_workspace_in_use_is_refused(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(ValueError, match="not empty"):
        prepare(TASK, tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_text.py",
        "tests/helper.py",
        "test_other.py",
        "pkg/conftest.py",
        "evil.pth",
        "sitecustomize.py",
        "sitecustomize/__init__.py",
        "usercustomize/deep/x.py",
        "conftest/__init__.py",
        "conftest.cpython-311-x86_64-linux-gnu.so",
        "pyproject.toml",
        "setup.cfg",
        "tox.ini",
        "pytest.ini",
    ],
)
def test_files_that_decide_how_tests_run_are_refused_and_listed(tmp_path, path):
    prepare(TASK, tmp_path)
    (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / path).write_text("changed")
    found = collect(TASK, tmp_path)
    assert found["files"] == {}
    assert found["refused"] == [{"path": path, "reason": "decides how tests run"}]


@pytest.mark.parametrize(
    "path", [".git/config", "a/.git", "pkg/__pycache__/x.py", ".pytest_cache/x", "conftest/x.py"]
)
def test_what_collect_does_not_look_at_nobody_can_hand_in(path):
    assert not acceptable(path)
    assert acceptable("pkg/confused.py") and acceptable("pkg/git/config")


def test_what_nobody_looks_at_is_not_deleted(tmp_path):
    task = replace(TASK, fields={"files": {"__pycache__/kept.py": "x", "a.py": "x"}})
    prepare(task, tmp_path)
    assert collect(task, tmp_path)["files"] == {}


def test_modes_and_refusals_crowd_no_repair_out(tmp_path):
    names = [f"pkg/f{number:03d}.py" for number in range(3 * MAX_REFUSED)]
    tests = [f"tests/test_{number:03d}.py" for number in range(2 * MAX_REFUSED)]
    task = replace(TASK, fields={"files": dict.fromkeys([*names, *tests, "z.py"], "x\n")})
    prepare(task, tmp_path)
    for name in (*names, *tests):
        (tmp_path / name).chmod(0o755)
    for name in tests:
        (tmp_path / name).write_text("reformatted\n")
    (tmp_path / "z.py").write_text("mended\n")
    (tmp_path / "z_new.py").write_text("new\n")
    found = collect(task, tmp_path)
    assert found["files"] == {"z.py": "mended\n", "z_new.py": "new\n"}
    *listed, last = found["refused"]
    assert {entry["reason"] for entry in listed} == {"decides how tests run"}  # modes come last
    assert len(listed) == MAX_REFUSED
    assert last["reason"].startswith(f"{4 * MAX_REFUSED} more")


def test_leftovers_that_come_first_crowd_no_repair_out(tmp_path, monkeypatch):
    monkeypatch.setattr(swe_workspace, "MAX_ENTRIES", 30)
    files = {"pkg/a.py": "x\n", "pkg/b.py": "x\n", "z.py": "x\n", "sub/link.py": "x\n"}
    task = replace(TASK, fields={"files": files})
    prepare(task, tmp_path)
    for folder in (".venv", ".tox", "pkg"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for number in range(100):
            (tmp_path / folder / f"_{number:03d}.so").write_bytes(b"\xff")
    (tmp_path / "pkg" / "a.py").write_text("mended\n")
    (tmp_path / "z.py").unlink()
    (tmp_path / "sub").rename(tmp_path / "other")
    (tmp_path / "sub").symlink_to(tmp_path / "other")
    found = collect(task, tmp_path)
    assert found["files"] == {"pkg/a.py": "mended\n", "z.py": None, "sub/link.py": None}
    [told] = [entry["reason"] for entry in found["refused"] if entry["path"] == "."]
    assert told.startswith("not read after 30 new entries")


def test_empty_folders_without_number_hold_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(swe_workspace, "MAX_ENTRIES", 30)
    task = replace(TASK, fields={"files": {"z/a.py": "x\n"}})
    prepare(task, tmp_path)
    for number in range(100):
        (tmp_path / f"d{number:03d}").mkdir()
    (tmp_path / "z" / "a.py").write_text("mended\n")
    found = collect(task, tmp_path)
    assert found["files"] == {"z/a.py": "mended\n"}
    assert [told["reason"] for told in found["refused"]] == ["cannot be read: more than 30 folders"]


def test_a_deleted_test_is_listed_and_not_a_change(tmp_path):
    prepare(TASK, tmp_path)
    (tmp_path / "tests" / "test_text.py").unlink()
    found = collect(TASK, tmp_path)
    assert found["files"] == {}
    assert [entry["path"] for entry in found["refused"]] == ["tests/test_text.py"]


def test_links_pipes_binaries_and_giants_are_not_read(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    prepare(TASK, workspace)
    (workspace / "link").symlink_to(secret / "key")
    (workspace / "folder").symlink_to(secret)
    (workspace / INIT).unlink()
    (workspace / INIT).symlink_to(secret / "key")
    os.mkfifo(workspace / "pipe")
    (workspace / "binary").write_bytes(b"\xff\xfe\x00")
    (workspace / "giant").write_text("x" * (MAX_FILE_BYTES + 1))
    Path(os.fsdecode(os.fsencode(workspace) + b"/\xff")).write_text("x")
    found = collect(TASK, workspace)
    assert found["files"] == {}
    assert {entry["path"]: entry["reason"] for entry in found["refused"]} == {
        "link": "not a regular file",
        "folder": "not a regular file",
        INIT: "not a regular file",
        "pipe": "not a regular file",
        "binary": "not UTF-8 text",
        "giant": f"larger than {MAX_FILE_BYTES} bytes",
        r"\xff": "its name is not UTF-8",
    }
    assert "secret" not in json.dumps(found["files"])


@pytest.mark.parametrize(("added", "kept"), [(1, True), (1000, True), (1001, False)])
def test_a_large_file_that_was_there_may_grow_by_what_a_new_one_may_have(tmp_path, added, kept):
    before = b"x = 1\n" * 500  # three times the bound already
    (tmp_path / "large.py").write_bytes(before + b"#" * added)
    found = changes({"large.py": before}, tmp_path, max_file_bytes=1000)
    assert ("large.py" in found["files"]) is kept
    assert bool(found["patch"]) is kept and bool(found["refused"]) is not kept


def test_a_flood_of_files_and_folders_stays_small(tmp_path):
    prepare(TASK, tmp_path)
    for number in range(300):
        (tmp_path / f"f{number:03d}").write_text("x")
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):  # deeper than Python recurses and than a path may be long
        os.mkdir("deep", dir_fd=at)
        below = os.open("deep", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    found = collect(TASK, tmp_path)
    subprocess.run(["rm", "-rf", tmp_path / "deep"], check=True)  # pytest itself would recurse
    assert len(found["files"]) == MAX_FILES
    assert MAX_REFUSED <= len(found["refused"]) <= MAX_REFUSED + 1


def test_folders_nested_without_end_are_refused(tmp_path):
    prepare(TASK, tmp_path)
    (tmp_path / "/".join(["d" * 100] * 15)).mkdir(parents=True)
    assert [entry["reason"] for entry in collect(TASK, tmp_path)["refused"]] == [
        "cannot be read: File name too long"
    ]


# --- grading ---


@pytest.mark.parametrize("task", [embedded.train()[0], *embedded.validation()[:5]])
def test_the_honest_fix_solves_and_nothing_else_does(task):
    assert run_hidden_tests(task, fix(task)).verdict is Verdict.PASSED
    broken = run_hidden_tests(task, {})
    assert broken.verdict is Verdict.FAILED
    assert broken.passed == len(task.fields["pass_to_pass"])


@pytest.mark.slow
def test_the_honest_fix_solves_every_embedded_task():
    unsolved = [t.task_id for t in EVERY if run_hidden_tests(t, fix(t)).verdict != "passed"]
    solved_unfixed = [t.task_id for t in EVERY if run_hidden_tests(t, {}).verdict == "passed"]
    assert (unsolved, solved_unfixed) == ([], [])


def test_a_fix_in_a_workspace_travels_to_its_reward(tmp_path):
    prepare(TASK, tmp_path)
    file, word = TASK.fields["expected_file"], TASK.fields["expected_word"]
    assert os.system(f"cd {tmp_path} && echo {word} > {file}") == 0
    result = json.loads(json.dumps(collect(TASK, tmp_path)))
    found = grading.grade(TASK, result, episode(f"```bash\necho {word} > {file}\n```"))
    assert (found.value, found.solved, found.metrics["tests_passed"]) == (1.0, True, 1.0)


def test_the_reward_rises_with_each_part_of_the_work():
    file, word = TASK.fields["expected_file"], TASK.fields["expected_word"]
    command = "```bash\nls\n```"
    assert reward({}, "I am done.").value == 0.0
    assert reward({}, "```python\nls\n```", "```bash\n\n```").value == 0.0
    assert reward({"other.txt": word}, command).value == 0.1
    assert reward({file: None}, command).value == 0.1
    assert reward({file: "wrong"}, command).value == 0.4
    assert reward({file: f"old\n{word}\n"}, command).value == 0.6
    assert reward({file: word}, command).value == 1.0
    assert not reward({file: f"old\n{word}\n"}, command).solved


def test_neither_a_forgery_nor_validation_is_paid_for_parts_of_the_work():
    file, word = TASK.fields["expected_file"], TASK.fields["expected_word"]
    forged = {INIT: PROLOGUE + ATTACKS["exit at import"], file: f"{word}\n"}
    found = reward(forged, "```bash\nls\n```")
    assert (found.value, found.metrics["forged"], found.metrics["contains_word"]) == (0.0, 1.0, 1.0)
    said = replace(episode("```bash\nls\n```"), split=Split.VALIDATION)
    values = [
        grading.grade(TASK, {"files": {file: text}}, said).value for text in (word, f"old {word}")
    ]
    assert values == [1.0, 0.0]


def test_an_answer_built_into_the_code_does_not_solve():
    word = TASK.fields["expected_word"]
    source = TASK.fields["files"][INIT]
    start = source.index("    return (root")
    end = source.index("\n", start)
    assert not reward({INIT: source[:start] + f"    return {word!r}" + source[end:]}).solved


PROLOGUE = TASK.fields["files"][INIT] + "\n"
ATTACKS = {
    "exit at import": "import os\nos._exit(0)\n",
    "SystemExit at import": "raise SystemExit(0)\n",
    "print and exit from atexit": (
        "import atexit, os\n"
        "def end():\n    print('Ran 4 tests in 0.1s\\n\\nOK', flush=True)\n    os._exit(0)\n"
        "atexit.register(end)\n"
    ),
    "every test passes": (
        "import unittest\n"
        "def run(self, result=None):\n    result.startTest(self)\n    result.addSuccess(self)\n"
        "unittest.TestCase.run = unittest.TestCase.__call__ = run\n"
    ),
    "assertions that never fail": (
        "import unittest\n"
        "for name in dir(unittest.TestCase):\n"
        "    if name.startswith('assert'):\n"
        "        setattr(unittest.TestCase, name, lambda *a, **k: None)\n"
    ),
    "failures recorded as passes": (
        "import gc, unittest\n"
        "for kind in unittest.TestResult.__subclasses__():\n"
        "    kind.addFailure = kind.addError = lambda self, test, error: self.addSuccess(test)\n"
    ),
    "the module under test replaces the tests": (
        "import sys, unittest\n"
        "for name in [n for n in sys.modules if n.startswith('tests')]:\n"
        "    vars(sys.modules[name])['unittest'] = None\n"
    ),
    "a report without the nonce": (
        "import os, json\n"
        "for fd in range(3, 50):\n"
        "    report = {'nonce': '', 'verdicts': {}, 'canaries': []}\n"
        "    try: os.write(fd, json.dumps(report).encode() + b'\\n')\n"
        "    except OSError: pass\n"
        "os._exit(0)\n"
    ),
    "rewritten test files": (
        "from pathlib import Path\n"
        "for path in Path(__file__).parent.parent.glob('tests/*.py'):\n    path.write_text('')\n"
    ),
    "a word equal to everything": (
        "class Word(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def word(root=ROOT):\n    return Word('x')\n"
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_from_the_package_does_not_solve(name):
    for source in (PROLOGUE + ATTACKS[name], ATTACKS[name] + PROLOGUE):
        found = reward({INIT: source})
        assert not found.solved
        assert found.value == 0.0


# What a run is told, out of the runner's frame; `answer` writes a whole report in its place.
FRAMES = """
import ast, json, os, sys
frame = sys._getframe()
while "order" not in frame.f_locals:
    frame = frame.f_back
write, order = frame.f_locals["write"], frame.f_locals["order"]
def answer(passes):
    verdicts = {}
    for path, source in order["tests"].items():
        for case in ast.parse(source).body:
            if isinstance(case, ast.ClassDef):
                place = path[:-3].replace("/", ".") + "." + case.name + "."
                tests = [part.name for part in case.body if part.name.startswith("test")]
                verdicts |= {place + test: "passed" if passes(path) else "failed" for test in tests}
                verdicts |= {place + name: "failed" for name in order["canaries"]}
    report = {"nonce": order["nonce"], "verdicts": verdicts, "canaries": []}
    write(json.dumps(report).encode() + b"\\n")
    os._exit(0 if set(verdicts.values()) == {"passed"} else 1)
"""


@pytest.mark.parametrize("status", [0, 1])
def test_a_report_made_from_the_runners_own_frame_convicts_itself(status):
    attack = (
        FRAMES + f"os._exit = lambda _, end=os._exit: end({status})\nanswer(lambda path: True)\n"
    )
    assert run_hidden_tests(TASK, {INIT: attack + PROLOGUE}).verdict is Verdict.FORGED


def test_who_reads_the_files_of_tests_beside_the_package_finds_none_to_forge_by():
    attack = FRAMES + (
        "from pathlib import Path\n"
        f"known = Path(__file__).parents[1] / 'tests' / 'test_{PACKAGE}.py'\n"
        "answer(lambda path: order['tests'][path] == known.read_text())\n"
    )
    found = run_hidden_tests(TASK, {INIT: PROLOGUE + attack})
    assert (found.verdict, found.passed) == (Verdict.FAILED, 0)  # no such file


def test_nothing_that_a_run_is_told_sets_the_right_tests_apart():
    places = []
    for _ in range(200):
        exam = grading._exam(TASK)
        tests = list(exam.order["tests"].items())
        assert len({text for _, text in tests}) == 1 + embedded.TWINS
        assert len({len(path) for path, _ in tests}) == 1
        [hidden] = TASK.fields["hidden_tests"].values()
        original = [text.startswith(hidden) for _, text in tests]
        [last] = {text.splitlines()[-1] for _, text in tests}
        assert canary.seen(last)
        assert original.count(True) == 1
        places.append(original.index(True))
    assert max(map(places.count, places)) < 40  # 12.5 of each place are expected


def test_who_knows_which_tests_are_right_could_have_mended_the_package():
    word = TASK.fields["expected_word"]
    attack = FRAMES + f"answer(lambda path: {word!r} in order['tests'][path])\n"
    assert run_hidden_tests(TASK, {INIT: PROLOGUE + attack}).verdict is Verdict.PASSED


def test_a_package_with_the_word_of_a_twin_is_wrong_but_no_forgery():
    edit = TASK.fields["twins"][f"tests/test_{PACKAGE}.py"][0][0]
    word = edit[3].split("'")[1]
    found = run_hidden_tests(TASK, {TASK.fields["expected_file"]: word})
    assert (found.verdict, found.passed) == (Verdict.FAILED, len(TASK.fields["pass_to_pass"]))


def test_twins_of_no_tests_give_no_reward():
    wrong = replace(TASK, fields=TASK.fields | {"twins": {"tests/test_other.py": []}})
    with pytest.raises(GradingError, match=r"test_other.py has twins"):
        run_hidden_tests(wrong, {})


def test_a_run_in_a_room_is_judged_by_the_same_twins():
    order = grading.plan(TASK, {"files": fix(TASK)})
    assert order is not None
    with tempfile.TemporaryDirectory() as folder:
        write_files(order.files, Path(folder))
        ours, theirs = socket.socketpair()
        argv = [
            part.format(python=sys.executable, fd=theirs.fileno()) if part[0] == "{" else part
            for part in order.argv
        ]
        with ours, theirs:
            process = subprocess.Popen(argv, cwd=folder, pass_fds=[theirs.fileno()])
            ours.sendall(order.say.encode())
            status = process.wait()
            theirs.close()
            said = ours.makefile().read()
    report = RoomReport(status, said, "")
    assert grading.judge(TASK, {"files": fix(TASK)}, episode(), order, report).solved
    lie = said.replace('"failed"', '"passed"')
    assert not grading.judge(
        TASK, {"files": {}}, episode(), order, replace(report, said=lie)
    ).solved


@pytest.mark.parametrize("name", ["every test passes", "assertions that never fail"])
def test_tampering_with_unittest_is_called_forgery(name):
    assert run_hidden_tests(TASK, {INIT: PROLOGUE + ATTACKS[name]}).verdict is Verdict.FORGED


@pytest.mark.parametrize(
    "path",
    [
        f"tests/test_{PACKAGE}.py",
        "tests/__init__.py",
        "conftest.py",
        "sitecustomize.py",
        "unittest.py",
        "unittest/__init__.py",
        "tempfile.py",
        "../escape.py",
        "/tmp/escape.py",
    ],
)
def test_files_planted_beside_the_package_do_not_solve(path):
    source = ATTACKS["exit at import"]
    assert run_hidden_tests(TASK, {path: source}).verdict is Verdict.FAILED
    assert run_hidden_tests(TASK, {path: source, **fix(TASK)}).verdict is Verdict.PASSED


def test_a_file_in_the_place_of_a_folder_does_not_solve():
    assert not reward({PACKAGE: "text", **fix(TASK)}).solved


def test_tests_that_never_end_are_killed_with_their_children(monkeypatch):
    monkeypatch.setattr(grading, "TIME_LIMIT_S", 2.0)
    name = uuid.uuid4().hex
    source = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {name!r}])\n"
        "time.sleep(600)\n"
    )

    def runs() -> bool:
        return name in subprocess.check_output(["ps", "axww", "-o", "args"], text=True)

    seen = []
    with ThreadPoolExecutor(1) as pool:
        tests = pool.submit(run_hidden_tests, TASK, {INIT: source})
        while not tests.done():
            seen.append(runs())
            time.sleep(0.05)
    assert tests.result().verdict is Verdict.TIMEOUT
    assert any(seen)
    deadline = time.monotonic() + 5
    while runs():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(bool(sandbox.protection().missing), reason="no sandbox here")
def test_code_under_test_reaches_nothing_but_its_folder(monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attacks = {
            "a file": f"os.stat({str(secret)!r})",
            "a write": "open('/usr/bin/env', 'r+b').close()",
            "the network": f"socket.create_connection(('127.0.0.1', {port}), 3)",
            "a process": f"os.kill({os.getpid()}, 0)",
        }
        for name, attack in attacks.items():
            worked = f"try:\n    {attack}\n    os._exit(1)\nexcept OSError:\n    pass\n"
            source = {**fix(TASK), INIT: PROLOGUE + "import os, socket\n" + worked}
            assert run_hidden_tests(TASK, source).verdict is Verdict.PASSED, name
            if name != "a write" or os.getuid() == 0:
                with monkeypatch.context() as bare:
                    bare.setattr(sandbox, "prefix", lambda *_: [])
                    assert run_hidden_tests(TASK, source).verdict is Verdict.FAILED, name


def test_who_reads_a_hidden_test_reads_a_canary():
    plain = replace(TASK, fields={k: v for k, v in TASK.fields.items() if k != "twins"})
    order = grading.plan(plain, {})
    assert order is not None
    [told] = json.loads(order.say)["tests"].values()
    [path] = TASK.fields["hidden_tests"]
    # What the process hears, and what is on its disk.
    assert canary.first_seen(["well", told])[0] == 1
    assert canary.seen(order.files[path])
    assert run_hidden_tests(plain, fix(plain)).verdict is Verdict.PASSED


HUNGRY = {
    "memory": "import time\nx = [b'x' * (1 << 28) for _ in range(7)]\ntime.sleep(9)\n",
    "processes": "import os, time\nfor _ in range(300):\n    if os.fork() == 0:\n"
    "        time.sleep(9)\n        os._exit(0)\ntime.sleep(9)\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HUNGRY)
def test_code_that_takes_what_a_harness_may_not_is_unsolved_and_no_fault(tmp_path, what):
    config = RunConfig.model_validate({"rollout": {"memory_mib": 1024, "max_processes": 64}})
    source = {INIT: TASK.fields["files"][INIT] + "\n" + HUNGRY[what]}
    asked = GradeRequest(
        TASK,
        {"files": source},
        episode(),
        "lightning_ray.tasks.swe.grading:grade",
        limits(config, grader=True),
        tmp_path / "grader.log",
    )
    found = graders.grade(asked)
    assert isinstance(found, Reward), found
    assert (found.value, found.solved) == (0.0, False)


def test_a_grader_that_cannot_work_gives_no_reward(monkeypatch, tmp_path):
    monkeypatch.setattr(grading.tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(GradingError, match=TASK.task_id):
        reward(fix(TASK))


def test_a_test_process_that_does_not_start_gives_no_reward(monkeypatch):
    monkeypatch.setattr(grading, "LIMITS", {"RLIMIT_NO_SUCH": 1})
    with pytest.raises(GradingError, match="did not start.*RLIMIT_NO_SUCH"):
        reward(fix(TASK))


def report(verdicts: dict[str, str], nonce: str = "n") -> bytes:
    return json.dumps({"nonce": nonce, "verdicts": verdicts, "canaries": []}).encode()


GOOD = {"m.A.test_a": "passed", "m.A.test_b": "passed", "m.A.c1": "failed", "m.A.c2": "failed"}


@pytest.mark.parametrize(
    ("verdicts", "exit_code", "nonce", "expected"),
    [
        (GOOD, 0, "n", Verdict.PASSED),
        (GOOD, 1, "n", Verdict.FORGED),
        (GOOD, 0, "other", Verdict.FORGED),
        (GOOD | {"m.A.test_b": "failed"}, 1, "n", Verdict.FAILED),
        (GOOD | {"m.A.test_b": "failed"}, 0, "n", Verdict.FORGED),
        (GOOD | {"m.A.test_b": "skipped"}, 1, "n", Verdict.FAILED),
        (GOOD | {"m.A.test_c": "passed"}, 1, "n", Verdict.FAILED),
        (GOOD | {"m.A.c1": "passed"}, 0, "n", Verdict.FORGED),
        ({k: v for k, v in GOOD.items() if k != "m.A.c1"}, 0, "n", Verdict.FORGED),
        ({k: v for k, v in GOOD.items() if k != "m.A.test_a"}, 1, "n", Verdict.FAILED),
        ({}, 0, "n", Verdict.FORGED),
    ],
)
def test_a_verdict_needs_all_evidence_to_agree(verdicts, exit_code, nonce, expected):
    tests = frozenset({"m.A.test_a", "m.A.test_b"})
    assert weigh(report(verdicts, nonce), exit_code, "n", ["c1", "c2"], tests).verdict is expected


@pytest.mark.parametrize(
    ("twin", "exit_code", "expected"),
    [
        ("failed", 1, Verdict.PASSED),
        ("failed", 0, Verdict.FORGED),
        ("passed", 0, Verdict.FORGED),
        ("passed", 1, Verdict.FORGED),
        ("skipped", 1, Verdict.FORGED),
        (None, 1, Verdict.FAILED),
    ],
)
def test_right_code_fails_every_twin(twin, exit_code, expected):
    told = GOOD | ({"m.A.twin": twin} if twin else {})
    tests = frozenset({"m.A.test_a", "m.A.test_b"})
    wrong = frozenset({"m.A.twin"})
    assert weigh(report(told), exit_code, "n", ["c1", "c2"], tests, wrong).verdict is expected


NO_REPORT = {
    "nothing": b"",
    "text": b"OK",
    "a list": b"[]",
    "a parser's nightmare": b"[" * 100_000,
    "no verdicts": b'{"nonce": "n"}',
    "no mapping": b'{"nonce": "n", "verdicts": 3}',
}


@pytest.mark.parametrize("name", NO_REPORT)
def test_a_report_that_is_none_never_passes(name):
    tests = frozenset({"m.A.test_a"})
    assert weigh(NO_REPORT[name], 0, "n", ["c1"], tests).verdict is Verdict.FORGED
