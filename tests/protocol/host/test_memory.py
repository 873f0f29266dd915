"""What is said where there is no memory."""

import resource

from protocol.host.memory import figures_of


def test_a_limit_of_addresses_is_named_instead_of_what_the_machine_has(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 << 30, 3 << 30))
    assert figures_of(MemoryError()) == (
        "; this process is held to 3.00 GiB of addresses: ulimit -v unlimited, "
        "or train a smaller model"
    )
