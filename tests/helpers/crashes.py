"""Simulates that a process ends at any of its changes to the disk."""

import os
import shutil

import pytest


class Crash(BaseException):
    """The simulated end of a process."""


def crash_at(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let the first ``count`` changes to the disk pass; any later one raises ``Crash`` instead."""
    calls = 0

    def counted(call):
        def counting(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > count:
                raise Crash
            return call(*args, **kwargs)

        return counting

    for owner, name in ((os, "rename"), (os, "fsync"), (os, "unlink"), (shutil, "rmtree")):
        patch.setattr(owner, name, counted(getattr(owner, name)))
