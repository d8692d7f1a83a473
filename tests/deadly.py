"""RDKit as it never was seen: it dies of one molecule and hangs on another.

Of this module the processes that ``prepare`` spawns import ``make_documents`` themselves, for what
a test patches does not reach them.
"""

import faulthandler
import os
import signal
import sys
import time
from functools import partial

import pytest

from exlm_mini.data import cleaning, pipeline, shards, smiles, workers

KILLER, SLEEPER = "CCCCCCCCCCCCCCCCCCCCN", "CCCCCCCCCCCCCCCCCCCCO"


def read_molecule(text, *options, read=smiles.read_molecule):
    """Stands for the function of this name."""
    if text == KILLER:
        faulthandler.disable()  # of pytest
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == SLEEPER:
        os.write(1, b"asleep\n")
        time.sleep(3600)
    return read(text, *options)


def make_documents(seconds, *task):
    """``shards.make_documents`` with it, and so many seconds for a molecule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "read_molecule", read_molecule)
        patch.setattr(workers, "MAX_SECONDS", seconds)
        return shards.make_documents(*task)


def main(seconds, *argv):
    """The command ``prepare`` with it."""
    from exlm_mini import prepare

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" has it ignored
    pipeline.make_documents = partial(make_documents, seconds)
    sys.exit(prepare.main(list(argv)))
