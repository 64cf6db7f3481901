"""The run as a state machine: which phase comes next. Pure: no clock, no I/O.

A run starts with a validation (if it has validation tasks) and then repeats collect, drain, update,
checkpoint, sync, validate. The gate is closed and the engines sleep from drain to sync, so that
trainer and engines take turns on a GPU; rollouts that no update has taken go on all the while,
their model calls held. A resumed run starts its engines with the checkpoint's weights: it goes on
after the sync.

Invariants: a drain is followed by exactly one sync, which opens the gate, before anything is
collected or validated; `step` counts the updates done and never falls; every validated step is
checkpointed first, so the best one can be kept; the last step is always checkpointed and, with
validation tasks, validated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What the run is doing."""

    VALIDATE = "validate"  # rollouts of the validation tasks, not trained on
    COLLECT = "collect"  # rollouts, until an update has enough complete groups
    DRAIN = "drain"  # the gate closes; model calls in flight end or are interrupted
    UPDATE = "update"  # optimizer steps; afterwards the policy has a new version
    CHECKPOINT = "checkpoint"  # everything a resumed run needs goes to disk
    SYNC = "sync"  # the engines get the new weights; the gate opens
    DONE = "done"


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` updates are done and `phase` comes next."""

    step: int
    phase: Phase


@dataclass(frozen=True)
class Plan:
    """When the phases are due. `validate_every` 0 means before the first step and after the
    last."""

    steps: int
    checkpoint_every: int
    validate_every: int
    has_validation: bool

    def first(self) -> Position:
        return Position(0, Phase.VALIDATE if self.has_validation else Phase.COLLECT)

    def following(self, position: Position) -> Position:
        """The position after `position` has been done."""
        step = position.step
        match position.phase:
            case Phase.COLLECT:
                return Position(step, Phase.DRAIN)
            case Phase.DRAIN:
                return Position(step, Phase.UPDATE)
            case Phase.UPDATE:
                due = self._checkpoints(step + 1)
                return Position(step + 1, Phase.CHECKPOINT if due else Phase.SYNC)
            case Phase.CHECKPOINT:
                return Position(step, Phase.SYNC)
            case Phase.SYNC:
                return (
                    Position(step, Phase.VALIDATE) if self._validates(step) else self._go_on(step)
                )
            case Phase.VALIDATE:
                return self._go_on(step)
            case Phase.DONE:
                return position

    def after_sync(self, step: int) -> Position:
        """Where a run goes on that starts with the weights of `step`."""
        return self.following(Position(step, Phase.SYNC))

    def resumed(self, position: Position) -> Position:
        """A stored position under this plan, whose `steps` may have been raised since."""
        return self._go_on(position.step) if position.phase is Phase.DONE else position

    def _go_on(self, step: int) -> Position:
        return Position(step, Phase.COLLECT if step < self.steps else Phase.DONE)

    def _checkpoints(self, step: int) -> bool:
        return step >= self.steps or step % self.checkpoint_every == 0 or self._validates(step)

    def _validates(self, step: int) -> bool:
        due = self.validate_every > 0 and step % self.validate_every == 0
        return self.has_validation and (due or step >= self.steps)
