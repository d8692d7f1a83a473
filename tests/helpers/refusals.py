"""Checks that code refuses its input with a message of one line."""

import pytest

from exlm_mini.config.checks import UserError


def told(run, *parts):
    """The message of the ``UserError`` that ``run`` must raise: one line with all ``parts``."""
    with pytest.raises(UserError) as caught:
        run()
    message = str(caught.value)
    assert message and "\n" not in message, message
    for part in parts:
        assert str(part) in message, message
    return message
