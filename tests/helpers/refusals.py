"""What every refusal must look like: one line that names its parts."""

import importlib

import pytest

from exlm_mini.config.checks import UserError


def told(run, *parts):
    """The one line of the UserError that ``run`` raises; it names all parts."""
    with pytest.raises(UserError) as caught:
        run()
    message = str(caught.value)
    assert message and "\n" not in message, message
    for part in parts:
        assert str(part) in message, message
    return message


LAB = ("sweep", "finetune", "bench")


def main_of(command):
    """The function of a command."""
    package = "exlm_lab" if command in LAB else "exlm_mini"
    return importlib.import_module(f"{package}.{command}").main
