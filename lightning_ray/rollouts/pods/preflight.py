"""What is looked at before a run that has rollouts as Jobs starts anything.

`check` has the template filled for a task, and has the API server look at that Job (a dry run,
which makes nothing). What it warns of is returned: Pod Security, say, which judges pods and refuses
no Job.

Invariants: nothing is made; what the API server refuses is a `ConfigError`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_ray.config import ConfigError, RunConfig
from lightning_ray.records import Json, Task
from lightning_ray.rollouts.pods import attempts, manifest
from lightning_ray.rollouts.pods.api import OUTAGE, Api
from lightning_ray.rollouts.pods.manifest import Frame, Room
from lightning_ray.rollouts.pods.template import JobTemplate, Names

# A value of the header `Warning` (RFC 7234, 5.5): code, who warns, text.
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
_ASK_S = 30.0  # longest wait for an answer
_NAMES = Names("a", "r", "g", "s", "u")


def check(config: RunConfig, task: Task) -> list[str]:
    """Returns what a person should know.

    Raises:
        ConfigError: something cannot work.
    """
    notes = attempts.check(config, task)
    try:
        return [*notes, *Probe(config.kubernetes).warnings(_sample(config, task))]
    except OUTAGE as error:
        raise ConfigError(f"kubernetes: the API server does not answer: {error}") from error


def _sample(config: RunConfig, task: Task) -> Json:
    """The Job of an attempt at `task`, in what an API server looks at."""
    settings, rollout = config.kubernetes, config.rollout
    template = JobTemplate(settings.template, settings.image).render(task, _NAMES)
    frame = Frame("check", None, rollout.cpus, rollout.memory_mib, rollout.disk_mib, 0.0, None)
    return manifest.build(template, Room("check", "http://gateway", "", manifest.AGENT, 1.0), frame)


class Probe(Api):
    """Questions to the API server that change nothing."""

    def warnings(self, job: Json) -> list[str]:
        """What the server warns of when it looks at `job`, which it does not refuse."""
        answer = self._batch.create_namespaced_job(
            self.namespace, job, dry_run="All", _preload_content=False, _request_timeout=_ASK_S
        )
        return [f"the API server warns: {text}" for text in told(answer.headers.getlist("Warning"))]


def told(headers: Sequence[str]) -> list[str]:
    """The texts in `Warning` headers."""
    found = (text for header in headers for text in _WARNING.findall(header))
    return [re.sub(r"\\(.)", r"\1", text) for text in found]
