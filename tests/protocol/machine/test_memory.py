"""Error texts when memory runs out, and the kernel's counts of processes killed for memory."""

import resource

import pytest

from protocol.cli.doctor import check_oom_kills
from protocol.machine.memory import count_oom_kills, describe_shortage


def test_address_limit_is_named_instead_of_machine_memory(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 << 30, 3 << 30))
    assert describe_shortage(MemoryError()) == (
        "; this process may map 3.00 GiB: run ulimit -v unlimited, or train a smaller model"
    )


V1 = "4:memory:/docker/a\n1:cpu,cpuacct:/\n"
V2 = "0::/system.slice/w.service\n"
BOTH = V1 + "0::/\n"


@pytest.mark.parametrize(
    ("own_cgroup", "file", "text"),
    [
        (V2, "system.slice/w.service/memory.events", "oom 3\noom_kill 2\noom_group_kill 0\n"),
        (V1, "memory/docker/a/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        (V1, "memory/memory.oom_control", "under_oom 0\noom_kill 2\n"),  # in a container
        (BOTH, "memory/docker/a/memory.oom_control", "oom_kill_disable 0\noom_kill 2\n"),
        (V2, "elsewhere", ""),
    ],
)
def test_kernel_kills_for_memory_are_counted(tmp_path, own_cgroup, file, text):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(own_cgroup)
    (proc / "vmstat").write_text("nr_free_pages 7\noom_kill 9\n")
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text(text)
    expected = {"machine": 9, "group": 2} if text else {"machine": 9}
    assert count_oom_kills(proc, groups) == expected
    finding = check_oom_kills(proc, groups)
    if text:
        assert (finding.outcome, "2 processes of this control group" in finding.observation) == (
            "warning",
            True,
        )
    else:
        assert (finding.outcome, "9 processes since" in finding.observation) == ("ok", True)


def test_system_without_counters_has_no_finding(tmp_path):
    assert count_oom_kills(tmp_path, tmp_path) == {}
    assert check_oom_kills(tmp_path, tmp_path).outcome == "ok"
