"""The schedules of training, each as a run through the state machines of a real one.

The phases come from `run.cycle.Plan`, which groups are begun, waited for and taken from
`run.groups.Groups`; only what takes time is simulated (`world.py`). Invariants: a run trains on
`steps` times `groups_per_step` groups, each once; no group is older than `max_staleness`.

Left out: rollouts that are lost and tried again, groups without a signal, validation, the prompts
that an engine computes again after an update. An update is taken to be as much faster as it has
more devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_ray.run.cycle import Phase, Plan
from lightning_ray.run.groups import Groups, Limits
from lightning_ray.simulate.world import Rollout, Script, World

# The rollouts of the group at a place of the task order.
Work = Callable[[int], Sequence[Script]]


@dataclass(frozen=True)
class Schedule:
    """How collecting and updating take turns. `carries`: an update leaves groups in flight.
    `apart`: half of the devices train, the others sample meanwhile. `interrupts`: calls that run
    when the weights change are not waited for."""

    name: str
    carries: bool = False
    apart: bool = False
    interrupts: bool = False


SCHEDULES = (
    Schedule("synchronous"),
    # The groups of the next update are sampled while this one is made, then both are waited for:
    # verl's recipe `one_step_off_policy`, and Noukhovitch et al., arXiv 2410.18252.
    Schedule("one step off", apart=True),
    Schedule("collocated async, drain", carries=True),
    Schedule("collocated async, interrupt", carries=True, interrupts=True),
    # Sampling never waits for training: AReaL, arXiv 2505.24298.
    Schedule("disaggregated async", carries=True, apart=True, interrupts=True),
)


def option(default: float, text: str, least: float | None = None) -> Any:
    """A field of a dataclass that is a command-line option, with its help text and its least value
    (by default 1 for a number of things, 0 for seconds and shares)."""
    if least is None:
        least = 1 if isinstance(default, int) else 0
    return field(default=default, metadata={"help": text, "least": least})


@dataclass(frozen=True)
class Setting:
    """What all schedules have in common."""

    steps: int = option(10, "updates")
    groups_per_step: int = option(8, "groups that one update consumes")
    in_flight: int = option(16, "groups begun and not yet trained on, in async schedules")
    max_staleness: int = option(2, "largest age of a group, in updates", least=0)
    drain: float = option(0.0, "seconds that calls have to end before they are interrupted")
    devices: int = option(2, "devices; each runs an engine, or a rank of the trainer, or both")
    max_num_seqs: int = option(64, "calls that one engine runs at a time")
    concurrency: int = option(10**6, "rollouts that run at a time")
    slowdown: float = option(0.0, "a call takes longer by this share for each that runs beside")
    update: float = option(5.0, "seconds of an update on all devices")
    sync: float = option(0.5, "seconds of a weight sync")
    checkpoint: float = option(0.0, "seconds of a checkpoint, after every update")


@dataclass(frozen=True)
class Result:
    """`ages` of the groups when they were trained on, in updates; `idle` is the share of all
    device time in which a device neither sampled nor trained, saved or loaded weights."""

    seconds: float
    ages: list[int]
    idle: float

    @property
    def groups_per_hour(self) -> float:
        return 3600 * len(self.ages) / self.seconds


def simulate(schedule: Schedule, setting: Setting, work: Work) -> Result | None:
    """A whole run; None where the schedule needs more devices, or older groups, than there are."""
    if schedule.apart and (setting.devices < 2 or setting.max_staleness < 1):
        return None
    return _Run(schedule, setting, work).execute()


class _Run:
    def __init__(self, schedule: Schedule, setting: Setting, work: Work) -> None:
        self._schedule, self._setting, self._work = schedule, setting, work
        self._trainers = setting.devices // 2 if schedule.apart else setting.devices
        engines = setting.devices - self._trainers if schedule.apart else setting.devices
        self._world = World(engines, setting.max_num_seqs, setting.slowdown, setting.concurrency)
        in_flight = setting.in_flight if schedule.carries else setting.groups_per_step
        if schedule.apart:
            # A new group is begun while an update is made, not after it: it is one step older.
            in_flight = min(in_flight, setting.groups_per_step * setting.max_staleness)
        self._groups = Groups(Limits(setting.groups_per_step, in_flight, setting.max_staleness))
        self._version = 0  # of the engines' weights
        self._left: dict[str, int] = {}  # rollouts of each group that are not over
        self._ages: list[int] = []
        self._busy_s = 0.0  # device seconds of anything but sampling

    def execute(self) -> Result:
        plan = Plan(self._setting.steps, 1, 0, has_validation=False)
        position = plan.first()
        phases = {
            Phase.COLLECT: self._collect,
            Phase.DRAIN: self._drain,
            Phase.UPDATE: self._update,
            Phase.CHECKPOINT: self._checkpoint,
            Phase.SYNC: self._sync,
        }
        while position.phase is not Phase.DONE:
            phases[position.phase](position.step)
            position = plan.following(position)
        seconds = self._world.now
        busy_s = self._busy_s + sum(engine.busy_s for engine in self._world.engines)
        return Result(seconds, self._ages, 1 - busy_s / (self._setting.devices * seconds))

    def _collect(self, step: int) -> None:
        self._begin(step)
        while not self._groups.ready(step) or self._groups.late(step):
            self._world.advance()
        taken = self._groups.take(step).groups
        self._ages += [step - group.birth for group in taken if group.birth is not None]
        if self._schedule.apart:
            self._begin(step + 1)

    def _drain(self, step: int) -> None:
        if not self._schedule.apart:
            self._close()

    def _update(self, step: int) -> None:
        self._spend(self._setting.update * self._setting.devices / self._trainers, self._trainers)

    def _checkpoint(self, step: int) -> None:
        self._spend(self._setting.checkpoint, self._trainers)

    def _sync(self, step: int) -> None:
        if self._schedule.apart:
            while not self._schedule.carries and self._left:
                self._world.advance()
            self._close()
        self._spend(self._setting.sync, self._setting.devices)
        self._version = step
        self._world.switch(open=True, stopped=False)

    def _close(self) -> None:
        """Lets the calls that run end, as long as the schedule waits for them."""
        self._world.switch(open=False, stopped=False)
        waits = self._setting.drain if self._schedule.interrupts else math.inf
        deadline = self._world.now + waits
        while self._world.now < deadline and any(e.running for e in self._world.engines):
            self._world.advance(deadline)
        self._world.switch(open=False, stopped=True)

    def _spend(self, seconds: float, devices: int) -> None:
        self._busy_s += seconds * devices
        self._world.spend(seconds)

    def _begin(self, step: int) -> None:
        """New groups, for the updates from `step` on."""
        for group in self._groups.begin(self._setting.steps - step, "g{}".format):
            scripts = self._work(group.place)
            self._left[group.group_id] = len(scripts)
            for number, script in enumerate(scripts):
                self._world.begin(
                    Rollout(
                        f"{group.group_id}-r{number}",
                        script,
                        partial(self._started, group.group_id),
                        partial(self._ended, group.group_id),
                    )
                )

    def _started(self, group_id: str) -> None:
        closed = not self._world.engines[0].open
        self._groups.born([group_id], self._version + closed)

    def _ended(self, group_id: str) -> None:
        self._left[group_id] -= 1
        if not self._left[group_id]:
            del self._left[group_id]
            [birth] = [group.birth for group in self._groups.live if group.group_id == group_id]
            assert birth is not None  # it has started
            self._groups.completed(group_id, birth, silent=False)
