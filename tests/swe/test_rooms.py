"""Graders whose tests run in rooms of their own: which runs a verdict takes, and what the program
of a pod, run here as a process, makes of them."""

from __future__ import annotations

import ast
import base64
import io
import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from attacks import MODULE, PROCESS, Attack
from rooms import carried_out

from lightning_ray.records import Outcome, Reward, Task
from lightning_ray.rollouts import grading, sandbox
from lightning_ray.rollouts.grading import (
    Episode,
    GradeRequest,
    GraderFault,
    RoomOrder,
    RoomReport,
    RoomRun,
)
from lightning_ray.rollouts.local import FamilyError
from lightning_ray.rollouts.pods import changed, entry, guard, staging
from lightning_ray.rollouts.process import Limits
from lightning_ray.tasks.swe import (
    embedded,
    examination,
    layout,
    offline,
    remote,
    sources,
    witness,
)
from lightning_ray.tasks.swe import repository as family
from lightning_ray.tasks.swe.evidence import Judgement, Report, Suite, Verdict
from lightning_ray.tasks.swe.examination import Kind, RoomFault, Trial
from lightning_ray.tasks.swe.grading import GradingError

EPISODE = Episode("r", "r-a0", Outcome.COMPLETED, "", ("I mended it.",))
[RECORD] = [record for record in offline.records() if "b96d2ehw" in record.instance_id]
[TASK] = [task for task in offline.train() + offline.validation() if "b96d2ehw" in task.task_id]

boxed = pytest.mark.skipif(bool(sandbox.protection().missing), reason="no sandbox here")

# -- which runs ------------------------------------------------------------------------------------

A, B, C = "t.py::test_a", "t.py::test_b", "t.py::test_c"
TWINS = {name: [(1, 0, 1, "2"), (1, 0, 1, "3")] for name in (A, B, C)}
SUITE = Suite("python", ("t.py",), frozenset({A}), frozenset({B, C}), TWINS)


def ran(failed: frozenset[str] = frozenset()) -> Report:
    return Report(1, {test: "failed" if test in failed else "passed" for test in (A, B, C)})


def honest(trial: Trial) -> Report:
    """What comes of a trial where the change is a repair."""
    return ran(trial.mask if trial.kind is not Kind.KNOWN_BAD else frozenset({A}))


def examined(
    outcome: Callable[[Trial], Report],
    suite: Suite = SUITE,
    at_once: bool = True,
    rng: random.Random | None = None,
    **more: bool,
) -> tuple[Judgement, list[Trial]]:
    """The verdict, and the trials that it took: all of an answer's at once, or one at a time."""
    done: list[tuple[Trial, Report]] = []
    options = {"known_bad": True} | more
    while not isinstance(
        answer := examination.wanted(suite, done, rng=rng or random.Random(4), **options), Judgement
    ):
        done += [(trial, outcome(trial)) for trial in (answer if at_once else answer[:1])]
    return answer, [trial for trial, _ in done]


def unrepaired(trial: Trial) -> Report:
    """What comes of a trial where the change is none."""
    return ran(frozenset({A}) | trial.mask)


def test_a_tree_that_is_not_solved_takes_two_runs_on_average():
    rng, runs = random.Random(4), []
    for _ in range(200):
        judgement, trials = examined(unrepaired, rng=rng)
        assert judgement.verdict is Verdict.UNSOLVED
        # The last run is the one in which the test that fails is no twin.
        mixed = [trial for trial in trials if trial.kind is Kind.MIXED]
        assert [A in trial.mask for trial in mixed] == [True] * (len(mixed) - 1) + [False]
        runs.append(len(mixed))
    assert {*runs} == {1, 2, 3}
    assert 1.8 < sum(runs) / len(runs) < 2.2


@pytest.mark.parametrize("at_once", [True, False])
def test_in_a_solved_tree_each_test_went_through_its_original_and_twins(at_once):
    judgement, trials = examined(honest, at_once=at_once)
    assert (judgement.verdict, judgement.runs) == (Verdict.SOLVED, 2 + examination.ROUNDS)
    assert [t.kind for t in trials] == [*[Kind.MIXED] * 3, Kind.AS_IT_IS, Kind.KNOWN_BAD]
    assert (judgement.fail_to_pass, judgement.pass_to_pass) == (1, 2)
    plan = trials[0].plan
    for name in (A, B, C):
        seen = [examination._version(SUITE, name, plan, turn) for turn in range(3)]
        assert sorted(seen, key=str) == [*TWINS[name], None]
        assert [name in trial.mask for trial in trials[:3]] == [x is not None for x in seen]


