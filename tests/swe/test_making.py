"""Making the offline tasks: SWE-smith's generator and its validation, both unmodified."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from runs import ROOT

from lightning_ray.tasks.swe import making, offline, sources

PACKAGE = "parse"  # the smallest


@pytest.mark.slow
def test_the_generator_writes_the_same_bugs_again_and_they_make_the_same_tasks():
    package = sources.packages()[PACKAGE]
    found = {bug["patch"]: making.Bug(**bug) for bug in making.generate(package)}
    records = [record for record in offline.records() if record.package == PACKAGE]
    assert len(found) > len(records) and {r.bug_patch for r in records} <= found.keys()
    record = records[0]
    bug, suite = found[record.bug_patch], offline.suite(record)
    whole = replace(
        suite, fail_to_pass=frozenset(), pass_to_pass=suite.fail_to_pass | suite.pass_to_pass
    )
    row = making.judge(package, whole, bug)
    assert row["instance_id"] == record.instance_id and bug.function == record.function
    assert row["FAIL_TO_PASS"] == sorted(record.fail_to_pass)
    assert row["twins"].keys() == set(map(suite.function, record.fail_to_pass))
    with pytest.raises(making.Dropped, match="no test fails"):
        making.judge(package, replace(whole, pass_to_pass=frozenset()), bug)


@pytest.mark.slow
def test_swesmiths_validation_agrees_on_a_fixed_sample(tmp_path):
    """All tasks: the command without `--tasks`."""
    command = [sys.executable, "benchmarks/swesmith_agreement.py", "--tasks=2"]
    done = subprocess.run(
        [*command, f"--work={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *packages, total = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert [row["package"] for row in packages] == list(sources.packages())
    assert total["tasks that agree"] == 2 * len(packages) == sum(row["tasks"] for row in packages)
    assert total.keys() == {"tasks that agree", "PASS_TO_PASS: an id with a space"}
