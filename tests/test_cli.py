"""The command line, run as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import aiograd as ag
import aiograd.distributed as dist
from aiograd.engine.run.paced_collector import THRESHOLDS
from aiograd.errors import RemoteError, WorkerLostError
from aiograd.running import cli
from tests.support import assert_awaiting_raises, assert_raises
from tests.watchdog import SECONDS

ROOT = Path(__file__).parent.parent
SERVICE = "tests.distributed.cluster_service:service"


def test_doctor_says_what_there_is_and_that_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in (ag.__version__, "numpy", "BLAS", "kernels", "event loop", "works"):
        assert word in printed


def test_doctor_says_whether_programs_can_be_native(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for problem, expected in ((None, "available"), ("llvmlite is not installed", "not available: llvmlite is not installed")):
        monkeypatch.setattr("aiograd.kernels.native.NATIVE_PROBLEM", [lambda problem=problem: problem])
        assert ag.kernels.native_available() is (problem is None)
        assert cli.main(["doctor"]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("native programs"))
        assert line.removeprefix("native programs").strip() == expected


def test_importing_and_compiling_functions_does_not_load_llvmlite() -> None:
    program = "import sys, aiograd as ag; f = ag.compile(lambda x: x + 1.0); f(ag.ones(2)); f(ag.ones(2)); sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env={**os.environ, "AIOGRAD_COMPILE_TIER": "auto"}, check=False).returncode == 0


@pytest.mark.parametrize(("threads", "advises"), [(1, False), (3, True)])
def test_doctor_says_how_many_blas_threads_there_are_and_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, threads: int, advises: bool
) -> None:
    libraries = [{"user_api": "openmp", "num_threads": 9}, {"user_api": "blas", "num_threads": threads}]
    monkeypatch.setattr("threadpoolctl.threadpool_info", lambda: libraries)
    assert cli.main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("BLAS threads"))
    assert line.split()[2].startswith(str(threads))
    assert ("ag.Engine(blas_threads=1)" in line) == advises


def test_doctor_without_threadpoolctl_says_what_brings_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    assert cli.main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("BLAS threads"))
    assert "OPENBLAS_NUM_THREADS=5" in line and "aiograd[kernels]" in line and "ag.Engine(blas_threads=1)" in line


async def recorded(path: Path) -> None:
    with ag.profiler.profile() as profile:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        await (x * x).sum().backward()
    profile.chrome_trace(path)


def test_trace_merges_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, merged = (tmp_path / name for name in ("a.json", "b.json", "merged.json"))
    ag.run(recorded(first))
    ag.run(recorded(second))
    assert cli.main(["trace", str(first), str(second), "-o", str(merged)]) == 0
    printed = capsys.readouterr().out
    assert "mul" in printed and "sum" in printed and str(merged) in printed
    events = json.loads(merged.read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2, "two processes, told apart"


#: text in place of a trace, and a part of the complaint
NO_TRACES = {
    "": "Expecting value",
    "\N{LATIN SMALL LETTER Y WITH DIAERESIS}": "can't decode byte",
    "[" * 100_000: "recursion",
    "3": "expected a Chrome trace",
    "[3]": "event 0 is no trace event",
    "9" * 5000: "digits",
    '{"traceEvents": [], "otherData": 3}': "'otherData'",
    '{"traceEvents": [], "otherData": {"clock_origin_unix_us": "noon"}}': "'otherData'",
    '{"traceEvents": [], "otherData": {"clock_offset_us": null}}': "'otherData'",
    **{
        f'[{{"ph": "X", "pid": 1, "tid": 1, "name": "add", "ts": {ts}}}]': "event 0 has no time"
        for ts in ("NaN", "1e999", "true", "null", '"noon"', "9" * 400)
    },
    **{
        f'[{{"ph": "X", "pid": 1, "tid": 1, "name": "add", "ts": 0, "args": {args}}}]': "event 0 has other than an object as args"
        for args in ("[1]", "3", '{"bytes": "many"}', '{"bytes": null}', '{"bytes": 1e999}')
    },
}


@pytest.mark.parametrize("place", range(len(NO_TRACES)))
def test_a_trace_that_is_none_is_one_line_on_stderr(place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, complaint = list(NO_TRACES.items())[place]
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="latin-1")
    assert cli.main(["trace", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("aiograd trace: ") and captured.err.count("\n") == 1
    assert complaint in captured.err and str(path) in captured.err


def test_files_of_traces_that_cannot_be_read_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, missing, folder = tmp_path / "good.json", tmp_path / "none.json", tmp_path
    good.write_text("[]")
    for words, name in (([missing], missing), ([folder], folder), ([good, "-o", folder], folder), ([good, "-o", missing / "merged"], missing)):
        assert cli.main(["trace", *map(str, words)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("aiograd trace: ") and captured.err.count("\n") == 1 and str(name) in captured.err
    good.write_text('[{"ph": "X", "pid": 1, "tid": 1, "name": "\\ud800", "ts": 0}]')
    command = [sys.executable, "-m", "aiograd", "trace", str(good)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
    assert (done.returncode, done.stderr) == (0, b"") and b"\n?  " in done.stdout, "a name that cannot be printed"
    for limit in ("0", "-1", "many"):
        with pytest.raises(SystemExit) as exit:
            cli.main(["trace", str(good), "-n", limit])
        assert exit.value.code == 2 and "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["unknown"], ["trace"]])
def test_wrong_words_are_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    stop = assert_raises(SystemExit, None, cli.main, words)
    assert stop.code == 2
    assert "usage: aiograd" in capsys.readouterr().err


# -------------------------------------------------------------------- worker


KEY = bytes(range(32))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file with a secret that nobody else can read."""
    path = tmp_path / "cluster.key"
    path.touch(mode=0o600)
    path.write_text(KEY.hex())
    return path


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``aiograd worker``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIOGRAD_SECRET")}
    command = [sys.executable, "-m", "aiograd", "worker", *words]
    with subprocess.Popen(command, cwd=ROOT, env={**clean, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    """Where it says that it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"listens on (http\S+)", line)
    assert found, line + (process.communicate()[1] if process.poll() is not None else "")
    return found[1]


@pytest.mark.proc
@pytest.mark.parametrize(("number", "tunes"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
async def test_a_worker_serves_until_it_is_told_to_stop(secret: Path, number: signal.Signals, tunes: bool) -> None:
    """And tunes the garbage collector unless told not to."""
    with serving("--name", "w", "--service", SERVICE, "--secret-file", str(secret), *([] if tunes else ["--no-tune-gc"])) as process:
        url = url_of(process)
        async with dist.Worker("me", secret=KEY, peers={"w": url}) as me:
            assert (await me.call("w", "double", ag.tensor([2.0]))).tolist() == [4.0]
            assert (await me.call("w", "collector_thresholds") == [*THRESHOLDS]) == tunes
            process.send_signal(number)
            output, complaints = process.communicate(timeout=SECONDS)
        assert (process.returncode, complaints) == (0, ""), complaints
        assert "worker w stops" in output


@pytest.mark.proc
@pytest.mark.parametrize("level", [None, "error"])
async def test_a_workers_log_has_the_traceback_of_what_a_function_raised(secret: Path, level: str | None) -> None:
    words = ["--name", "w", "--service", SERVICE, "--secret-file", str(secret), *(["--log-level", level] if level else [])]
    with serving(*words, "--encoding", "bfloat16", "--gradient-encoding", "block8") as process:
        async with dist.Worker("me", secret=KEY, peers={"w": url_of(process)}) as me:
            assert await me.call("w", "encodings") == ["BFLOAT16", "BLOCK8"]
            caught = await assert_awaiting_raises(RemoteError, None, me.call("w", "boom", "abc"))
        process.terminate()
        _, log = process.communicate(timeout=SECONDS)
    found = f"correlation id {caught.correlation_id}" in log and "Traceback" in log and "in boom" in log
    assert found == (level is None), log


@pytest.mark.proc
@pytest.mark.parametrize(("function", "status"), [("wait_forever", 0), ("sleep_in_a_thread", 0), ("hold_the_loop_up", 1)])
async def test_a_worker_ends_whatever_it_is_busy_with(secret: Path, function: str, status: int) -> None:
    with serving("--name", "w", "--service", SERVICE, AIOGRAD_SECRET_FILE=str(secret)) as process:
        url = url_of(process)
        async with dist.Worker("me", secret=KEY, peers={"w": url}) as me:
            await me.call("w", "process")
            busy = asyncio.ensure_future(me.call("w", function, *([] if function == "wait_forever" else [10 * SECONDS])))
            assert process.stdout is not None and await asyncio.to_thread(process.stdout.readline) == "begun\n"
            process.terminate()
            await assert_awaiting_raises(WorkerLostError, None, busy)
            _, complaints = await asyncio.to_thread(process.communicate, timeout=SECONDS)
        assert process.returncode == status, complaints
        assert ("in hold_the_loop_up" in complaints) == (status == 1), "the stacks say what was in the way"


@pytest.mark.proc
def test_workers_in_two_terminals_know_each_other(secret: Path) -> None:
    common = ("--service", SERVICE, "--secret-file", str(secret))
    with serving("--name", "a", *common) as first, serving("--name", "b", *common, "--peer", f"a={url_of(first)}") as second:
        url_of(second)
        for process in (first, second):
            process.terminate()
            assert process.wait(20) == 0


@pytest.mark.proc
def test_a_worker_without_a_secret_says_how_to_get_one() -> None:
    with serving("--name", "w", "--service", SERVICE) as process:
        output, complaints = process.communicate(timeout=20)
    assert process.returncode == 2 and output == ""
    assert complaints.startswith("aiograd worker: ") and "openssl rand" in complaints and "Traceback" not in complaints


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--service", "tests.distributed.cluster_service"], "MODULE:NAME"),
        (["--service", "tests.no_such_module:service"], "no module tests.no_such_module"),
        (["--service", "tests.distributed.cluster_service:nothing"], "cluster_service:service"),
        (["--service", "tests.distributed.cluster_service:no_service"], "expected an aiograd.distributed.Service"),
        (["--service", SERVICE, "--listen", "7000"], "HOST:PORT"),
        (["--service", SERVICE, "--listen", "127.0.0.1:x"], "HOST:PORT"),
        (["--service", SERVICE, "--listen", "0.0.0.0:0"], "TLS; pass --certificate and --key, or --allow-plaintext where"),
        (["--service", SERVICE, "--listen", "192.0.2.1:0", "--allow-plaintext"], "--listen 192.0.2.1:0: "),
        (["--service", SERVICE, "--trusted-host", "no name"], "--trusted-host 'no name': expected a host name"),
        (["--service", SERVICE, "--name", "no name"], "--name 'no name': expected 1 to 128 characters"),
        (["--service", SERVICE, "--peer", "a"], "NAME=URL"),
        (["--service", SERVICE, "--peer", "a=sim://b"], "--peer a=URL: peer URL 'sim://b': expected http://host:port"),
        (["--service", SERVICE, "--limits", "{"], "JSON"),
        (["--service", SERVICE, "--limits", '{"nothing": 1}'], "nothing"),
        (["--service", SERVICE, "--limits", '{"frame_bytes": 0}'], "frame_bytes"),
        (["--service", SERVICE, "--limits", '{"frame_bytes": 1.5}'], "frame_bytes=1.5: expected a whole number"),
        (["--service", SERVICE, "--limits", "[" * 50_000], "nested too deep"),
        (["--service", SERVICE, "--key", "key.pem"], "--certificate"),
        (["--service", SERVICE, "--certificate", "none.pem", "--key", "none.pem"], "none.pem"),
        (["--service", SERVICE, "--secret-file", "none.key"], "none.key"),
    ],
)
def test_a_worker_explains_wrong_options(
    words: list[str], complaint: str, secret: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOGRAD_SECRET_FILE", str(secret))
    assert cli.main(["worker", "--name", "w", *words]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.err.startswith("aiograd worker: ") and captured.out == ""


def test_a_secret_that_others_can_read_is_refused(secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret.chmod(0o644)
    assert cli.main(["worker", "--name", "w", "--service", SERVICE, "--secret-file", str(secret)]) == 2
    assert "0600" in capsys.readouterr().err


def test_what_a_services_module_raises_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
    (tmp_path / "broken_service_module.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all") as caught:
        cli.main(["worker", "--name", "w", "--service", "broken_service_module:service", "--secret-file", str(secret)])
    assert re.search(r"\n--service broken_service_module:service: .* failed, .*broken_service_module.py:1$", shown(caught.value))


@pytest.mark.parametrize(
    ("source", "place"), [("\nraise KeyError('boom')", ":2"), ("def f(:", ""), ("import aiograd as ag\nag.tensor('a')", ":2")]
)
def test_the_last_line_of_what_a_services_module_raises_names_the_option(
    source: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"failing_service_module_{abs(hash(source))}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        status = cli.main(["worker", "--name", "w", "--service", f"{module}:service", "--secret-file", str(secret)])
    except Exception as error:
        text = shown(error)
    else:  # an error of aiograd
        text = capsys.readouterr().err
        assert status == 2 and text.startswith("aiograd worker: ")
    assert re.search(rf"\n--service {module}:service: importing {module} failed.*{place}$", text.rstrip())


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
