"""Children of preloaded processes: what they inherit, how they end, what follows when something is killed."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stoker.errors import ResourceError
from stoker.runtime.processes import child as child_module
from stoker.runtime.processes.child import LIGHT, TORCH, Child, Drain, Output, preload, set_start_method
from stoker.runtime.processes.entry import Connection, limit_memory
from stoker.runtime.processes.heartbeat import HeartbeatPage
from stoker.runtime.processes.preloaded import NotPreloadedError, Preloaded, preloaded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="preloaded processes are of Linux")
BARE = ("cloudpickle", "numpy.random")


@pytest.fixture(params=["fork", "spawn"])
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    set_start_method(request.param)
    yield request.param
    set_start_method("fork")


def ask(target: Callable[[Connection], object], **options) -> object:
    """What a child that runs `target` says, as JSON."""

    def say(connection: Connection) -> None:
        connection.socket.sendall(json.dumps(target(connection)).encode())

    child = Child(say, what="a child", **{"modules": BARE, **options})
    try:
        child.socket.settimeout(60)
        data = b""
        while piece := child.socket.recv(1 << 16):
            data += piece
        assert child.wait(60)
        assert child.exit.code == 0
        return json.loads(data)
    finally:
        child.close()


def run(target: Callable[[Connection], object], **options) -> Child:
    """A child that has ended."""
    child = Child(target, what="a child", **{"modules": BARE, **options})
    assert child.wait(60)
    child.close()
    return child


def sleep(connection: Connection) -> None:
    connection.socket.sendall(b"!")
    time.sleep(3600)


def sleeping(target: Callable[[Connection], object] = sleep, **options) -> Child:
    child = Child(target, what="a child", **{"modules": BARE, **options})
    child.socket.settimeout(60)
    assert child.socket.recv(1) == b"!"
    return child


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def script(
    folder: Path, text: str, *, prefix: tuple[str, ...] = (), **options
) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, as a user would."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run(
        [*prefix, sys.executable, str(path)], capture_output=True, text=True, timeout=150, **options
    )


# ---- what a child is


def test_a_child_gets_what_was_passed_and_its_exit_code_comes_back(method: str, tmp_path: Path) -> None:
    memory = os.memfd_create("shared")

    def work(connection: Connection) -> int:
        os.pwrite(connection.shared[0], connection.payload + connection.arguments["more"].encode(), 0)
        connection.heartbeat.write("read", 12, done=3)
        return 7

    child = Child(
        work, what="a child", arguments={"more": "é"}, payload=b"abc", shared=[memory], modules=BARE
    )
    assert child.wait(60)

    assert (child.exit.code, str(child.exit)) == (7, "exited with code 7")
    assert os.pread(memory, 100, 0) == "abcé".encode()
    beat = child.heartbeat.look()
    assert (beat.stage, beat.number, beat.done) == ("read", 12, 3)
    child.close()
    child.close()
    os.close(memory)


def test_a_child_has_no_other_descriptor_than_those_passed(method: str) -> None:
    kept = [Child(sleep, what="another child", modules=BARE) for _ in range(2)]
    with open(os.devnull) as leaked:
        os.set_inheritable(leaked.fileno(), True)

        def look(connection: Connection) -> list[str]:
            found = []
            for fd in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # that of the listing itself
                    found.append(os.readlink(f"/proc/self/fd/{fd}").split(":[")[0].split(" ")[0])
            return sorted(found)

        found = ask(look)
    for one in kept:
        one.kill()
        assert one.wait(20)
        one.close()

    beats, stacks = "/memfd:stoker-beat", "/memfd:stoker-stack"
    assert found == sorted(["/dev/null"] * 3 + ["socket", beats, beats, stacks])


def test_signals_threads_stdin_and_the_session_are_those_of_a_fresh_process(method: str) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGCHLD})
    preloaded(BARE).close()  # the next one is started under these
    try:

        def look(connection: Connection) -> list[object]:
            kept = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT}
            odd = [n for n in signal.valid_signals() - kept if signal.getsignal(n) is signal.SIG_IGN]
            return [
                [int(n) for n in odd],
                sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                faulthandler.is_enabled(),
                len(os.listdir("/proc/self/task")) <= 2,
                os.getsid(0) == os.getpid() == os.getpgid(0),
                sys.stdin.read(),
            ]

        assert ask(look) == [[], [], True, True, True, True, ""]
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_child_has_the_environment_folder_limits_and_umask_of_now(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preload(BARE)
    run(lambda c: 0)
    monkeypatch.setenv("STOKER_SOME", "later \udcff")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    cores, (files, hard), umask = (
        os.sched_getaffinity(0),
        resource.getrlimit(resource.RLIMIT_NOFILE),
        os.umask(0o27),
    )
    os.sched_setaffinity(0, {min(cores)})
    resource.setrlimit(resource.RLIMIT_NOFILE, (files - 1, hard))
    try:

        def look(connection: Connection) -> list[object]:
            shell = subprocess.run(["sh", "-c", 'echo "$STOKER_SOME ${HOME-none}"'], capture_output=True)
            return [
                shell.stdout.decode(errors="surrogateescape").strip(),
                os.getcwd(),
                str(tmp_path / "modules") in sys.path,
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                list(os.sched_getaffinity(0)),
                os.umask(0),
            ]

        found = ask(look)
    finally:
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        os.umask(umask)

    assert found == ["later \udcff none", str(tmp_path), True, files - 1, [min(cores)], 0o27]


def test_random_numbers_of_children_differ(method: str) -> None:
    def draw(connection: Connection) -> list[float]:
        import random

        import numpy as np

        return [np.random.random(), random.random()]

    (a, b), (c, d) = ask(draw), ask(draw)

    assert a != c
    assert b != d


def test_code_of_the_user_is_not_loaded_before_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_user.py").write_text("import os\nHERE = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import of_the_user

    def look(connection: Connection) -> list[int]:
        before = "of_the_user" in sys.modules
        import of_the_user as again

        return [before, again.HERE, os.getpid()]

    before, here, pid = ask(look, modules=TORCH)

    assert not before
    assert here == pid != of_the_user.HERE


def test_modules_of_a_foreign_folder_can_be_kept_out(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")

    def look_for(connection: Connection) -> bool:
        return os.getcwd() in sys.path

    assert not ask(look_for, own_path=False)
    assert ask(look_for)


def test_torch_is_there_in_one_and_not_in_the_other() -> None:
    def look(connection: Connection) -> bool:
        return "torch" in sys.modules

    assert ask(look, modules=TORCH) is True
    assert ask(look, modules=LIGHT) is False


def test_a_preloaded_process_has_one_thread_and_no_cuda_and_children_multiply_in_parallel() -> None:
    def work(connection: Connection) -> list[object]:
        import torch

        begun = [torch.cuda.is_initialized(), len(os.listdir("/proc/self/task"))]
        torch.set_num_threads(4)
        left, right = torch.rand(400, 400), torch.rand(400, 400)
        product = left @ right
        threads = len(os.listdir("/proc/self/task"))
        torch.set_num_threads(1)
        return [*begun, bool(torch.allclose(product, left @ right, rtol=1e-4)), threads >= 4]

    for _ in range(3):
        assert ask(work, modules=TORCH) == [False, 1, True, True]
    assert len(os.listdir(f"/proc/{preloaded(TORCH).pid}/task")) == 1


def test_what_a_child_prints_is_kept_also_when_it_dies(method: str, tmp_path: Path) -> None:
    drain, output = Drain(), Output(tmp_path / "log")
    drain.add(output)

    def work(connection: Connection) -> None:
        sys.stdout.write("printed")
        sys.stderr.write("told\n")
        raise ValueError("said at the end")

    child = Child(work, what="a child", output=output, modules=BARE)
    assert child.wait(60)
    child.record("it failed")
    drain.close()
    child.close()
    output.close(keep=True)

    text = (tmp_path / "log").read_text()
    assert child.exit.code == 1
    assert all(part in text for part in ("printed", "told", "ValueError: said at the end", "it failed"))


def test_exit_functions_run_and_threads_are_waited_for(method: str, tmp_path: Path) -> None:
    def work(connection: Connection) -> None:
        import atexit
        import threading

        atexit.register((tmp_path / "at exit").touch)
        threading.Thread(target=lambda: (time.sleep(0.2), (tmp_path / "thread").touch())).start()
        sys.exit(5)

    assert run(work).exit.code == 5
    assert (tmp_path / "at exit").exists()
    assert (tmp_path / "thread").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
def test_a_signal_is_named(method: str, number: signal.Signals) -> None:
    def work(connection: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), number)
        time.sleep(10)

    child = run(work)

    assert child.exit.code == -number
    assert str(child.exit) == f"was killed by signal {int(number)} ({number.name})"


def test_memory_is_limited() -> None:
    def work(connection: Connection) -> list[object]:
        import torch

        limit_memory(256 << 20)
        said = []
        for size in (32 << 20, 512 << 20):
            try:
                said.append(torch.zeros(size, dtype=torch.uint8).numel())
            except RuntimeError as error:
                said.append("memory" in str(error))
        return said

    assert ask(work, modules=TORCH) == [32 << 20, True]


def test_a_child_that_hangs_shows_its_stack_and_is_ended_in_time(method: str) -> None:
    def hang(connection: Connection) -> None:
        import ctypes

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        connection.socket.sendall(b"!")
        while ctypes.PyDLL(None).sleep(3600):  # keeps the interpreter's lock; a signal ends one call
            pass

    child = sleeping(hang)
    began = time.monotonic()
    child.request_stacks()
    until(lambda: "in hang" in child.stacks())

    assert not child.ended()
    assert child.stop(0.3, 20)
    assert time.monotonic() - began > 0.3
    assert child.exit.code == -signal.SIGKILL
    child.close()


def test_a_child_that_is_left_behind_can_still_be_asked_whether_it_ended(method: str) -> None:
    child = sleeping()
    child.close()

    assert not child.ended()
    os.kill(child.pid, signal.SIGKILL)
    until(child.ended)


def test_killing_reaches_what_a_child_has_started(method: str) -> None:
    def work(connection: Connection) -> None:
        other = subprocess.Popen(["sleep", "3600"])
        connection.socket.sendall(b"!" + str(other.pid).encode())
        time.sleep(3600)

    child = sleeping(work)
    other = int(child.socket.recv(100))
    child.kill()

    assert child.wait(20)
    until(lambda: not alive(other))
    child.close()


def test_main_of_a_script_is_found_as_with_spawn(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import pickle, sys
        from stoker.runtime.processes.child import Child

        class Thing:
            value = 12

        def work(connection):
            assert sys.modules["__main__"].__name__ == "__mp_main__" or Thing
            thing = pickle.loads(connection.payload)
            return thing.value

        if __name__ == "__main__":
            child = Child(work, what="a child", payload=pickle.dumps(Thing()), load_main=True, output=2)
            assert child.wait(60)
            print(child.exit.code)
        """,
    )

    assert (done.stdout.strip(), done.stderr) == ("12", "")


