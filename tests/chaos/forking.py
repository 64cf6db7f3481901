"""Processes that live for a moment only: forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest


def forking(modules: Sequence[str], patch: pytest.MonkeyPatch) -> ForkServerContext:
    """Makes processes that have imported `modules`."""
    patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    forkserver._forkserver._stop()  # another test's, which has imported something else
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    first = context.Process(target=int)
    first.start()
    first.join()
    return context
