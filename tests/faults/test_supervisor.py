"""The supervisor of the table of faults, with a system that only sleeps and writes lines."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.faults.__main__ import main, summary, unsuited
from tests.faults.figures import nearest_rank
from tests.faults.injection import FAULTS, Fault, Process, is_running, send, victim
from tests.faults.peers.sleeper import TALK
from tests.faults.supervisor import FailedRunError, Run, Supervisor
from tests.faults.systems import FIXED, NODES, SYSTEMS, System, script
from tests.namespaces import Hosts

pytestmark = pytest.mark.proc


def sleeper(*arguments):
    return System("sleeper", script("sleeper", *arguments), has_ranks=True)


def test_a_killed_rank_is_started_again_and_its_recovery_is_seen():
    run = Supervisor(sleeper(), Fault("kill", 1.5, begins=signal.SIGKILL), 3.0, 2, 0.02).run()
    assert len(run.faults) == 2
    assert run.restarted == 0
    pids = {(each["who"], each["pid"]) for each in run.lines if each["kind"] == "runs"}
    assert len(pids) == 4  # each of two was killed once
    assert not any(is_running(pid) for _, pid in pids)


def test_a_frozen_process_goes_on_after_its_time():
    run = Supervisor(sleeper(), Fault("freeze", 2.0, 0.5, signal.SIGSTOP, signal.SIGCONT), 2.5, 2, 0.02).run()
    (struck,) = run.faults
    frozen = [each for each in run.lines if each["kind"] == "step" and each["who"] == "rank0"]
    gap, at = max((after["t"] - before["t"], before["t"]) for before, after in itertools.pairwise(frozen))
    assert gap >= 0.45
    assert at <= struck + 0.1
    assert max(each["t"] for each in frozen) > struck + 0.5
    assert len({each["pid"] for each in run.lines}) == 2


needs_hosts = pytest.mark.skipif(not Hosts.is_permitted(), reason="network namespaces and tbf are not permitted here")


@needs_hosts
def test_a_cut_link_carries_nothing_until_its_time_is_over():
    run = Supervisor(sleeper("--on", "talks"), Fault("cut", 1.5, 0.5, rate=0.0), 3.0, 2, 0.02, True).run()
    assert len(run.faults) == 2
    assert run.restarted == 0
    for who in ("rank0", "rank1"):  # neither goes on without the other
        steps = [each for each in run.lines if each["kind"] == "step" and each["who"] == who]
        for struck in run.faults:
            assert min(each["t"] for each in steps if each["began"] > struck) >= struck + 0.5
    assert len({each["pid"] for each in run.lines}) == 2


@needs_hosts
def test_a_slow_link_carries_its_rate():
    run = Supervisor(sleeper("--on", "talks"), Fault("slow", 3.0, 2.0, rate=2e5), 3.0, 2, 0.02, True).run()
    (struck,) = run.faults
    steps = [(each["began"], each["t"]) for each in run.lines if each["kind"] == "step" and each["who"] == "rank0"]
    slow = min(ended - began for began, ended in steps if struck + 0.1 < began)
    assert slow > 0.5 * TALK / 2e5
    assert nearest_rank([ended - began for began, ended in steps if ended < struck], 0.5) < slow / 2
    assert run.restarted == 0


@needs_hosts
def test_hosts_leave_nothing_behind():
    hosts = Hosts()
    try:
        hosts.open(0)
        assert hosts.counters(0).exists()
        name = hosts.command(0)[-1]
        words = [*hosts.command(0), sys.executable, "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))"]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == hosts.address(0)
    finally:
        hosts.close()
    assert not hosts.counters(0).exists()
    assert not os.path.exists(f"/run/netns/{name}")
    assert not os.path.exists(f"/etc/netns/{name}")


def test_links_are_left_out_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(Hosts, "is_permitted", staticmethod(lambda: False))
    assert main(["--systems", "ray-train", "--faults", "cut", "join", "--out", str(tmp_path)]) == 0  # nothing is installed for that
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [each["skipped"] for each in rows] == [f"no host for each replica: {NODES}", f"no replica can join: {FIXED}"]
    assert unsuited(SYSTEMS["aiograd"], FAULTS["cut"]) == "network namespaces and tbf are not permitted here"
    assert unsuited(SYSTEMS["aiograd"], FAULTS["kill"]) == ""


def test_several_runs_have_a_median_and_their_ends():
    def pair(rate, recovery, load):
        steps = [{"kind": "step", "t": at / rate, "began": at / rate - 0.01, "step": at, "first": at, "count": 1, "bits": ""} for at in range(100)]
        late = [{**each, "t": each["t"] + recovery} for each in steps]
        return [Run(steps, [], 0.0, 10.0, 0, load), Run(late, [0.0], 0.0, 10.0, 1, load / 2)]

    found = summary([pair(10.0, seconds, load) for seconds, load in ((0.1, 1.0), (0.7, 3.0), (0.3, 2.0))])
    assert (found["runs"], found["faults"], found["restarted"], found["load"]) == (3, 3, 3, 2.0)
    assert found["spread"]["load"] == (1.0, 3.0)
    assert found["p50"] == pytest.approx(0.4)  # a tenth of a second after the fault a step begins
    assert found["spread"]["p50"] == pytest.approx((0.2, 0.8))
    assert found["longest"] == pytest.approx(0.8)


def test_a_rank_that_ends_by_itself_is_counted():
    assert Supervisor(sleeper("--on", "ends"), None, 2.0, 2, 0.02).run().restarted >= 1


def test_a_script_that_fails_says_why():
    with pytest.raises(FailedRunError, match=r"sleeper took no 10 steps: .*RuntimeError: it cannot"):
        Supervisor(sleeper("--on", "fails"), None, 1.0, 2, 0.0).run()


def test_the_figures_of_two_runs():
    calm, disturbed = (Supervisor(sleeper(), fault, 2.0, 2, 0.02).run() for fault in (None, FAULTS["join"]))
    assert len(disturbed.faults) == 1
    found = summary([(calm, disturbed)])
    assert found["useful"] > 0
    assert found["faults"] == 1
    assert 0.02 <= found["step_seconds"] < found["longest"] + 10


def test_victims_are_the_running_processes_in_turn():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        processes = [Process("b", os.getpid()), Process("a", 2**22 + 1), Process("a", other.pid)]
        assert [victim(processes, number).who for number in range(3)] == ["a", "b", "a"]
        other.stdin.close()
    assert victim(processes, 0).who == "b"
    assert victim([], 0) is None
    assert not send(other.pid, signal.SIGCONT)


def test_faults_leave_time_for_what_comes_after():
    assert FAULTS["kill"].times(100.0, 175.0) == [105.0, 120.0, 135.0, 150.0, 165.0]
    assert FAULTS["kill"].times(0.0, 9.0) == []
    assert all(fault.seconds < 2 / 3 * fault.every for fault in FAULTS.values())
    assert {name: fault.rate for name, fault in FAULTS.items() if fault.rate is not None} == {"blink": 0.0, "cut": 0.0, "slow": 1e6}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--systems", "deepspeed"], "no system is called deepspeed; there are aiograd"),
        (["--faults", "flood"], "no fault is called flood; there are kill"),
        (["--seconds", "0"], "expected --seconds"),
        (["--replicas", "1"], "--replicas from 2"),
    ],
)
def test_bad_words_name_what_there_is(arguments, said, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_a_system_that_cannot_be_installed_is_a_row(monkeypatch, tmp_path, capsys):
    system = System("absent", script("sleeper"), ("./no-such-folder",))
    monkeypatch.setattr("tests.faults.systems.ROOT", tmp_path)
    monkeypatch.setitem(SYSTEMS, "absent", system)
    assert main(["--systems", "absent", "--faults", "kill", "join", "--out", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["fault"] for row in rows] == ["kill", "join"]
    assert all(row["skipped"] for row in rows)
    assert "skipped: absent is not installed" in capsys.readouterr().out
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"results.json", "table.md", "useful.svg", "next_step.svg"}