# ---- what is killed


def test_children_end_with_an_owner_that_is_killed(method: str, tmp_path: Path) -> None:
    path = tmp_path / "owner.py"
    path.write_text(
        textwrap.dedent(f"""
        import os, sys, time
        from stoker.runtime.processes.child import Child, set_start_method
        from stoker.runtime.processes.preloaded import preloaded
        set_start_method({method!r})
        def hang(connection):
            time.sleep(3600)
        children = [Child(hang, what="x", modules=("numpy",)) for _ in range(3)]
        if os.fork() == 0:  # holds all descriptors of its parent, as the workers of a DataLoader do
            time.sleep(30)
            os._exit(0)
        print(*[child.pid for child in children], preloaded(("numpy",)).pid or os.getpid(), flush=True)
        time.sleep(3600)
        """)
    )
    owner = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(text) for text in owner.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(alive, pids))

    owner.kill()

    until(lambda: not any(map(alive, pids)))
    owner.wait()
    owner.stdout.close()


def test_a_child_may_end_in_order_when_its_owner_dies(method: str, tmp_path: Path) -> None:
    done = script(
        tmp_path,
        f"""
        import os, pathlib, signal, sys, time
        from stoker.runtime.processes.child import Child, set_start_method
        set_start_method({method!r})
        def work(connection):
            def end(*_):
                pathlib.Path({str(tmp_path / "sealed")!r}).touch()
                os._exit(0)
            signal.signal(signal.SIGTERM, end)
            connection.socket.sendall(b"!")
            time.sleep(3600)
        child = Child(work, what="x", modules=("numpy",), death_signal=signal.SIGTERM)
        child.socket.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )

    assert done.returncode == -signal.SIGKILL
    until((tmp_path / "sealed").exists)


def test_a_child_may_live_on_when_its_owner_dies(method: str, tmp_path: Path) -> None:
    done = script(
        tmp_path,
        f"""
        import os, pathlib, signal, time
        from stoker.runtime.processes.child import Child, set_start_method
        set_start_method({method!r})
        def work(connection):
            while connection.socket.recv(1):
                pass
            time.sleep(0.5)
            pathlib.Path({str(tmp_path / "told")!r}).touch()
        child = Child(work, what="x", modules=("numpy",), death_signal=None)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )

    assert done.returncode == -signal.SIGKILL
    until((tmp_path / "told").exists)


