"""``shardwise run`` and ``notebook_launch``: a user's own program on the ranks of this host, and every way in which it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.commands import COMMAND, Ended, children, is_alive, run
from helpers.forked_commands import ForkedCommand, run_forked, start_forked
from helpers.forked_ranks import fork_calls
from helpers.network import listeners

from shardwise import ConfigError, RankError, notebook_launch
from shardwise.cli.main import main
from shardwise.loop import launch

RUN = [*COMMAND[: COMMAND.index("train")], "run"]
# A rank that has a process of its own, notes what it gets, and waits to be ended.
WAITS = """
import os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
def note(what): open(f"{sys.argv[1]}/{what}-{os.environ['RANK']}", "w").close()
def leave(number, frame): note(signal.Signals(number).name); sys.exit(5)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGHUP, leave)
try:
    note("ready")
    time.sleep(600)
except KeyboardInterrupt:
    note("SIGINT")
    raise
"""
IS_TOLD = """
import json, os, sys, torch, torch.distributed as dist
from package import VALUE
dist.init_process_group()
total = torch.ones(())
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
found = {name: os.environ.get(name) for name in names}
found |= {"elastic": dist.is_torchelastic_launched(), "name": __name__, "words": sys.argv[1:], "sum": total.item()}
open(f"{sys.argv[-1]}/rank-{found['RANK']}", "w").write(json.dumps(found))
dist.destroy_process_group()
"""
RAISES = """
import sys, torch, torch.distributed as dist
dist.init_process_group()
if dist.get_rank() == 1:
    raise ValueError("no such column")
dist.all_reduce(torch.ones(()))
"""


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def run_here(folder: Path, *words: str) -> Ended:
    return run_forked([*RUN, *words], TMPDIR=str(folder))


class SlowOutput(io.StringIO):
    def write(self, text: str) -> int:
        time.sleep(0.01)
        return len(text)


def wait_until_ready(process: ForkedCommand, *paths: Path) -> list[int]:
    """Return the processes below ``process`` once all of ``paths`` are there."""
    deadline = time.monotonic() + 100
    while not all(path.exists() for path in paths):
        assert process.poll() is None, process.errors()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return children(process.pid)


def are_gone(pids: Sequence[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


@pytest.mark.parametrize(("started", "num_ranks"), [(run_forked, 2), (run, 1)], ids=["forked", "new interpreters"])
def test_ranks_of_a_module_are_told_what_torchrun_tells_them(
    started: Callable[..., Ended], num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("VALUE = 1\n")
    (tmp_path / "package" / "program.py").write_text(IS_TOLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS")
    words = ["-n", str(num_ranks), "-m", "package.program", "--lr", "3", "-n", "9", str(tmp_path)]
    ended = started([*RUN, *words], TMPDIR=str(tmp_path))
    assert (ended.code, ended.err) == (0, "")
    size, threads = str(num_ranks), "1" if num_ranks > 1 else None  # one rank has all cores
    for rank in range(num_ranks):
        assert json.loads((tmp_path / f"rank-{rank}").read_text()) == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0",
            "OMP_NUM_THREADS": threads, "elastic": True, "name": "__main__", "words": ["--lr", "3", "-n", "9", str(tmp_path)],
            "sum": float(size),
        }  # fmt: skip


def test_the_first_error_is_shown_once_with_its_rank_and_recorded_for_diagnose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 20.0)  # rank 0 writes its record, however busy the machine is
    ended = run_here(tmp_path, "-n", "2", "--max-restarts", "1", "--", script(tmp_path, RAISES))
    assert ended.code == 1
    assert ended.err.count("Traceback") == 2, "one for each start"
    assert "rank 1 raised" in ended.err
    assert "launch.py" not in ended.err
    assert "runpy" not in ended.err
    assert ended.err.count("shardwise: restart 1 of 1\n") == 1
    assert ended.err.count("shardwise: error: rank 1 failed with exit code 1; all ranks have been stopped") == 2
    folder = ended.err.rsplit("shardwise diagnose ", 1)[1].strip()
    assert main(["diagnose", folder]) == 0
    assert "rank 1 first" in (said := capsys.readouterr().out)
    assert "ValueError: no such column" in said


def test_ranks_that_fail_before_they_have_a_process_group_are_in_the_diagnosis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 20.0)
    ended = run_here(tmp_path, "-n", "2", script(tmp_path, "import torch\nraise ValueError('no such column')\n"))
    assert main(["diagnose", ended.err.rsplit("shardwise diagnose ", 1)[1].strip()]) == 0
    said = capsys.readouterr().out
    assert "2 records of 2 ranks" in said
    assert "ValueError: no such column" in said


def test_a_rank_that_ends_after_fewer_steps_is_not_said_to_be_killed(tmp_path: Path) -> None:
    program = (
        "import os, torch, shardwise\nfrom torch import nn\n"
        "model = shardwise.shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))\n"
        "for _ in range(2 + int(os.environ['RANK'])): model(torch.ones(2, 4)).sum().backward()\n"
        "import atexit; atexit._run_exitfuncs()\n"  # forked ranks end without them
    )
    ended = run_here(tmp_path, "-n", "2", script(tmp_path, "import torch\ntorch.manual_seed(0)\n" + program))
    assert ended.code == 1
    said = r"rank 0 is gone \(rank 0 ended without an exception.*: give every rank as many batches, or "
    assert re.search(said, ended.err), ended.err


GOES_ON = """
import sys, torch, torch.distributed as dist
from shardwise import checkpoint, fully_shard
dist.init_process_group()
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
rank = dist.get_rank()
if sys.argv[1] == "forward" or rank == 0:
    dist.destroy_process_group()