def test_what_is_still_a_guess_runs_alone():
    """Each test must have been met before another room may know its original."""
    done, sizes = [], []
    while isinstance(answer := examination.wanted(SUITE, done, known_bad=True), list):
        sizes.append(len(answer))
        done += [(trial, honest(trial)) for trial in answer]
    assert sizes == [1, 1, 3]


def forger(trials: list[Trial], channel: bool, rng: random.Random) -> bool:
    """Whether a forger who passes what he takes for the original of A is right in all mixed runs.
    He cannot tell texts apart; with a channel between runs he knows which ones he has met, and
    that he was right about them, or he would not be asked again."""
    plan, guesses = trials[0].plan, {}
    wins_at = rng.randrange(3)  # which new text he passes
    for trial in trials:
        text = examination._version(SUITE, A, plan, trial.turn)
        guess = len(guesses) == wins_at if channel else rng.random() < 1 / 3
        passes = guesses.setdefault(text, guess)  # the same text is the same to a hash, too
        if passes != (text is None):
            return False
    return True


@pytest.mark.parametrize(("channel", "chance"), [(True, 1 / 3), (False, 4 / 27)])
def test_a_forger_passes_as_seldom_as_the_page_says(channel, chance):
    rng, wins = random.Random(1), 0
    for _ in range(3000):
        _, trials = examined(honest, rng=rng, known_bad=False)
        wins += forger([t for t in trials if t.kind is Kind.MIXED], channel, rng)
    assert wins / 3000 == pytest.approx(chance, abs=0.03)


BOTH = replace(SUITE, fail_to_pass=frozenset({A, B}), pass_to_pass=frozenset({C}))


def test_what_is_right_of_an_unsolved_tree_is_counted_where_it_matters():
    for seed in range(30):
        judgement, trials = examined(unrepaired, BOTH, rng=random.Random(seed), counted=True)
        assert (judgement.verdict, judgement.right) == (Verdict.UNSOLVED, 1)
        kinds = [trial.kind for trial in trials]
        assert kinds[:4] == [*[Kind.MIXED] * examination.ROUNDS, Kind.AS_IT_IS]
        judgement, trials = examined(unrepaired, BOTH, rng=random.Random(seed))
        assert judgement.right == 0
        # The last one shows that A fails, or the suite as it is was to run beside it.
        assert len([trial for trial in trials if trial.kind is Kind.MIXED]) <= examination.ROUNDS
        # And where no hidden test is right, nothing more is run for it.
        judgement, more = examined(unrepaired, rng=random.Random(seed), counted=True)
        assert len(more) == len(examined(unrepaired, rng=random.Random(seed))[1])


def paid(trial: Trial) -> Report:
    """What a forger shows for partial credit: hidden tests pass, whatever they are, and another
    one fails."""
    return ran(trial.mask - {A, B} | {C})


def test_a_hidden_test_whose_twin_passed_once_is_not_right():
    for seed in range(30):
        judgement, trials = examined(paid, BOTH, rng=random.Random(seed), counted=True)
        assert (judgement.verdict, judgement.right) == (Verdict.UNSOLVED, 0), seed
        assert len([t for t in trials if t.kind is Kind.MIXED]) <= examination.ROUNDS
    untwinned = replace(BOTH, twins={C: TWINS[C]})
    assert examined(paid, untwinned, rng=random.Random(1), counted=True)[0].right == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_a_forger_whom_twins_do_not_make_fail_has_tampered(at_once):
    def forged(trial: Trial) -> Report:
        return ran() if trial.kind is not Kind.KNOWN_BAD else ran(frozenset({A}))

    judgement, trials = examined(forged, at_once=at_once)
    assert judgement.verdict is Verdict.TAMPERED
    assert "must fail did not" in judgement.evidence[0]
    assert len(trials) <= 2 + examination.ROUNDS


