"""The groups in flight: which to begin, which an update waits for, which it takes.

At most `in_flight` groups are begun and not yet trained on. An update takes the `per_update` oldest
complete ones; the rest is carried over, whatever its rollouts are doing. A group's *birth* is the
policy step that sampled its first token, its age at an update the steps since. An update waits for
groups that would be older than `max_staleness` when their turn comes; one that is too old after all
is given up, and its task is queued again under a new group id. With `in_flight == per_update` this
is synchronous training.

Pure: no clock, no I/O. Invariants: a group is taken at most once; no group is taken that is older
than `max_staleness`; every place of the task order ends in exactly one taken group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

# The birth of a group with tokens of weights that a rollback has undone: always too old.
FOREIGN = -(1 << 30)


@dataclass(frozen=True)
class Limits:
    """`refill` times `per_update` groups without a signal may be taken beside those that count."""

    per_update: int
    in_flight: int
    max_staleness: int
    refill: int = 0


@dataclass(frozen=True)
class Group:
    """The rollouts of the task at `place` of the endless task order; `tries` groups of this place
    were given up before. `birth` is None until a token was sampled."""

    place: int
    group_id: str
    tries: int = 0
    birth: int | None = None
    complete: bool = False
    silent: bool = False  # nothing can be learned from its rewards


@dataclass(frozen=True)
class Taken:
    """What an update gets: `counted` and, beside them, groups without a signal."""

    counted: list[Group] = field(default_factory=list)
    silent: list[Group] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        return self.counted + self.silent


@dataclass
class Groups:
    """See the module. `next_place` is the first place of the task order that no group has;
    `pending` are the groups that a resumed run begins with."""

    limits: Limits
    next_place: int = 0
    pending: tuple[Group, ...] = ()
    _live: dict[str, Group] = field(init=False)

    def __post_init__(self) -> None:
        self._live = {group.group_id: group for group in self.pending}

    @property
    def live(self) -> list[Group]:
        """The groups in flight, oldest place first."""
        return sorted(self._live.values(), key=lambda group: group.place)

    def begin(self, updates_left: int, name: Callable[[int], str]) -> list[Group]:
        """New groups, as many as there is room for and the remaining updates can use; `name` makes
        the id of the group at a place."""
        wanted = min(self.limits.in_flight, updates_left * self.limits.per_update)
        begun = []
        while self._counting() < wanted:
            group = Group(self.next_place, name(self.next_place))
            self.next_place += 1
            self._live[group.group_id] = group
            begun.append(group)
        return begun

    def born(self, group_ids: Iterable[str], step: int) -> None:
        """Tokens of these groups were sampled at policy step `step`, if not before."""
        for group_id in group_ids:
            group = self._live.get(group_id)
            if group is not None and group.birth is None:
                self._live[group_id] = replace(group, birth=step)

    def completed(self, group_id: str, birth: int, silent: bool) -> None:
        """All rollouts of a group are in a final state; `birth` is exact from here on."""
        self._live[group_id] = replace(
            self._live[group_id], birth=birth, complete=True, silent=silent
        )

    def late(self, step: int) -> list[Group]:
        """Incomplete groups that an update at `step` must wait for: without them this update and
        those that follow, each of `per_update` groups, could not take every group in time."""
        born = [(group, group.birth) for group in self.live if group.birth is not None]
        taken = {group.group_id for group in self._choose(step).groups}
        takes = Counter(birth for group, birth in born if group.group_id in taken)
        for last in range(step - self.limits.max_staleness, step + 1):
            # The updates that may take what was born until `last`, this one included.
            updates = last + self.limits.max_staleness - step + 1
            due = [group for group, birth in born if birth <= last]
            has = sum(count for birth, count in takes.items() if birth <= last)
            if len(due) - (updates - 1) * self.limits.per_update > has:
                return [group for group in due if not group.complete]
        return []

    def ready(self, step: int) -> bool:
        """True if an update at `step` has enough complete groups; `late` ones are still to be
        waited for."""
        return len(self._choose(step).counted) == self.limits.per_update

    def take(self, step: int) -> Taken:
        """The groups of an update at `step`."""
        taken = self._choose(step)
        for group in taken.groups:
            del self._live[group.group_id]
        return taken

    def give_up(self, step: int, waited: bool) -> list[tuple[Group, Group]]:
        """Groups that are too old for an update at `step`, and the new ones in their place. If
        `waited` is true these include the incomplete ones that only this update could take."""
        last = step - self.limits.max_staleness
        pairs = []
        for group in self.live:
            if group.birth is None:
                continue
            if group.birth < last or (waited and not group.complete and group.birth == last):
                tries = group.tries + 1
                again = Group(group.place, f"{group.group_id.split('.')[0]}.{tries}", tries)
                del self._live[group.group_id]
                self._live[again.group_id] = again
                pairs.append((group, again))
        return pairs

    def _counting(self) -> int:
        """Groups in flight, but for those that leave room for others because they are silent."""
        silent = sum(group.silent for group in self._live.values())
        return len(self._live) - min(silent, self._allowance)

    @property
    def _allowance(self) -> int:
        return self.limits.refill * self.limits.per_update

    def _choose(self, step: int) -> Taken:
        chosen = Taken()
        complete = [group for group in self.live if group.complete]
        for group in sorted(complete, key=lambda group: -self._age(group, step)):
            if self._age(group, step) > self.limits.max_staleness:
                continue
            if group.silent and len(chosen.silent) < self._allowance:
                chosen.silent.append(group)
            elif len(chosen.counted) < self.limits.per_update:
                chosen.counted.append(group)
        return chosen

    @staticmethod
    def _age(group: Group, step: int) -> int:
        return 0 if group.birth is None else step - group.birth
