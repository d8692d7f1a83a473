"""The end of a process at any of its changes of the disk."""

import os
import shutil

import pytest


class Crash(BaseException):
    """The end of a process, at a moment of our choice."""


def crash_at(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let all changes of the disk but the first ``count`` be the end."""
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