try:
    model(torch.ones(2, 4)) if sys.argv[1] == "forward" else checkpoint.save("run", {"model": model}, step=1)
except Exception as error:
    open(f"{sys.argv[2]}/rank-{rank}", "w").write(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("call", ["forward", "save"])
def test_a_group_that_was_destroyed_too_early_is_named(tmp_path: Path, call: str) -> None:
    run_here(tmp_path, "-n", "2", script(tmp_path, GOES_ON), call, str(tmp_path))
    said = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    if call == "forward":
        assert all(
            re.match(r"StateError: a forward of a sharded model after destroy_process_group", each) for each in said
        )
    else:
        assert "model/weight is sharded over ranks that are out of reach after destroy_process_group()" in said[0]
        assert "rank 0 is gone" in said[1]


def test_an_error_of_every_rank_is_shown_once(tmp_path: Path) -> None:
    ended = run_here(tmp_path, "-n", "2", script(tmp_path, "import time\nraise ValueError('no such column')\n"))
    assert ended.code == 1
    assert ended.err.count("ValueError: no such column") == 1
    assert ended.err.count(" raised:") == 1


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("sys.exit(7)", 7, "rank 1 failed with exit code 7"),
        ("sys.exit('no data')", 1, "shardwise: rank 1 raised:\nno data\n"),
        pytest.param("os.kill(os.getpid(), 40)", 168, "rank 1 was ended by signal 40", marks=pytest.mark.exhaustive),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by SIGKILL (often: out of memory)"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path: Path, text: str, code: int, said: str) -> None:
    program = f"import os, sys, time\nif os.environ['RANK'] == '1': {text}\ntime.sleep(600)\n"
    ended = run_here(tmp_path, "-n", "2", script(tmp_path, program))
    assert ended.code == code
    assert said in ended.err


def test_a_thread_that_goes_on_after_an_exception_does_not_keep_the_ranks(tmp_path: Path) -> None:
    program = (
        "import os, threading, time\n"
        "from shardwise.loop import launch\n"
        "launch.EXIT_S = 0.5\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "if os.environ['RANK'] == '1': raise ValueError('no such column')\n"
    )
    ended = run_here(tmp_path, "-n", "2", script(tmp_path, program))
    assert ended.code == 1
    assert "ValueError: no such column" in ended.err


def test_what_a_rank_leaves_in_its_session_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').write(str(child.pid))\n"
    )
    place = launch.LaunchContext(own_sessions=True)  # these ranks are new interpreters
    assert launch.run_ranks(2, "cpu", ("-c", code, f"{tmp_path}/child-"), place).failure is None
    assert are_gone([int((tmp_path / f"child-{rank}").read_text()) for rank in range(2)])


def test_a_rank_that_was_killed_is_named_before_one_that_says_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "POLL_S", 1.0)  # both have ended when the launcher looks
    code = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': open(sys.argv[1], 'w').close(); os.kill(os.getpid(), 9)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.001)\n"  # one may start a second later than the other
        "os._exit(3)\n"
    )
    ended = launch.run_ranks(2, "cpu", ("-c", code, f"{tmp_path}/killed"), launch.LaunchContext())
    assert ended.failure == launch.FailedRank(1, -9)
    assert sorted(ended.codes) == [-9, 3]