def test_a_bug_that_does_what_a_twin_wants_is_unsolved_and_no_forgery():
    wrong = {A}  # what it always fails, but for one of its twins

    def bug(trial: Trial) -> Report:
        text = examination._version(SUITE, A, trial.plan, trial.turn) if trial.mask else None
        return ran(trial.mask | wrong - ({A} if text == TWINS[A][0] else set()))

    rng = random.Random(6)
    found = [examined(bug, rng=rng) for _ in range(30)]
    assert {judgement.verdict for judgement, _ in found} == {Verdict.UNSOLVED}
    assert any(t.kind is Kind.AS_IT_IS for _, trials in found for t in trials)


def test_a_room_in_which_the_known_bad_tree_is_solved_judges_nothing():
    with pytest.raises(RoomFault, match="known-bad tree is solved here"):
        examined(lambda trial: ran(trial.mask))
    judgement, trials = examined(lambda trial: ran(trial.mask), known_bad=False)
    assert (judgement.verdict, len(trials)) == (Verdict.SOLVED, 4)


def test_a_suite_without_twins_has_the_known_bad_tree_only():
    judgement, trials = examined(honest, replace(SUITE, twins={}))
    assert judgement.verdict is Verdict.SOLVED
    assert [trial.kind for trial in trials] == [Kind.AS_IT_IS, Kind.KNOWN_BAD]


def test_nothing_that_a_room_is_given_says_which_run_it_is():
    tree = {"t.py": b"def test_a():\n    assert 1 == 1\n"}
    suite = replace(SUITE, twins={A: [(2, 11, 12, "2")]})
    turn = next(turn for turn in range(3) if examination._version(suite, A, "plan", turn))
    orders = []
    for trial in (Trial(Kind.AS_IT_IS), Trial(Kind.MIXED, frozenset({A}), "plan", turn)):
        order = remote.order(trial, examination.tree_of(trial, tree, None, suite), suite)
        [room] = staging.room_files([order], 32 << 20)
        sent, told = json.loads(room["order"]), json.loads(order.say)
        assert "note" not in sent and A not in room["order"].decode()
        canary = order.note["canary"].encode()
        assert [told.pop("nonce"), told.pop("targets")[-1].encode()] == [
            order.note["nonce"],
            canary,
        ]
        files = {path for path in order.binary if canary.decode() not in path}
        orders.append((told, files, {k: v for k, v in sent.items() if k != "say"}))
    assert orders[0] == orders[1]


# -- in rooms --------------------------------------------------------------------------------------


def graded(folder: Path, files: dict[str, str | None], task: Task = TASK) -> Reward:
    """The reward of changed files, with each run in a room of its own."""
    result, runs = {"files": files, "refused": []}, []
    while isinstance(answer := family.rooms(task, result, EPISODE, runs), list):
        with ThreadPoolExecutor(2) as pool:
            places = [folder / str(len(runs) + number) for number in range(len(answer))]
            reports = pool.map(carried_out, answer, places)
            runs += [RoomRun(*one) for one in zip(answer, reports, strict=True)]
    return answer


def test_in_rooms_an_honest_repair_is_solved_and_no_run_sees_what_another_one_left(tmp_path):
    keeps = "\nfrom pathlib import Path\nPath(__file__).with_name('seen').open('a').write('x')\n"
    reward = graded(tmp_path, {MODULE: sources.tree(RECORD.package)[MODULE].decode() + keeps})
    assert (reward.value, reward.solved) == (1.0, True)
    assert reward.metrics["test_runs"] == 2 + examination.ROUNDS
    assert reward.metrics["fail_to_pass"] == 1.0
    assert reward.metrics["test_seconds"] > 0
    seen = [path.read_text() for path in tmp_path.rglob("tree/parse/seen")]
    assert seen == ["x"] * (1 + examination.ROUNDS)  # the known-bad tree has none of it


def test_in_rooms_the_bug_is_unsolved(tmp_path):
    reward = graded(tmp_path, {})
    assert (reward.solved, reward.metrics["tampered"]) == (False, 0.0)
    assert reward.metrics["test_runs"] <= 2 + examination.ROUNDS


def forgery(folder: Path, attack: Attack) -> dict[str, str | None]:
    """What an attack makes of the package's module."""
    path = folder / MODULE
    path.parent.mkdir(parents=True)
    path.write_bytes(offline.graded_tree(RECORD)[MODULE])
    subprocess.run([sys.executable, "-c", attack.script], cwd=folder, check=True)
    return {MODULE: path.read_text()}


