"""What a coordinator says, in a script's words."""

import pytest

from protocol.base.errors import UsageError
from samestep.words import for_a_script, in_a_scripts_words


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("can be written: --out DIR", "can be written: directory=DIR"),
        ("go on with it (--resume), or not", "go on with it (resume=True), or not"),
        ("where it is with --control HOST:PORT", 'where it is with control="HOST:PORT"'),
        ("coordinator: --bind: got 'x'", "coordinator: SAMESTEP_BIND: got 'x'"),
        ("set optimizer.name=sgd (--set), train", "set optimizer.name=sgd (settings), train"),
        ("coordinator --resume --out d; no --out", "coordinator --resume --out d; no directory"),
        ("go on: worker merge --out d", "go on: worker merge --out d"),
        ("--outer is another", "--outer is another"),
    ],
)  # fmt: skip
def test_options_are_arguments_and_commands_stay(said, told):
    assert in_a_scripts_words(said) == told
    error = for_a_script(UsageError(said))
    assert isinstance(error, UsageError)
    assert str(error) == told