def test_a_script_knows_its_file_after_it_changed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "import os\nos.chdir('/')\nopen(__file__).close()\n")
    monkeypatch.chdir(tmp_path)
    assert run_here(tmp_path, "-n", "2", "program.py").code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_a_signal_reaches_all_ranks_and_no_process_is_left_over(tmp_path: Path, number: signal.Signals) -> None:
    words = [*RUN, "-n", "2", script(tmp_path, WAITS), str(tmp_path)]
    with start_forked(words, {"TMPDIR": str(tmp_path)}) as process:
        below = wait_until_ready(process, tmp_path / "ready-0", tmp_path / "ready-1")
        assert len(below) >= 5, "two ranks, a process of each, and who ends them if the launcher cannot"
        assert [each for each in listeners([process.pid, *below]) if not each.address.is_loopback] == []
        process.send_signal(number)
        assert "Traceback" not in process.communicate(timeout=60)[1]
        assert process.returncode == 128 + number
    assert all((tmp_path / f"{number.name}-{rank}").exists() for rank in range(2))
    assert are_gone(below)
    assert not [path for path in tmp_path.glob("shardwise-*") if not path.name.startswith("shardwise-records-")]


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_rank_that_still_runs_after_a_signal_is_named_and_the_exit_code_is_that_of_the_signal(
    tmp_path: Path, num_signals: int
) -> None:
    leaves = "os.environ['RANK'] == '0' and " + str(num_signals == 1)
    program = (
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1] + '/told', 'w').close(), {leaves} and os._exit(0)))\n"
        "open(sys.argv[1] + '/ready-' + os.environ['RANK'], 'w').close()\n"
        "while True: time.sleep(0.01)\n"
    )
    words = [*RUN, "-n", "2", "--leave-s", "0.5", script(tmp_path, program), str(tmp_path)]
    with start_forked(words, {"TMPDIR": str(tmp_path)}) as process:
        below = wait_until_ready(process, tmp_path / "ready-0", tmp_path / "ready-1")
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            wait_until_ready(process, tmp_path / "told")
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 128 + signal.SIGTERM
    why = "rank 1 still ran and was killed 0.5 s after the first rank had left"
    assert (
        f"shardwise: SIGTERM: {why if num_signals == 1 else 'ranks 0, 1 still ran and were killed at the second signal'}"
        in said
    )
    assert are_gone(below)


