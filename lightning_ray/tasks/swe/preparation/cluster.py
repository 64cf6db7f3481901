"""Reference runs of rows that name a container image: each a Kubernetes Job in that image.

A `reference.Runner` for rows of both forms, which leaves rows of offline packages to `local`. A
run's order is the grader's (`imaged`, `remote`), but for its hash seed and its order of tests; its
Job is made of the run's template and followed by its `Launcher`, on a thread of its own, without
Ray and without a gateway: order and report go through the API server (`by_secret`).

Invariants: what a registry, a scheduler, a node or the API server did is tried again, and raised in
the end, never a verdict; a Job is deleted once its report was read, all of them by `stop`, and
those of a killed run when the same folder is prepared again.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lightning_ray.config import ConfigError, RunConfig, load
from lightning_ray.records import Outcome, Split, Task
from lightning_ray.rollouts.grading import RoomOrder, RoomReport, RoomRun
from lightning_ray.rollouts.pods import preflight, staging
from lightning_ray.rollouts.pods.api import OUTAGE
from lightning_ray.rollouts.pods.launcher import Launcher
from lightning_ray.rollouts.pods.manifest import GRADER, Room
from lightning_ray.rollouts.pods.outcomes import End
from lightning_ray.rollouts.pods.template import Names
from lightning_ray.tasks.swe import canaries, imaged, known, layout, patches, remote, repository
from lightning_ray.tasks.swe.evidence import Suite
from lightning_ray.tasks.swe.examination import Kind, RoomFault, Trial
from lightning_ray.tasks.swe.patches import PatchError
from lightning_ray.tasks.swe.preparation import by_secret
from lightning_ray.tasks.swe.preparation.local import Local
from lightning_ray.tasks.swe.preparation.reference import SuiteRun
from lightning_ray.tasks.swe.record import Format, RecordError, RepositoryTask

TEMPLATE = Path(__file__).with_name("cluster_job.yaml")
# Which of a run's settings a reference run has, too.
SETTINGS = ("kubernetes.", "task.grader_options.", "rollout.retries")
_ID = "jobs.id"  # in the folder of the data: names its Jobs
_ANSWER_S = 60.0  # for the first list of what there is
_AGAIN_S = 5.0  # before another try, then twice as long: a node that evicts is full for a while
_NEWS_S = 5.0  # between two looks at what Jobs wait for
_READS = 3  # of a log, a second apart: a node may be busy
# What a registry says of an image that there is not, and no node of a layer, a host or a Secret;
# and what a registry says also to strangers.
_NO_IMAGE = re.compile(
    r"InvalidImageName|ErrImagePull: (?!.*\b(layer|blob|secret|lookup|host not found)\b)"
    r".*(not ?found|manifest unknown|no match)",
    re.I,
)
_NO_ENTRY = re.compile(r"ErrImagePull: .*(does not exist|denied|unauthorized)", re.I)
_NO_PYTHON = re.compile(
    r"(StartError|ContainerCannotRun): .*(not found|no such file|exec format)|before it had its",
    re.I,
)

_Result = TypeVar("_Result")


def settings(runner: str, probe: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration of reference runs: that of the probe, whose rollouts they judge, or one of
    `overrides` alone, among `SETTINGS`.

    Raises:
        ConfigError: as `config.load`; or there are no pods in it, or an image that nobody takes.
    """
    if probe is None:
        if other := next((one for one in overrides if not one.startswith(SETTINGS)), ""):
            raise ConfigError(f"{other} has no effect without --probe CONFIG.yaml")
        ours = [f"rollout.launcher={runner}", f"kubernetes.template={TEMPLATE}"]
        config = load(None, [*ours, *overrides])
        if config.kubernetes.template == str(TEMPLATE) and config.kubernetes.image:
            raise ConfigError("kubernetes.image has no effect without kubernetes.template")
        return config
    config = load(probe, overrides)
    if config.rollout.launcher not in (runner, "task"):
        raise ConfigError(f"runner={runner} needs rollout.launcher={runner} in {probe}")
    return config