def test_a_preloaded_process_that_is_killed_takes_its_children_along_and_another_takes_its_place() -> None:
    child = sleeping()
    first = preloaded(BARE).pid
    assert first is not None

    os.kill(first, signal.SIGKILL)

    assert child.wait(20)
    assert child.exit.code is None
    assert "preloaded process" in str(child.exit)
    child.close()
    assert run(lambda connection: 3).exit.code == 3
    assert preloaded(BARE).pid != first


def test_without_use_a_preloaded_process_ends_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run(lambda connection: 0)
    server = preloaded(BARE)
    first = server.pid
    server.close()  # as when it has had nothing to do for long
    assert first is not None
    until(lambda: not alive(first))

    assert run(lambda connection: 4).exit.code == 4
    assert server.pid != first


def test_a_fork_that_waits_for_imports_holds_up_neither_a_start_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(100)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = Preloaded(("slow_to_import",))
    outcome: list[Exception] = []

    def fork() -> None:
        try:
            server.fork(())
        except Exception as error:
            outcome.append(error)

    def use() -> None:
        server.start()
        outcome.append(ValueError("ready") if server.is_ready() else ValueError("not ready"))
        server.close()

    forking = threading.Thread(target=fork, daemon=True)
    forking.start()
    until(lambda: server.pid is not None)
    using = threading.Thread(target=use, daemon=True)
    using.start()
    for thread in (using, forking):
        thread.join(30)
        assert not thread.is_alive()

    assert str(outcome[0]) == "not ready"
    assert isinstance(outcome[1], NotPreloadedError)