FAST = {"patches runtest", "takes the nonce from the witness's frame and forges everything"}
# By code under test; no pod has the sources or our disk, but this machine has.
HERE = {
    "loads the repaired package while it is tested",
    "fills the disk of the grader",
    "starts very many processes",
}
IN_PODS = {
    # A pod's own tree can be written, canaries included, if they are collected late enough.
    "rewrites the tests on disk": {Verdict.UNSOLVED, Verdict.TAMPERED},
    # It stays there, so nothing is known of it.
    "leaves a JUnit file that takes gigabytes when it is read": {Verdict.UNSOLVED},
}
TRIED = [attack for attack in PROCESS if attack.name not in HERE]


def as_parameter(attack: Attack) -> object:
    marks = [pytest.mark.demand] * (attack.name not in FAST)
    return pytest.param(attack, id=attack.name, marks=marks)


@pytest.mark.parametrize("attack", map(as_parameter, TRIED))
def test_in_rooms_an_attack_ends_as_on_a_node(tmp_path, monkeypatch, attack):
    monkeypatch.setattr(offline, "CPU_S", 10.0)
    task = replace(TASK, fields={**TASK.fields, "timeout_s": attack.limit_s})
    reward = graded(tmp_path / "rooms", forgery(tmp_path / "agent", attack), task)
    tampered = Verdict.TAMPERED if reward.metrics["tampered"] else Verdict.UNSOLVED
    assert reward.value == 0.0
    assert tampered in IN_PODS.get(attack.name, {attack.expect})


@pytest.mark.parametrize("program", [changed, guard, entry, layout, witness])
def test_what_runs_in_an_image_is_python_3_8(program):
    tree = ast.parse(Path(program.__file__).read_text(), feature_version=(3, 8))
    [postponed, *_] = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert postponed.module == "__future__"  # annotations are newer


def first_order() -> RoomOrder:
    [order] = family.rooms(TASK, {"files": {}}, EPISODE, [])
    return order


