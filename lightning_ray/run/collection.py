"""The run's training groups on the cluster: `groups.Groups` at work.

`collect` keeps groups in flight until an update has enough complete ones and hands those over with
their calls; whatever is not complete goes on, also while the policy is updated. Invariants: a
rollout is handed over once; one that was finished before a crash is not run again; `pending` and
`next_place` are all that a resumed run needs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ray.config import RunConfig
from lightning_ray.records import (
    Call,
    FinishedRollout,
    PolicyVersion,
    RolloutSpec,
    RolloutState,
    Task,
)
from lightning_ray.rollouts.lifecycle import ControllerStatus
from lightning_ray.run import data
from lightning_ray.run.groups import FOREIGN, Group, Groups, Limits
from lightning_ray.run.stack import Progress, Stack
from lightning_ray.run.waiting import RunError
from lightning_ray.samples import batch
from lightning_ray.samples.batch import Estimator


@dataclass(frozen=True)
class Harvest:
    """What an update is made of. `calls` are those of every attempt, by attempt id; `silent` the
    ids of groups without a signal that others stand in for, `stale` those of groups that were given
    up; `ages` the age in policy steps of every other group."""

    rollouts: list[FinishedRollout]
    calls: dict[str, list[Call]]
    silent: set[str]
    stale: set[str]
    ages: dict[str, int]


class Collection:
    """See the module. `descends(version)` says whether the present weights come from `version`."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        stack: Stack,
        estimator: Estimator,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._tasks, self._stack = config, tasks, stack
        self._estimator, self._say = estimator, say
        self._limits = Limits(
            config.run.groups_per_step,
            config.groups_in_flight,
            config.run.max_staleness,
            config.algorithm.refill,
        )
        self._groups = Groups(self._limits)
        self._unsent: list[Group] = []  # begun by a run before this one
        self._given_up: list[Group] = []
        self._calls: dict[str, list[Call]] = {}  # of complete groups, by attempt id

    def resume(self, next_place: int, pending: Sequence[Group]) -> None:
        """Goes on with the groups that an earlier run had in flight."""
        self._unsent = [Group(g.place, g.group_id, g.tries) for g in pending]
        self._groups = Groups(self._limits, next_place, tuple(self._unsent))

    @property
    def next_place(self) -> int:
        return self._groups.next_place

    @property
    def pending(self) -> tuple[Group, ...]:
        return tuple(self._groups.live)

    def collect(
        self,
        version: PolicyVersion,
        updates_left: int,
        descends: Callable[[PolicyVersion], bool],
        progress: Progress,
    ) -> Harvest:
        """Returns as soon as an update by `version` has enough complete groups.

        Raises:
            RunError: they did not come within run.collect_timeout_s.
        """
        step, started, ready_at = version.step, time.monotonic(), None
        while True:
            begun = self._groups.begin(updates_left, lambda place: data.group_name(place, version))
            self._submit([*self._unsent, *begun], step)
            self._unsent = []
            status = self._stack.poll()
            self.note_births(status, step)
            self._complete(step, descends)
            now = time.monotonic()
            if self._groups.ready(step):
                ready_at = ready_at or now
            waited = ready_at is not None and now - ready_at >= self._config.stale_wait_s
            self._give_up(step, waited)
            progress(self._stack.results, status)
            if self._groups.ready(step) and (waited or not self._groups.late(step)):
                return self._hand_over(step)
            self._stack.check_overdue(started, status)

    def note_births(self, status: ControllerStatus, step: int) -> None:
        """The groups with an attempt that runs may have tokens of policy step `step`."""
        self._groups.born(status.groups, step)

    def _submit(self, groups: Sequence[Group], step: int) -> None:
        if groups:
            self._stack.submit([spec for group in groups for spec in self._specs(group, step)])

    def _specs(self, group: Group, step: int) -> list[RolloutSpec]:
        ids, seed = self._ids(group), self._config.run.seed
        return data.training_specs(self._tasks, group, ids, seed, step + 1)

    def _ids(self, group: Group) -> list[str]:
        return [f"{group.group_id}-r{k:02d}" for k in range(self._config.rollout.n)]

    def _complete(self, step: int, descends: Callable[[PolicyVersion], bool]) -> None:
        silent = 0
        for group in [group for group in self._groups.live if not group.complete]:
            if not self._stack.has(self._ids(group)):
                continue
            rollouts = self._stack.peek(self._ids(group))
            calls = self._stack.calls(rollouts)
            self._calls |= calls
            births = [
                span.version.step if descends(span.version) else FOREIGN
                for rollout in rollouts
                if rollout.usable
                for call in calls[rollout.attempt_id]
                for span in call.spans
            ]
            quiet = self._estimator.by_group and bool(
                batch.without_signal(rollouts, self._estimator)
            )
            silent += quiet
            self._groups.completed(group.group_id, min(births, default=step), quiet)
        if silent and self._config.algorithm.refill:
            self._say(
                f"{silent} groups have no signal: others are collected, as far as refill goes"
            )

    def _give_up(self, step: int, waited: bool) -> None:
        given_up = self._groups.give_up(step, waited)
        if not given_up:
            return
        old, new = zip(*given_up, strict=True)
        self._say(f"{len(old)} groups are too old at step {step}: their tasks are queued again")
        self._stack.cancel([rollout_id for group in old for rollout_id in self._ids(group)])
        self._given_up += old
        self._submit(new, step)

    def _hand_over(self, step: int) -> Harvest:
        taken = self._groups.take(step)
        # A rollout that was cancelled is handed over when its harness is dead.
        over = [g for g in self._given_up if self._stack.has(self._ids(g))]
        self._given_up = [group for group in self._given_up if group not in over]
        rollouts = [
            rollout
            for group in [*taken.groups, *over]
            for rollout in self._stack.take(self._ids(group))
        ]
        attempts = self._stack.attempts(rollouts)
        missing = self._stack.calls([r for r in rollouts if r.attempt_id not in self._calls])
        calls = {name: found for name, found in (self._calls | missing).items() if name in attempts}
        self._calls = {name: found for name, found in self._calls.items() if name not in attempts}
        return Harvest(
            rollouts,
            calls,
            {group.group_id for group in taken.silent},
            {group.group_id for group in over},
            {g.group_id: step - g.birth for g in taken.groups if g.birth is not None},
        )


def check_faults(rollouts: Sequence[FinishedRollout], most: float, run_dir: Path) -> None:
    """Raises RunError if more than the share `most` of `rollouts` has no reward."""
    failed = [r for r in rollouts if r.state is RolloutState.FAILED]
    if len(failed) <= most * len(rollouts):
        return
    outcomes = ", ".join(f"{n} x {o}" for o, n in Counter(r.outcome for r in failed).most_common())
    raise RunError(
        f"{len(failed)} of {len(rollouts)} rollouts have no reward ({outcomes}); "
        f"what is left would say little. The last one, "
        f"{failed[-1].spec.rollout_id}: {failed[-1].detail or failed[-1].outcome}. Logs are in "
        f"{run_dir / 'rollouts'}; run.max_infrastructure_faults sets the limit"
    )
