"""What a coordinator or its client says, in the words of a script that calls `fit`."""

from __future__ import annotations

import re
from typing import Final

from protocol.base.errors import SamestepError, error_for

_ARGUMENTS: Final = {
    "--control HOST:PORT": 'control="HOST:PORT"',
    "--out DIR": "directory=DIR",
    "(--resume)": "(resume=True)",
    "--bind": "SAMESTEP_BIND",
    "--control": "control",
    "--expect-workers": "workers",
    "--out": "directory",
    "--resume": "resume=True",
    "--set": "settings",
}
_OPTION: Final = re.compile(
    r"\b(?:coordinator|worker) (?:\w+ )?--[^;)]*"  # a command, which is one in a terminal too
    + "".join(rf"|{re.escape(option)}(?![\w-])" for option in _ARGUMENTS)
)


def in_a_scripts_words(text: str) -> str:
    """Options of the command line, as the arguments or variables that say the same."""
    return _OPTION.sub(lambda found: _ARGUMENTS.get(found[0], found[0]), text)


def for_a_script(error: SamestepError) -> SamestepError:
    """The same error in such words."""
    told = in_a_scripts_words(str(error))
    return error if told == str(error) else error_for(error.exit_code, told)