def order(
    record: RepositoryTask,
    suite: Suite,
    *,
    fixed: bool,
    seed: int,
    most_bytes: int = remote.MAX_REPORT_BYTES,
) -> RoomOrder:
    """The order for one run, as a grader would have it for the reference solution or the bug alone;
    with the fix, the image must also be one that an agent may get.

    Raises:
        RecordError, PatchError: nobody could judge the row.
    """
    imaged.check(record)
    clean = record.format is Format.SWE_SMITH
    return remote.order_in_image(
        Trial(Kind.REFERENCE if fixed else Kind.KNOWN_BAD),
        imaged.diffs(record, mended=fixed),
        {},
        dict.fromkeys(imaged.hidden_files(record)),
        suite,
        imaged.TEST_S,
        seed=seed,
        alone=sorted(patches.touched(record.patch)) if clean and fixed else (),
        canary=canaries.below("", "tests", record.instance_id),
        most_bytes=most_bytes,
    )


def outcome(suite: Suite, run: RoomRun, slowest_s: float) -> SuiteRun:
    """What came of one run, as a grader reads it."""
    try:
        _, report = remote.read(run)
    except RoomFault as error:
        said = str(error)
        return SuiteRun({}, 0.0, said, leak=said if layout.COPY in said else "")
    report = known.nothing(suite).settled(report)
    problem = "; ".join(report.evidence)
    if report.too_large:
        problem = f"{report.too_large} (task.grader_options.report_mib says how large it may be)"
    elif run.report.overran:
        said = run.report.tail
        problem = f"it took more memory or disk than it may, or more output, or ended it ({said})"
    elif report.exit_status is None and report.seconds <= slowest_s:
        problem = f"ended after {report.seconds:.0f} s by its limit of time or of output"
    elif not (report.outcomes or report.errors or report.exit_status is None):
        problem = problem or f"the tests ended early, with status {report.exit_status}"
    passed = {test: report.passed(test) for test in suite.expected}
    return SuiteRun(passed, report.seconds, problem)


def of_the_image(end: End, pulled: bool) -> bool:
    """Whether a pod did not start because of its image, whoever pulls it. `pulled`: the registry
    gave us another one, so we are no stranger."""
    found = _NO_IMAGE.search(end.detail) or _NO_PYTHON.search(end.detail)
    return bool(found or (pulled and _NO_ENTRY.search(end.detail)))


