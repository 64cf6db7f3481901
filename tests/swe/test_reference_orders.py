"""Reference runs in a cluster, without one: orders, transport, verdicts, whose fault it is."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from images import ROWS

from lightning_ray.config import ConfigError
from lightning_ray.records import Outcome
from lightning_ray.rollouts.grading import RoomOrder, RoomReport, RoomRun
from lightning_ray.rollouts.pods import entry, freedoms, manifest, staging
from lightning_ray.rollouts.pods.manifest import Frame, Room
from lightning_ray.rollouts.pods.outcomes import End
from lightning_ray.rollouts.pods.template import JobTemplate, Names
from lightning_ray.tasks.swe import evidence, imaged, layout
from lightning_ray.tasks.swe.preparation import by_secret, cluster, command, reference
from lightning_ray.tasks.swe.preparation.reference import SuiteRun
from lightning_ray.tasks.swe.record import RepositoryTask

RECORDS = {form: RepositoryTask.from_row(row) for form, row in ROWS.items()}
FORMS = pytest.mark.parametrize("form", list(ROWS))
FRAME = Frame("run1", None, 0.25, 2048, 4096, 40.0, None)


def suite(record: RepositoryTask) -> evidence.Suite:
    return imaged.suite(record, "/testbed", ["-p", "plugin"])


def seen(order: RoomOrder) -> dict[str, object]:
    """What a pod gets, without what is drawn anew for each."""
    said, told = json.loads(order.say), json.loads(base64.b64decode(order.binary[layout.ORDER]))
    [canary] = said["targets"][-1:]
    del said["nonce"], told["files"][canary]
    said["targets"].remove(canary)
    files = {path: text for path, text in order.binary.items() if path != layout.ORDER}
    return {"said": said, "told": told, "files": files, "env": order.env, "argv": order.argv}


@FORMS
def test_a_reference_run_is_the_graders_but_for_its_seed(form) -> None:
    record = RECORDS[form]
    first = imaged.advance(record, suite(record), {}, [])
    assert isinstance(first, list)
    bad = cluster.order(record, suite(record), fixed=False, seed=3)
    graders, ours = seen(first[0]), seen(bad)
    assert (ours["said"].pop("shuffle"), graders["said"].pop("shuffle")) == (3, None)
    assert (ours["env"].pop("PYTHONHASHSEED"), graders["env"].pop("PYTHONHASHSEED")) == ("3", "0")
    assert ours == graders
    mended = seen(cluster.order(record, suite(record), fixed=True, seed=0))["told"]
    smith = form == "swe-smith"
    assert mended["diffs"] == ([] if smith else [record.patch, record.test_patch])
    assert mended["alone"] == (["calc/core.py"] if smith else [])


# Prints what looks like a report, and answers as it was told.
COMMAND = """
import os, socket, sys
print("lightning-ray report: " + "AAAA", flush=True)
os.write(2, b"noise")
assert not [name for name in os.environ if name.startswith("LIGHTNING")]
channel = socket.socket(fileno=int(sys.argv[1]))
channel.sendall(channel.makefile().readline().encode() + open("large.bin").read()[:4].encode())
"""


def in_process(order: RoomOrder, folder: Path, most: int = by_secret.MOST_REPORT) -> bytes:
    """The log of a pod that carries out an order."""
    [files] = staging.room_files([order], most)
    told = folder / "termination-log"
    told.touch()
    text = files["order"].replace(b'"/lightning', f'"{folder}/volume'.encode())
    text = text.replace(entry.TERMINATION_LOG.encode(), str(told).encode())
    parts = by_secret.pack(text, files["workspace"])
    room = Room("r", "", "", "grader", 9, parts, by_secret.BOOTSTRAP)
    template = JobTemplate(None, "image").render(RECORDS["swe-smith"].to_task(), NAMES)
    job = manifest.build(template, room, FRAME)
    holds = manifest.secret(job, "uid", room.secret)["stringData"]
    assert sum(map(len, holds.values())) < 1 << 20
    [container] = job["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: holds[one["valueFrom"]["secretKeyRef"]["key"]] for one in container["env"]}
    done = subprocess.run(
        container["command"], env={"PATH": os.environ["PATH"], **env}, stdout=subprocess.PIPE
    )
    return done.stdout


NAMES = Names("r", "r", "r", "train", "http://none")


def test_an_order_goes_in_by_a_secret_and_the_report_out_by_the_log_alone(tmp_path) -> None:
    order = RoomOrder(
        files={"large.bin": base64.b85encode(os.urandom(300_000)).decode()},
        argv=["{python}", "-c", COMMAND, "{fd}"],
        env={},
        say="nonce\n",
        timeout_s=20,
    )
    log = in_process(order, tmp_path)
    report = staging.room_report(by_secret.unpack(log) or b"")
    assert (report.status, report.said) == (0, "nonce\n" + order.files["large.bin"][:4])
    assert report.tail.splitlines()[0] == "lightning-ray report: AAAA" and "noise" in report.tail
    assert log.count(b"\n") == 1 and b"noise" not in log
    assert by_secret.unpack(log[:-1]) is None and by_secret.unpack(log[:-9] + b"\n") is None
    assert by_secret.unpack(b"Traceback: no such thing\n") is None


def test_an_order_that_no_secret_holds_is_said() -> None:
    with pytest.raises(ValueError, match="more than a Secret holds"):
        by_secret.pack(b"{}", os.urandom(1 << 20))


def test_a_pod_of_the_default_template_is_a_graders() -> None:
    task = RECORDS["swe-smith"].to_task()
    room = Room("r", "", "", manifest.GRADER, 9, ("part",))
    job = manifest.build(JobTemplate(str(cluster.TEMPLATE), None).render(task, NAMES), room, FRAME)
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == ROWS["swe-smith"]["image_name"]
    assert job["metadata"]["labels"][manifest.ROLE_LABEL] == manifest.GRADER
    assert pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not freedoms.weaknesses(job)


def told(
    order: RoomOrder, status: int | None = 1, *, errors: int = 0, seconds: float = 2.0, **of: str
) -> SuiteRun:
    """What is made of a run in which tests had these outcomes, by their function's name."""
    note, record = order.note, RECORDS["swe-bench"]
    ids = {test.partition("::")[2]: test for test in suite(record).expected}
    outcomes = {ids[name]: outcome for name, outcome in of.items()}
    outcomes |= {f"{note['canary']}::test_{n}": "failed" for n in range(4)}
    names = {test: test.partition("::")[2] for test in outcomes}
    failed = [names[test] for test, found in outcomes.items() if found == "failed"]
    cases = "".join(f'<testcase name="{name}"><failure/></testcase>' for name in failed)
    report = {
        "nonce": note["nonce"],
        "collected": list(outcomes),
        "names": names,
        "outcomes": outcomes,
        "errors": ["tests/test_add.py"] * errors,
    }
    said = f"ready\n{json.dumps(report)}\n"
    files = {"scratch/junit.xml": f"<testsuites>{cases}</testsuites>"}
    run = RoomRun(order, RoomReport(status, said, "", files=files, seconds=seconds))
    return cluster.outcome(suite(record), run, 300.0)


