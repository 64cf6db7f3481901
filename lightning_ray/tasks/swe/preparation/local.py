"""Reference runs of offline packages on this machine, in the grader's clean room, under the same
protection.

A `reference.Runner` for rows that name a package of the manifest (`data/packages.json`). Rows whose
environment is a container image are for `cluster`.

Invariant: the tree of the fix is the broken one with the gold patch applied, not the package as it
came, so that a patch which does not mend what it should is found.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from lightning_ray.config import ConfigError
from lightning_ray.rollouts import sandbox
from lightning_ray.tasks.swe import cleanroom, protection, sources, trees
from lightning_ray.tasks.swe.evidence import Suite
from lightning_ray.tasks.swe.patches import PatchError
from lightning_ray.tasks.swe.preparation.reference import SuiteRun
from lightning_ray.tasks.swe.record import RepositoryTask
from lightning_ray.tasks.swe.sources import Package


class Local:
    """See the module.

    Raises:
        ConfigError: from `run` and `exposed`, a row names no package of the manifest.
        SourceError, RoomFault: likewise, this machine cannot get the package or run its tests.
    """

    def __init__(self) -> None:
        if lack := protection.missing():
            print(lack, file=sys.stderr)

    def run(self, record: RepositoryTask, *, fixed: bool, seed: int) -> SuiteRun:
        package = _package(record)
        clean = sources.tree(package.name)
        if package.sdist_sha256 != record.sdist_sha256:
            return SuiteRun({}, 0.0, f"it was made from another version than {package.version}")
        try:
            tree = trees.apply(clean, record.bug_patch)
            tree = trees.apply(tree, record.gold_patch) if fixed else tree
        except PatchError as error:
            return SuiteRun({}, 0.0, str(error))
        suite = Suite(
            python=str(sources.environment() / "bin" / "python"),
            targets=package.targets,
            fail_to_pass=frozenset(record.fail_to_pass),
            pass_to_pass=frozenset(record.pass_to_pass),
            paths=(package.path,),
            timeout_s=record.timeout_s,
        )
        room = protection.protection()
        report = cleanroom.run(tree, suite, shuffle=seed, hash_seed=seed, protection=room)
        problem = "; ".join(report.evidence)
        if report.exit_status is None:
            problem = f"still running after {suite.timeout_s:g} s"
        elif not report.outcomes:
            problem = problem or f"the tests ended early, with status {report.exit_status}"
        passed = {test: report.passed(test) for test in suite.expected}
        return SuiteRun(passed, report.seconds, problem)

    def exposed(self, record: RepositoryTask) -> str | None:
        found = _copies(_package(record).name)
        return f"{found[0]} is a copy of the package" if found else None


@functools.cache
def _copies(name: str) -> list[Path]:
    """Copies that an agent could read: in the environment of the tests and, where there is no
    sandbox to hide them, among the packages of this machine."""
    roots = sorted(sources.environment().glob("lib/python3*/site-packages"))
    if sandbox.protection().bubblewrap is None:
        roots += sources.shared()
    return sources.copies(sources.packages()[name], roots)


def _package(record: RepositoryTask) -> Package:
    package = sources.packages().get(record.package)
    if package is None:
        named = record.package or record.image_name or record.repo
        raise ConfigError(
            f"{record.instance_id} needs {named}, and this machine runs the tests of "
            f"{', '.join(sources.packages())} only; set runner=kubernetes, or podman, to run them "
            "in their images, reference_runs=0 to run none, or runner=MODULE:CLASS to one that can"
        )
    return package