def test_ranks_end_when_their_launcher_is_killed_together_with_what_ends_their_sessions(tmp_path: Path) -> None:
    words = [*RUN, "-n", "2", script(tmp_path, WAITS), str(tmp_path)]
    with start_forked(words, {"TMPDIR": str(tmp_path)}) as process:
        below = wait_until_ready(process, tmp_path / "ready-0", tmp_path / "ready-1")
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below}
        started = [pid for pid, line in lines.items() if line.startswith(b"sleep\0")]  # by ranks, which do not end them
        reapers = [pid for pid, line in lines.items() if b"killpg" in line and b"-IS" in line]
        assert reapers
        for pid in (*reapers, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        try:
            assert are_gone([pid for pid in below if pid not in (*started, *reapers)])
        finally:
            for pid in started:
                os.kill(pid, signal.SIGKILL)


def test_ranks_and_their_processes_stop_with_a_launcher_and_end_when_it_is_killed(tmp_path: Path) -> None:
    words = [*RUN, "-n", "2", script(tmp_path, WAITS), str(tmp_path)]
    with start_forked(words, {"TMPDIR": str(tmp_path)}) as process:
        below = wait_until_ready(process, tmp_path / "ready-0", tmp_path / "ready-1")

        def num_stopped() -> int:
            found = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in below]
            return found.count("T")

        for number, expected in ((signal.SIGTSTP, 4), (signal.SIGCONT, 0)):
            process.send_signal(number)
            deadline = time.monotonic() + 20
            while num_stopped() != expected and time.monotonic() < deadline:
                time.sleep(0.05)
            assert num_stopped() == expected
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert are_gone(below)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "shardwise run: name a script"),
        (["-n", "0", __file__], "-n is 0, expected at least 1"),
        (["-n", "2", "--max-restarts", "-1", __file__], "--max-restarts is -1, expected at least 0"),
        (["--leave-s", "-1", __file__], "--leave-s is -1.0, expected 0 or more seconds"),
        (["-n", "2", "nowhere.py"], "nowhere.py: no such script"),
        (["--nnodes", "3", "-n", "2", "a.py", "--name", "two words"],
         "torchrun --nnodes 3 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400 a.py --name 'two words'"),
        (["--nnodes", "2", "-n", "2", "-m", "a.b"], "FIRST_HOST:29400 -m a.b"),
        (["--elastic", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "host0:29400", "-n", "4", "a.py"],
         "torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint host0:29400 a.py"),
        (["--node-rank", "0", "-n", "2", "a.py"], "torchrun --nnodes 2 --nproc-per-node 2"),
    ],
)  # fmt: skip
def test_wrong_words_start_nothing(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert said in capsys.readouterr().err


# ---- notebook_launch, from a module: tests/clients/test_notebooks.py has a real kernel.


class Unlike(Exception):
    """Cannot be made from what pickle keeps of it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def scaled(factor: float, *, fails: str = "") -> list[float]:
    dist.init_process_group()
    rank = dist.get_rank()
    print(f"rank {rank} prints")
    if rank == 1 and fails:
        raise {"ValueError": ValueError("no such column"), "Unlike": Unlike("no", "way")}[fails]
    found = factor * torch.ones(1)
    dist.all_reduce(found)
    dist.destroy_process_group()
    return [*found.tolist(), rank]


def fails_with(kind: str) -> None:
    scaled(1.0, fails=kind)


def is_killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def exits() -> None:
    sys.exit(0)


def floods() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such column")
    while True:
        print("y" * 10_000)


def test_ranks_that_print_without_a_pause_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_calls(monkeypatch)
    monkeypatch.setattr(sys, "stdout", SlowOutput())
    with pytest.raises(ValueError, match="no such column"):
        notebook_launch(floods, 2)


def prints_lines() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    for count in range(2000):
        print(os.environ["RANK"], count)
    dist.destroy_process_group()


def test_lines_of_ranks_that_print_at_the_same_time_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_calls(monkeypatch)
    notebook_launch(prints_lines, 2)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"{rank} {count}" for rank in range(2) for count in range(2000))


def test_notebook_launch_returns_what_rank_0_returned_and_shows_what_ranks_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_calls(monkeypatch)
    assert notebook_launch(scaled, 2, 3.0) == [6.0, 0]
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0 prints", "rank 1 prints"]


@pytest.mark.parametrize(
    ("function", "args", "kind", "said"),
    [
        (fails_with, ("ValueError",), ValueError, "no such column"),
        (fails_with, ("Unlike",), RankError, "Unlike: no"),
        (is_killed, (), RankError, "rank 1 was ended by SIGKILL"),
        (exits, (), RankError, "rank 0 exited with exit code 0 before the function returned"),
    ],
    ids=["raised", "not-picklable", "killed", "exited"],
)
def test_notebook_launch_raises_what_a_rank_raised(
    function: Callable[..., object],
    args: tuple[str, ...],
    kind: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_calls(monkeypatch)
    with pytest.raises(kind, match=said) as found:
        notebook_launch(function, 2, *args)
    if kind is ValueError:
        assert isinstance(found.value.__cause__, RankError)
        assert "rank 1 raised; its traceback:\nTraceback" in str(found.value.__cause__)
        assert "in fails_with" in str(found.value.__cause__)


def test_an_interrupt_of_notebook_launch_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    before, started = {*children(os.getpid())}, list[int]()  # the workers of other tests stay

    def interrupt(_seconds: float) -> None:
        started.extend(pid for pid in children(os.getpid()) if pid not in before)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        notebook_launch(scaled, 2, 1.0)
    monkeypatch.undo()
    assert len(started) >= 3
    assert are_gone(started)


def test_a_function_that_cannot_travel_is_named_before_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"function or args cannot be pickled .* Install cloudpickle \(pip install"):
        notebook_launch(lambda: None, 2)
    monkeypatch.setattr(scaled, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "scaled", scaled, raising=False)
    with pytest.raises(ConfigError, match="something of it is defined in the notebook. Install cloudpickle"):
        notebook_launch(scaled, 2, 1.0)
    with pytest.raises(ConfigError, match="num_ranks is 0, expected 1 or more"):
        notebook_launch(scaled, 0, 1.0)


def test_an_interrupt_while_a_rank_imports_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "shardwise").mkdir()
    (tmp_path / "shardwise" / "__init__.py").write_text("raise KeyboardInterrupt")
    ended = subprocess.run([sys.executable, "-c", launch.START_RANK], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