def test_a_report_is_read_as_a_grader_reads_it() -> None:
    order = cluster.order(RECORDS["swe-bench"], suite(RECORDS["swe-bench"]), fixed=True, seed=0)
    add, zero = "tests/test_add.py::test_add", "tests/test_zero.py::test_zero"
    assert told(order, test_add="passed", test_zero="passed").passed == {add: True, zero: True}
    assert told(order, test_add="failed", test_zero="passed").passed == {add: False, zero: True}
    # As SWE-bench counts it.
    assert told(order, test_add="xfailed", test_zero="xfailed").passed == {add: False, zero: True}
    # A bug that keeps a test file from being imported is a bug.
    assert told(order, errors=1) == SuiteRun({add: False, zero: False}, 2.0)
    assert "ended early, with status 1" in told(order).problem
    assert "exit status 0" in told(order, 0, test_add="passed").problem
    assert told(order, None, seconds=20.0).problem.startswith("ended after 20 s by its limit")
    assert told(order, None, seconds=301.0) == SuiteRun({add: False, zero: False}, 301.0)


@pytest.mark.parametrize(
    ("report", "verdict", "reason"),
    [
        (RoomReport(1, "", "No module named 'pytest'"), "does not run", "must have it"),
        (RoomReport(1, "", f"/s/core.py {layout.COPY}"), "leaked environment", "/s/core.py"),
        (RoomReport(None, "", "OOMKilled", overran=True), "does not run", "more memory or disk"),
    ],
)
def test_what_an_image_lacks_is_a_verdict(report, verdict, reason) -> None:
    class Always:
        def run(self, record: RepositoryTask, *, fixed: bool, seed: int) -> SuiteRun:
            wanted = cluster.order(record, suite(record), fixed=fixed, seed=seed)
            return cluster.outcome(suite(record), RoomRun(wanted, report), 300.0)

        def exposed(self, record: RepositoryTask) -> str | None:
            return None

    found = reference.check(RECORDS["swe-smith"], Always(), 1, 300.0)
    assert found is not None and found.name == verdict and reason in found.reason


