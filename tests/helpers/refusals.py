"""What every refusal must look like: one line that names its parts."""

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