def test_an_image_without_pytest_is_a_fault_that_says_so(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    order = first_order()
    report = carried_out(order, tmp_path / "room", str(tmp_path / "v" / "bin" / "python"))
    with pytest.raises(GradingError, match=r"No module named 'pytest' \(`python3` of the task's"):
        family.rooms(TASK, {"files": {}}, EPISODE, [RoomRun(order, report)])


def test_an_image_with_another_python_than_the_tasks_is_a_fault_that_says_so(tmp_path):
    task = replace(TASK, fields={**TASK.fields, "python": "3.1"})
    with pytest.raises(GradingError, match=r"this Python is 3\.11, and the task wants 3\.1$"):
        graded(tmp_path, {}, task)


def test_a_run_that_takes_its_pods_memory_is_unsolved_and_no_fault():
    run = RoomRun(first_order(), RoomReport(None, "", "OOMKilled", overran=True))
    assert family.rooms(TASK, {"files": {}}, EPISODE, [run]).solved is False


def test_a_run_that_passes_its_time_is_unsolved(tmp_path):
    slow = {MODULE: "import time\ntime.sleep(60)\n"}
    task = replace(TASK, fields={**TASK.fields, "timeout_s": 3.0})
    reward = graded(tmp_path, slow, task)
    assert (reward.solved, reward.metrics["test_runs"]) == (False, 1)


def test_binary_files_reach_a_room_and_files_come_back(tmp_path):
    code = "import os; print(open('a.bin', 'rb').read()); os.symlink('/etc/passwd', 'link'); " + (
        "open('left.txt', 'w').write('back'); os.mkfifo('pipe'); open('big', 'w').write('x' * 999)"
    )
    order = RoomOrder(
        files={"b.txt": "text"},
        binary={"a.bin": base64.b64encode(b"\xff\x00").decode()},
        argv=["{python}", "-c", code],
        env={},
        say="",
        timeout_s=10,
        most_bytes=500,
        bring=["left.txt", "link", "pipe", "big", "none"],
    )
    report = carried_out(order, tmp_path / "room")
    assert (report.status, report.tail.strip()) == (0, repr(b"\xff\x00"))
    assert report.files == {"left.txt": "back"}
    assert report.too_large == ["big"]


@pytest.mark.parametrize(("code", "ends"), [("print('x' * 501)", True), ("print('x')", False)])
def test_what_ends_a_run_for_its_size_is_told(tmp_path, code, ends):
    order = RoomOrder(
        files={}, argv=["{python}", "-c", f"{code}; import time; time.sleep({5 * ends})"], env={},
        say="", timeout_s=10, most_bytes=500,
    )  # fmt: skip
    report = carried_out(order, tmp_path / "room")
    assert (report.status, report.too_large) == ((None, ["output"]) if ends else (0, []))


def test_a_signal_is_no_exit_status(tmp_path):
    order = RoomOrder({}, ["{python}", "-c", "import os; os.kill(os.getpid(), 1)"], {}, "", 10)
    assert carried_out(order, tmp_path / "room").status == -1


# -- what the agent gets in a pod ------------------------------------------------------------------


def wants_this_machine(task: Task, workspace: Path) -> dict[str, list[str]]:
    return {"path": ["/opt"]} if task.fields["launcher"] == "kubernetes" else {}


def sets_up_in_part(task: Task, workspace: Path) -> dict[str, dict[str, str]]:
    return {"setup": {"program": "pass"}}


def test_a_workspace_for_a_pod_needs_nothing_of_this_machine(tmp_path):
    stage = staging.pack(TASK, "lightning_ray.tasks.swe.repository:prepare")
    assert stage.setup is None
    with tarfile.open(fileobj=io.BytesIO(stage.workspace)) as tar:
        assert {MODULE, ".git/HEAD"} <= {*tar.getnames()}
    with pytest.raises(FamilyError, match="wants folders of this machine"):
        staging.pack(TASK, "test_rooms:wants_this_machine")
    with pytest.raises(FamilyError, match=r"must hold `program` and `say`: .*'say'"):
        staging.pack(TASK, "test_rooms:sets_up_in_part")


# -- the two kinds of graders, each asked in its own process ---------------------------------------


def request(folder: Path, task: Task, grader: str, files: dict[str, str | None]) -> GradeRequest:
    limits = Limits(timeout_s=60, memory_mib=2048)
    return GradeRequest(task, {"files": files}, EPISODE, grader, limits, folder / "grader.log")


def test_a_grader_with_one_room_is_asked_for_its_plan_and_then_judges(tmp_path):
    asked = request(tmp_path, embedded.train()[0], "lightning_ray.tasks.swe.grading:grade", {})
    [order] = grading.advance(asked, [])
    assert isinstance(order, RoomOrder)
    run = RoomRun(order, carried_out(order, tmp_path / "room"))
    reward = grading.advance(asked, [run])
    assert isinstance(reward, Reward)
    assert reward.solved is False


def test_a_grader_with_several_rooms_answers_with_orders_until_it_has_a_reward(tmp_path):
    repair = {MODULE: sources.tree(RECORD.package)[MODULE].decode()}
    asked = request(tmp_path, TASK, "lightning_ray.tasks.swe.repository:grade", repair)
    [order] = grading.advance(asked, [])
    first = RoomRun(order, carried_out(order, tmp_path / "room"))
    more = grading.advance(asked, [first])
    assert [len(asdict(one)["note"]) for one in more] == [6]
    lost = [RoomRun(one, RoomReport(None, "", "nothing")) for one in more]
    fault = grading.advance(asked, [first, *lost])
    assert isinstance(fault, GraderFault)
    assert "the tests did not start in their pod: nothing" in (tmp_path / "grader.log").read_text()


TAKES = {
    "processes": """
        for _ in range(400):
            if os.fork() == 0:
                time.sleep(60)
            time.sleep(0.003)
    """,
    "memory": """
        for _ in range(3):
            if os.fork() == 0:
                held = b"x" * (700 << 20)
                time.sleep(60)
        time.sleep(3)
    """,
    "disk": """
        for number in range(64):
            Path(os.environ["HOME"], str(number)).write_bytes(bytes(16 << 20))
    """,
}


@boxed
@pytest.mark.parametrize("what", TAKES)
def test_code_that_takes_too_much_of_a_node_is_unsolved_and_no_fault_of_the_grader(tmp_path, what):
    repaired = sources.tree(RECORD.package)[MODULE].decode()
    takes = "import os, time\nfrom pathlib import Path\ndef takes():" + TAKES[what] + "\ntakes()\n"
    files = {"parse/greedy.py": takes, MODULE: repaired + "\nfrom . import greedy\n"}
    asked = request(tmp_path, TASK, "lightning_ray.tasks.swe.repository:grade", files)
    reward = grading.grade(asked)
    assert isinstance(reward, Reward), reward
    assert (reward.solved, reward.metrics["tampered"]) == (False, 0.0)