BACK_OFF = 'ImagePullBackOff: Back-off pulling image "x" (ErrImagePull: {}) (for 120 s)'
STRANGER = "pull access denied, repository does not exist or may require authorization"


@pytest.mark.parametrize(
    ("detail", "pulled", "of_the_image"),
    [
        (BACK_OFF.format('failed to resolve reference "x": x: not found'), False, True),
        (BACK_OFF.format("rpc error: code = NotFound desc = x"), False, True),
        (BACK_OFF.format("no matching manifest for linux/arm64 in the manifest list"), False, True),
        ("InvalidImageName: couldn't parse image reference", False, True),
        ('StartError: exec: "python3": executable file not found in $PATH', False, True),
        ("exit status 1 before it had its order: SyntaxError: invalid syntax", False, True),
        # A registry that lets nobody in says the same of every image.
        (BACK_OFF.format(STRANGER), False, False),
        (BACK_OFF.format(STRANGER), True, True),
        (BACK_OFF.format("429 Too Many Requests - toomanyrequests: rate limit"), True, False),
        (BACK_OFF.format("failed to fetch manifest: 503 Service Unavailable"), True, False),
        (BACK_OFF.format("dial tcp: lookup registry.example: no such host"), True, False),
        # What a node lost, or does not reach.
        (BACK_OFF.format("unpack image: layer blob sha256:0 not found"), True, False),
        (BACK_OFF.format("proxyconnect tcp: host not found"), True, False),
        (BACK_OFF.format('secret "regcred" not found'), True, False),
        ('ImagePullBackOff: Back-off pulling image "x" (for 120 s)', True, False),
        ('CreateContainerConfigError: secret "x" not found (for 120 s)', True, False),
        ("Unschedulable: 0/3 nodes are available (for 900 s)", True, False),
        ("StartError: failed to create shim task: context deadline exceeded", True, False),
    ],
)
def test_whether_an_image_or_the_cluster_is_at_fault(detail, pulled, of_the_image) -> None:
    assert cluster.of_the_image(End(Outcome.LAUNCH_FAULT, detail), pulled) == of_the_image


def test_settings_are_those_of_the_probe_or_the_few_that_a_reference_run_has(tmp_path) -> None:
    found = cluster.settings(
        "kubernetes", None, ["kubernetes.namespace=n", "task.grader_options.pytest=[-x]"]
    )
    assert (found.kubernetes.namespace, found.kubernetes.template) == ("n", str(cluster.TEMPLATE))
    probe = tmp_path / "probe.yaml"
    probe.write_text("rollout: {launcher: kubernetes}\nkubernetes: {template: job.yaml}\n")
    assert cluster.settings("kubernetes", probe, ["rollout.n=4"]).kubernetes.template == "job.yaml"
    probe.write_text("{}")
    for path, override, said in (
        (None, "rollout.n=4", "rollout.n=4 has no effect without --probe"),
        (None, "kubernetes.image=x", "no effect without kubernetes.template"),
        (None, "kubernetes.imagee=x", "did you mean kubernetes.image"),
        (probe, "rollout.n=4", "needs rollout.launcher=kubernetes"),
    ):
        with pytest.raises(ConfigError, match=said):
            cluster.settings("kubernetes", path, [override])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kubernetes.kubeconfig=/none", "kubernetes: no cluster"),
        ("task.grader_options.pytests=x", "task.grader_options: .*pytests"),
    ],
)
def test_what_a_user_can_put_right_is_said(tmp_path, capsys, setting, said) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS["swe-smith"]))
    arguments = [str(rows), "--out", str(tmp_path / "out"), "runner=kubernetes", setting]
    assert command.main(Path, arguments) == 2
    assert re.search(said, capsys.readouterr().err, re.DOTALL)