class Cluster:
    """See the module. `folder` is the data set's; `say` tells a person what Jobs wait for.

    Raises:
        ConfigError: no cluster, no right to do what a run does, a template that cannot be used;
            from `run` too, where a row shows it.
        RoomFault: from `run`, the cluster's fault, again and again.
    """

    def __init__(
        self, config: RunConfig, folder: Path, slowest_s: float, say: Callable[[str], None]
    ) -> None:
        try:
            self._asked = repository.Options.model_validate(config.task.grader_options)
        except ValueError as error:
            raise ConfigError(f"task.grader_options: {error}") from error
        self._config, self._slowest_s, self._say = config, slowest_s, say
        template = Path(str(config.kubernetes.template)).expanduser()
        self.settings = json.dumps(
            [
                template.read_text() if template.is_file() else "",
                config.kubernetes.image,
                config.kubernetes.python,
                self._asked.repository,
                self._asked.pytest,
                self._asked.report_mib,
            ]
        )
        self._local = Local()
        self._missing: dict[str, str] = {}  # images, and what was said of them
        self._pulled = self._checked = self._stopped = False
        self._lock = threading.Lock()
        try:
            preflight.check_rights(config)
            self._launcher = Launcher(config, _run_id(folder))
        except OUTAGE as error:
            raise ConfigError(f"kubernetes: the API server does not answer: {error}") from error
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="jobs", daemon=True).start()
        self._wait(self._begin())

    def run(self, record: RepositoryTask, *, fixed: bool, seed: int) -> SuiteRun:
        if record.package:
            return self._local.run(record, fixed=fixed, seed=seed)
        if said := self._missing.get(record.image_name):
            return SuiteRun({}, 0.0, said)
        asked = imaged.suite(record, self._asked.repository, self._asked.pytest)
        suite = replace(asked, timeout_s=min(asked.timeout_s, self._slowest_s + 1))
        try:
            most = self._asked.report_mib << 20
            wanted = order(record, suite, fixed=fixed, seed=seed, most_bytes=most)
            [files] = staging.room_files([wanted], by_secret.MOST_REPORT)
            parts = by_secret.pack(files["order"], files[staging.WORKSPACE])
        except (RecordError, PatchError, ValueError) as error:
            return SuiteRun({}, 0.0, str(error))
        self._check(record.to_task())
        report = self._wait(self._in_room(record, wanted, parts))
        if isinstance(report, str):
            return SuiteRun({}, 0.0, report)
        return outcome(suite, RoomRun(wanted, report), self._slowest_s)

    def exposed(self, record: RepositoryTask) -> str | None:
        """Of a row with an image the first run with the fix tells."""
        return self._local.exposed(record) if record.package else None

    def stop(self) -> None:
        """Ends all runs, whose threads get an error, and deletes their Jobs."""
        if not self._stopped:
            self._stopped = True
            if left := self._wait(self._launcher.stop()):
                self._say(left)

    # -------------------------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self) -> None:
        """Sees what Jobs there are, of which nobody wishes any."""
        self._launcher.start()
        try:
            await asyncio.wait_for(self._launcher.synced(), _ANSWER_S)
        except TimeoutError:
            raise ConfigError(f"kubernetes: {self._launcher.trouble or 'no answer'}") from None
        self._news = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        before = ""
        while not self._stopped:
            if (trouble := self._launcher.trouble) != before and trouble:
                self._say(trouble)
            before = trouble
            await asyncio.sleep(_NEWS_S)

    def _check(self, task: Task) -> None:
        """Has the API server look at the first Job, once."""
        with self._lock:
            if not self._checked:
                try:
                    notes = self._launcher.check(task)
                except OUTAGE as error:
                    raise RoomFault(f"the API server does not answer: {error}") from error
                for note in notes:
                    self._say(note)
                self._checked = True

    async def _in_room(
        self, record: RepositoryTask, wanted: RoomOrder, parts: tuple[str, ...]
    ) -> RoomReport | str:
        """What came of an order, or why its image cannot run it."""
        image = record.image_name
        fault, ended_it = "", False
        for turn in range(self._config.rollout.retries + 1):
            await asyncio.sleep(_AGAIN_S * 2 ** (turn - 1) if turn else 0)
            if self._stopped:
                raise CancelledError
            name = f"{record.instance_id}.{secrets.token_hex(4)}"
            room = Room(name, "", "", GRADER, wanted.timeout_s, parts, by_secret.BOOTSTRAP)
            names = Names(name, record.instance_id, record.instance_id, Split.TRAIN, "http://none")
            try:
                end = await self._launcher.run(record.to_task(), room, names)
                report = await self._report(name, end)
            finally:
                self._launcher.release(name)
            if report is not None:
                self._pulled = True
                return report
            if of_the_image(end, self._pulled):
                said = f"its image {image} cannot run them: {end.detail}"
                if _NO_PYTHON.search(end.detail) is None:
                    self._missing[image] = said
                return said
            fault = f"{end.outcome}, {end.detail}"
            by_itself = end.outcome.caused_by_policy and "exit status" in end.detail
            fault += ", but its log has no report" if by_itself else ""
            # Perhaps not by the tests; another try tells.
            ended_it = end.outcome is Outcome.HARNESS_ERROR and not by_itself
        if ended_it:
            return RoomReport(None, "", fault, overran=True)
        raise RoomFault(
            f"{record.instance_id}: no pod could run its tests in {image}: {fault}; when the "
            "cluster is well, the same command goes on"
        )

    async def _report(self, room: str, end: End) -> RoomReport | None:
        """What a pod's log has, if it has ended well enough to have written it."""
        for turn in range(_READS):
            await asyncio.sleep(bool(turn))
            log = await self._launcher.log(room, by_secret.MOST_LINE + (64 << 10))
            if log is not None and (sent := by_secret.unpack(log)) is not None:
                try:
                    return staging.room_report(sent)
                except ValueError as error:
                    raise RoomFault(f"{room}: its report cannot be read: {error}") from error
            if not end.outcome.caused_by_policy:
                return None
        if end.outcome in (Outcome.OUT_OF_MEMORY, Outcome.OUTPUT_LIMIT):
            return RoomReport(None, "", end.detail, overran=True)
        return None


def _run_id(folder: Path) -> str:
    """Names the Jobs of this folder's data, in every life."""
    path = folder / _ID
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()