def test_a_preloaded_process_that_cannot_start_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    modules = ("antigravity_of_stoker_test", "numpy")
    assert run(lambda connection: 2, modules=modules).exit.code == 2  # what cannot be imported is left out

    monkeypatch.setattr("stoker.runtime.processes.preloaded.sys.executable", "/bin/false")
    child = Child(lambda connection: 6, what="x", modules=("zlib",))

    assert child.wait(60)
    assert child.exit.code == 1  # the same executable, asked directly
    assert "start one by one" in caplog.text
    child.close()


def test_a_process_with_threads_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    child = run(lambda connection: 8, modules=("starts_a_thread",))

    assert child.exit.code == 8
    assert "1 threads besides its first" in caplog.text


def test_an_interrupt_while_a_child_starts_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    run(lambda connection: 0)
    pids = []

    def interrupted(*arguments: object):
        monkeypatch.undo()
        pids.append(os.getpid())
        raise KeyboardInterrupt

    monkeypatch.setattr(preloaded(BARE), "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Child(sleep, what="a child", modules=BARE)
    assert pids

    def say(connection: Connection) -> None:
        connection.socket.sendall(b"!" + str(os.getpid()).encode())

    child = sleeping(say)
    assert int(child.socket.recv(100)) == child.pid  # not the answer to the request before
    assert child.wait(20)
    child.close()
    server = preloaded(BARE).pid
    until(lambda: not Path(f"/proc/{server}/task/{server}/children").read_text())


def test_a_fork_of_the_owner_has_a_preloaded_process_of_its_own() -> None:
    run(lambda connection: 0)
    mine = preloaded(BARE).pid
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if run(lambda c: 0).exit.code == 0 and preloaded(BARE).pid != mine else 1
            preloaded(BARE).close()
        finally:
            os._exit(code)

    assert os.waitpid(pid, 0)[1] == 0
    assert run(lambda connection: 5).exit.code == 5
    assert preloaded(BARE).pid == mine


def test_two_hundred_children_in_turn_leave_nothing_open() -> None:
    run(lambda connection: 0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        assert run(lambda connection, number=number: number % 100).exit.code == number % 100
    server = preloaded(BARE).pid

    assert len(os.listdir("/proc/self/fd")) == before
    until(lambda: not Path(f"/proc/{server}/task/{server}/children").read_text())
    assert len(os.listdir(f"/proc/{server}/fd")) <= 8


# ---- where little is there

SURROUNDED = """
import os, sys
from stoker.runtime.processes.child import Child, TORCH
{before}
def work(connection):
    import torch
    return int((torch.ones(64, 64) @ torch.ones(64, 64))[0, 0])
children = [Child(work, what="x") for _ in range(2)]
assert all(child.wait(100) for child in children)
os.write({fd}, " ".join(str(child.exit.code) for child in children).encode())
"""


def test_standard_descriptors_may_be_closed(tmp_path: Path) -> None:
    text = SURROUNDED.format(before="for fd in (0, 2): os.close(fd)", fd=1)
    done = script(tmp_path, text)

    assert done.stdout == "64 64"


def test_the_working_folder_may_be_deleted(tmp_path: Path) -> None:
    before = "import shutil, tempfile; d = tempfile.mkdtemp(); os.chdir(d); shutil.rmtree(d)"
    done = script(tmp_path, SURROUNDED.format(before=before, fd=1))

    assert (done.stdout, done.stderr) == ("64 64", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount of our own needs root")
def test_shared_memory_need_not_be_mounted(tmp_path: Path) -> None:
    prefix = (
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount -t tmpfs -o size=0,nr_inodes=1,ro none /dev/shm; exec "$@"',
        "-",
    )
    done = script(tmp_path, SURROUNDED.format(before="", fd=1), prefix=prefix)

    assert (done.stdout, done.stderr) == ("64 64", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="has the preloaded process become another user")
def test_where_no_process_is_left_the_error_says_so_and_later_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another_user.py").write_text(
        "import os, resource, time\n"
        "os.setresuid(54321, 54321, 54321)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))\n"  # itself and one child
        "def hang(connection):\n"
        "    time.sleep(3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    options = {"what": "a tenth reader", "modules": ("another_user",)}
    first = Child("another_user:hang", **options)
    server = preloaded(("another_user",)).pid

    with pytest.raises(ResourceError, match=r"a tenth reader cannot be started.*ulimit -u"):
        Child("another_user:hang", **options)
    assert first.stop(0.0, 20)
    first.close()
    until(lambda: not Path(f"/proc/{server}/task/{server}/children").read_text())
    last = Child("another_user:hang", **options)

    assert preloaded(("another_user",)).pid == server
    assert last.stop(0.0, 20)
    last.close()


def test_where_no_descriptor_is_left_the_error_says_so(method: str) -> None:
    run(lambda connection: 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for fd in taken[-3:]:  # a child needs more than these
            os.close(fd)
        del taken[-3:]
        with pytest.raises(ResourceError, match="a child cannot be started"):
            Child(sleep, what="a child", modules=BARE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)

    assert run(lambda connection: 5).exit.code == 5


def test_under_a_debugger_children_are_started_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydevd", sys)

    assert child_module.start_method() == "spawn"


def test_words_of_preloading_are_modules_that_exist() -> None:
    import importlib

    for name in TORCH:
        importlib.import_module(name)


BEATS = """
import sys, time
from stoker.runtime.processes.heartbeat import HeartbeatPage
page, until = HeartbeatPage(int(sys.argv[1])), time.monotonic() + 1.0
while time.monotonic() < until:
    page.write("wait")
"""


def test_a_beat_that_is_being_written_is_never_taken_for_none() -> None:
    page = HeartbeatPage.create()
    page.write("read", 7)
    command = [sys.executable, "-c", BEATS, str(page.fd)]
    with subprocess.Popen(command, pass_fds=[page.fd]) as child:
        last_ns = page.look().time_ns
        while child.poll() is None:
            found = page.look()
            assert found.time_ns >= last_ns > 0
            last_ns = found.time_ns
        assert child.returncode == 0
    assert found.stage == "wait"
    page.close()
