"""Ranks are killed, and the run ends with the parameters of the run that lost none, to the bit."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import elastic_program, elastic_same_bits
from helpers.commands import COMMAND, Ended, children
from helpers.forked_commands import run_forked, start_forked
from helpers.other_users import run_as_nobody, second_user
from helpers.snippets import ROOT, read

import shardwise
from shardwise import ConfigError, StateError
from shardwise.checkpoint.files import Files, list_checkpoints, verify
from shardwise.cli.main import main
from shardwise.elastic import launcher
from shardwise.elastic.membership import MOST_BYTES
from shardwise.elastic.memory import copied_bytes

RUN = [*COMMAND[: COMMAND.index("train")], "run", "--elastic"]


def elastic(folder: Path, *words: str, **settings: Any) -> Ended:
    settings["out"] = str(folder / "out")
    return run_forked([*RUN, *words, elastic_program.__file__, json.dumps(settings)], TMPDIR=str(folder))


def assert_undisturbed(folder: Path, ended: Ended) -> dict[str, Any]:
    """Compare what a run has left with one process; return what it says of itself."""
    assert ended.code == 0, ended.err
    more = elastic_program.read_outcome(folder / "out")
    assert not more["is_watching"], "a thread that wakes up in C++ while Python ends aborts the process"
    assert more["told"][-1] == elastic_program.NUM_STEPS
    assert len(set(more["told"])) == len(more["told"]), "on_commit has returned once for each step"
    assert set(more["results"]) == {0.0}, "what the rank of the same number has returned"
    assert len(more["worlds"]) <= elastic_program.NUM_STEPS + len(more["recoveries"]), "steps before the last were lost"
    return more


@pytest.mark.parametrize(
    ("place", "kind", "transport"),
    [
        ("forward", "fully_shard", "auto"),
        pytest.param("backward", "fully_shard", "collective", marks=pytest.mark.exhaustive),
        pytest.param("all-gather", "fully_shard", "gloo", marks=pytest.mark.exhaustive),
        ("reduction", "replicate", "auto"),
        ("optimizer step", "zero", "auto"),
        pytest.param(
            "elastic commit", "fully_shard", "auto", marks=pytest.mark.exhaustive
        ),  # the tests below kill there
    ],
)
def test_survivors_make_the_step_again_wherever_a_rank_was_killed(
    place: str, kind: str, transport: str, tmp_path: Path
) -> None:
    ended = elastic(tmp_path, "-n", "4", kind=kind, transport=transport, kills=[[0, place, 3]])
    more = assert_undisturbed(tmp_path, ended)
    assert more["recoveries"] == ["process 0 (rank 0 of 4) was ended by SIGKILL"]
    assert more["worlds"][-1] == 3
    assert set(more["timeouts_s"]) == {120.0}, (
        "hangs are left to the launcher, and a message that was cut does not last"
    )
    cause = "shardwise: process 0 (rank 0 of 4) was ended by SIGKILL"
    assert f"{cause}; 3 ranks go on after step 3: processes 1, 2, 3" in ended.err
    assert "kept outside" not in ended.err


@pytest.mark.parametrize(
    "second", ["elastic recovery", pytest.param("init", marks=pytest.mark.exhaustive), "elastic commit"]
)
def test_a_rank_that_is_killed_while_others_recover_is_outlived_too(second: str, tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "4", kills=[[2, "backward", 4], [0, second, 4]])
    more = assert_undisturbed(tmp_path, ended)
    assert more["worlds"][-1] == 2


def test_ranks_that_are_killed_at_once_are_outlived_by_the_last_one(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "4", kills=[[process, "optimizer step", 3] for process in (0, 1, 3)])
    more = assert_undisturbed(tmp_path, ended)
    assert more["worlds"][-1] == 1
    assert more["num_bytes"] - copied_bytes(elastic_program.Layers(), 4) <= 2 * 3 * mmap.PAGESIZE, "none of lost ranks"


@pytest.mark.parametrize(
    ("place", "step"), [("init", -1), pytest.param("forward", 0, marks=pytest.mark.exhaustive), ("elastic commit", 0)]
)
def test_a_kill_before_the_first_step_is_done_begins_again(place: str, step: int, tmp_path: Path) -> None:
    more = assert_undisturbed(tmp_path, elastic(tmp_path, "-n", "3", kills=[[1, place, step]]))
    assert set(more["worlds"][-elastic_program.NUM_STEPS :]) == {2}


def test_a_spare_takes_the_place_of_a_lost_rank_and_leaves_unused(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "2", "--spares", "2", slow_ms=100, kills=[[1, "backward", 5]])
    more = assert_undisturbed(tmp_path, ended)
    assert more["worlds"][-1] == 2
    assert len(more["recoveries"]) == 1


def test_a_spare_that_is_killed_is_not_missed(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "2", "--spares", "1", slow_ms=100, kills=[[2, 50, -1]], log=str(tmp_path))
    assert assert_undisturbed(tmp_path, ended)["recoveries"] == []
    assert (tmp_path / "started-2").exists()
    assert not (tmp_path / "left-2").exists()


def test_a_program_may_leave_the_loop_and_spares_leave_too(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "2", "--spares", "1", num_steps=100, leaves=elastic_program.NUM_STEPS)
    assert len(assert_undisturbed(tmp_path, ended)["worlds"]) == elastic_program.NUM_STEPS


def test_processes_are_started_in_place_of_lost_ones_and_join_after_a_step(tmp_path: Path) -> None:
    words = ("-n", "2", "--max-restarts", "2")
    ended = elastic(tmp_path, *words, slow_ms=300, kills=[[0, "backward", 2]], ballast=512)
    more = assert_undisturbed(tmp_path, ended)
    assert more["worlds"][:3] == [2, 2, 1] or more["recoveries"][0] == "process 2 joined"
    assert more["worlds"][-1] == 2
    planned = copied_bytes(elastic_program.Layers(), 4) + copied_bytes(torch.nn.Linear(512, 512), 4)
    assert 0 <= more["num_bytes"] - planned <= 2 * 2 * 3 * mmap.PAGESIZE, "descriptions of two sets by two ranks"


def test_a_process_that_was_to_join_leaves_when_the_others_have_left_the_loop(tmp_path: Path) -> None:
    words = ("-n", "2", "--max-restarts", "1")
    ended = elastic(
        tmp_path, *words, slow_ms=1500, kills=[[0, "backward", 2]], num_steps=100, leaves=3, log=str(tmp_path)
    )
    assert ended.code == 0, ended.err
    assert (tmp_path / "left-2").exists(), "it was ready in the last step, and is in a generation that never formed"


def test_state_outlives_all_ranks(tmp_path: Path) -> None:
    words = ("-n", "2", "--max-restarts", "2")
    more = assert_undisturbed(tmp_path, elastic(tmp_path, *words, kills=[[0, "backward", 5], [1, "backward", 5]]))
    assert len(more["worlds"]) == 3, "the new ranks made steps 5 to 7"


def test_a_run_without_memory_begins_from_the_newest_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    assert elastic(tmp_path, "-n", "2", num_steps=5, checkpoints=folder).code == 0
    more = assert_undisturbed(tmp_path, elastic(tmp_path, "-n", "3", checkpoints=folder, kills=[[2, "init", -1]]))
    assert more["worlds"] == [2, 2, 2], "steps 5 to 7"


@pytest.mark.parametrize("killed", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_save_in_the_background_that_a_loss_cuts_is_left_out(killed: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    ended = elastic(
        tmp_path, "-n", "3", checkpoints=str(folder), background=True, kills=[[killed, "checkpoint save", 3]]
    )
    assert assert_undisturbed(tmp_path, ended)["worlds"][-1] == 2
    whole = {each.step for each in list_checkpoints(Files(), folder) if not verify(Files(), each.path)}
    assert whole | {4} == set(range(1, elastic_program.NUM_STEPS + 1)), "at most the one that was cut is missing"
    assert not [name for name in os.listdir(folder) if "partial" in name or "tmp" in name], os.listdir(folder)


def test_only_a_number_of_ranks_that_divides_the_microbatches_takes_part(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "4", V=4, kills=[[3, "backward", 2]])
    assert assert_undisturbed(tmp_path, ended)["worlds"] == [4, 4, 2, 2, 2, 2, 2, 2]
    assert ended.err.count("1 of 3 processes wait") == 1


def test_a_rank_that_nothing_can_interrupt_is_ended_and_replaced(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "2", "--hang-after", "3", stuck=[1, 3], kills=[[0, 200, 3]])
    more = assert_undisturbed(tmp_path, ended)
    assert "process 1 (rank 1 of 2) made no progress for 3 s after a loss, and was ended (last seen at" in ended.err
    assert "helpers/elastic_program.py" in ended.err, "where it waits"
    assert len(more["worlds"]) == 5, "another process makes steps 3 to 7, from the memory of both"


@pytest.mark.parametrize(
    "how", ["spin", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("stop", "sleep"))]
)
@pytest.mark.parametrize(
    "kills", [[], pytest.param([[2, 500, 3]], marks=pytest.mark.exhaustive)], ids=["alone", "after a loss"]
)
def test_a_rank_that_hangs_is_ended_and_the_others_go_on(how: str, kills: list[Any], tmp_path: Path) -> None:
    slow_ms = 400 * len(kills)  # so that the run has not ended before another process joins
    ended = elastic(tmp_path, "-n", "3", "--hang-after", "4", hangs=[1, 3, how], kills=kills, slow_ms=slow_ms)
    more = assert_undisturbed(tmp_path, ended)
    assert more["worlds"][-1] == 2, "one that hangs after a loss is replaced"
    after = "after a loss" if kills else "while others waited"
    assert f"process 1 (rank 1 of 3) made no progress for 4 s {after}, and was ended" in ended.err


def test_a_rank_that_stops_before_its_first_report_is_ended_too(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "3", "--hang-after", "4", kind="zero", hangs=[1, 0, "stop"])
    assert assert_undisturbed(tmp_path, ended)["worlds"][-1] == 2


def test_ranks_that_wait_for_each_other_end_by_name(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "2", "--hang-after", "4", mistake="swallows")
    assert ended.code == 1
    assert "no rank made progress for 4 s (--hang-after), and all wait: rank 0 is in its" in ended.err
    assert "Does step() catch an exception of one rank" in ended.err


@pytest.mark.parametrize("killed", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_on_commit_is_made_again_with_what_the_step_returned(killed: int, tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "3", "--max-restarts", "1", kill_told=[killed, 3])
    more = assert_undisturbed(tmp_path, ended)
    assert len(more["worlds"]) == elastic_program.NUM_STEPS, "the step itself stays"
    assert "shardwise: on_commit of step 3 was cut, and is made again" in ended.err


def test_on_commit_of_the_last_step_and_after_are_made_again(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "3", kill_told=[1, elastic_program.NUM_STEPS], kill_after=0)
    assert len(assert_undisturbed(tmp_path, ended)["recoveries"]) == 2


def test_losses_add_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for num_losses in (2, 5):
        folder = tmp_path / str(num_losses)
        folder.mkdir()
        kills = [[number, "backward", number] for number in range(1, num_losses + 1)]
        ended = elastic(folder, "-n", "2", "--max-restarts", str(num_losses), slow_ms=400, kills=kills)
        found.append(assert_undisturbed(folder, ended))
        assert len([cause for cause in found[-1]["recoveries"] if "SIGKILL" in cause]) == num_losses
    assert found[1]["threads"] - found[0]["threads"] < 3, "each group has three threads"
    assert found[1]["fds"] - found[0]["fds"] < 6, "and as many descriptors"


def test_a_rank_that_is_interrupted_and_leaves_late_takes_no_other_with_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    ended = run_forked([*RUN, "-n", "3", str(script)], TMPDIR=str(tmp_path))
    assert ended.code == 0, ended.err
    assert "end 6 of 2" in ended.out
    assert (
        "process 1 (rank 1 of 3) was ended by KeyboardInterrupt; 2 ranks go on after step 3: processes 0, 2"
        in ended.err
    )


def test_an_exception_ends_the_run_also_if_another_rank_is_lost_then(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RAISING)
    ended = run_forked([*RUN, "-n", "3", "--spares", "1", "--max-restarts", "2", str(script)], TMPDIR=str(tmp_path))
    assert ended.code == 128 + signal.SIGABRT, ended.err
    assert "ValueError: a bug of the user" in ended.err
    assert ended.out.count("makes step 3") == 3, "none has made it again"


def test_once_a_process_has_raised_none_is_replaced_and_no_rank_is_interrupted(tmp_path: Path) -> None:
    deciding = launcher.Launcher(launcher.ElasticTerms(3, num_new=3), tmp_path)
    told = [json.loads(str(deciding.prepare(each)[0]["SHARDWISE_ELASTIC"])) for each in range(3)]
    links = [socket.socket(fileno=os.dup(each["fds"][0])) for each in told]
    for each in range(3):
        deciding.started(each, os.getpid())
    deciding.pause(False)
    assert pickle.loads(links[0].recv(MOST_BYTES)).newest.members == (0, 1, 2)
    assert deciding.outlives(1, -signal.SIGKILL)
    assert pickle.loads(links[0].recv(MOST_BYTES)).newest.members == (0, 2)
    links[0].send(b'[1, 0, "raised", {"rank": 0}]')
    deciding.pause(False)
    assert deciding.more() == 0
    assert deciding.outlives(2, -signal.SIGKILL), "the run ends by the exception, and not by this"
    links[0].setblocking(False)
    with pytest.raises(BlockingIOError):  # there is no other generation
        links[0].recv(1)
    assert not deciding.outlives(0, -signal.SIGABRT), "a process that raises may be killed while it ends"
    for each in links:
        each.close()
    deciding.close()


PROGRAM = """
import os, signal, sys, time, torch, torch.distributed as dist, shardwise
from torch import nn
me = int(os.environ["RANK"])
hook = sys.excepthook
def leave_late(*error):
    hook(*error)
    {late}
sys.excepthook = leave_late
def build():
    model = shardwise.shard_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), min_unit_bytes=0)
    return model, torch.optim.AdamW(model.parameters())
def step(run, model, optimizer):
    loss = model(torch.randn(4, 8)).square().mean()  # all ranks have written the step before
    {hurt}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
INTERRUPTED = (
    PROGRAM.format(hurt="if run.number == 3 and me == 1: os.kill(os.getpid(), signal.SIGINT)", late="time.sleep(4)")
    + """
run = shardwise.elastic(build, step, num_steps=6)
if dist.get_rank() == 0: print("end", run.number, "of", dist.get_world_size())
"""
)
RAISING = (
    PROGRAM.format(
        hurt="if run.number == 3: hurt()",
        # As a thread does that wakes up in C++ while Python ends.
        late="time.sleep(3 if me == 0 else 6); me or os.abort()",
    )
    + """
def hurt():
    print("makes step 3", flush=True)
    if me == 2:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a bug of the user")
shardwise.elastic(build, step, num_steps=6)
"""
)


@pytest.mark.parametrize("kind", ["fully_shard", "zero"])  # waits for shared memory, and in C++
def test_ranks_that_wait_for_a_late_one_are_interrupted_before_it_comes(kind: str, tmp_path: Path) -> None:
    words = {"kills": [[0, 200, 3]], "late": [1, 3], "waiting": [2, 3], "log": str(tmp_path)}
    ended = elastic(tmp_path, "-n", "4", kind=kind, **words)
    assert assert_undisturbed(tmp_path, ended)["worlds"][-1] == 2, "0 and 1 were killed, and nobody else"


# What it could write if ranks met at the store that ``dist.init_process_group()`` would use, and what it could read.
STRANGER = """
import os, socket, struct, sys
port, *pids = map(int, sys.argv[1:])
store, got = socket.create_connection(("127.0.0.1", port), 10), []
store.sendall(struct.pack("<BI", 0, 0x3C85F7CE))  # torch's greeting
drop = b'{"number": 2, "members": [0], "lost_in": 2, "cause": "a stranger"}'
words = {"over": b"1", "generation/2": drop, "generation/3": b"{not json", "formed/2": b"1", "here": b"9"}
for start in ("", "elastic/", "shardwise/elastic/", "shardwise/elastic/0/"):
    for end, value in words.items():
        key = f"/{start}{end}".encode()
        store.sendall(b"\\x01" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", len(value)) + value)
for pid in pids:
    for name in ("environ", "mem", "maps", "fd/3", "fd/4"):
        try:
            got.append((name, open(f"/proc/{pid}/{name}", "rb").read(1)))
        except OSError:
            pass
print(got)
"""


@second_user
def test_another_user_takes_no_part_whatever_it_writes_into_the_store(tmp_path: Path) -> None:
    settings = {"out": str(tmp_path / "out"), "log": str(tmp_path), "slow_ms": 500}
    words = [*RUN, "-n", "2", elastic_program.__file__, json.dumps(settings)]
    with start_forked(words, {"TMPDIR": str(tmp_path)}) as command:
        deadline = time.monotonic() + 60
        while not (ports := [each.name.partition("-")[2] for each in tmp_path.glob("store-*")]):
            assert time.monotonic() < deadline, command.errors()
            time.sleep(0.02)
        pids = [command.pid, *children(command.pid)]
        assert run_as_nobody(STRANGER, ports[0], *map(str, pids)).stdout == "[]\n"
        store = dist.TCPStore("127.0.0.1", int(ports[0]), None, False, timedelta(seconds=10))
        assert store.check(["over", "shardwise/elastic/0/generation/2"]), "it could write"
        out, err = command.communicate(timeout=120)
        assert command.returncode is not None
    more = assert_undisturbed(tmp_path, Ended(command.returncode, out, err))
    assert more["recoveries"] == []
    assert set(more["worlds"]) == {2}
    assert "stranger" not in err


def test_a_malformed_message_is_named_and_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deciding = launcher.Launcher(launcher.ElasticTerms(1), tmp_path)
    told = json.loads(str(deciding.prepare(0)[0]["SHARDWISE_ELASTIC"]))
    with socket.socket(fileno=os.dup(told["fds"][0])) as link:
        for text in (
            b"{not json",
            b"5",
            b'[1, 0, "", {"odd": 1}]',
            b'["x", 0, "", {"rank": 0}]',
            b'[0, 0, "", {"rank": 0}]',
        ):
            link.send(text)
            deciding.pause(False)
    deciding.started(0, os.getpid())
    deciding.close()
    assert capsys.readouterr().err.count("shardwise: ignored a malformed message of process 0 (") == 4


def test_an_exception_ends_all_ranks(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "2", raises=2)
    assert ended.code == 1
    assert "ValueError: no such column" in ended.err


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("list", "ConfigError: elastic: build() returned a list"),
        ("lock", "ConfigError: elastic: step() returned a lock that cannot be pickled"),
        (
            "same model",
            "StateError: elastic: build() returned ['model'] of an earlier call: it belongs to the ranks before",
        ),
        (
            "old model",
            "StateError: elastic: this model is of an earlier call of build(): it belongs to the ranks before",
        ),
        (
            "old scheduler",
            "StateError: elastic: this optimizer, or what a scheduler or scaler steers, is of an earlier call",
        ),
        ("grows", "ConfigError: elastic: build() made a state that differs from the one before a rank was lost"),
        ("group", "StateError: elastic: a default process group exists"),
    ],
)
def test_a_program_that_cannot_go_on_is_told_why(mistake: str, expected: str, tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "2", mistake=mistake, kills=[[0, "forward", 2]])
    assert ended.code == 1
    assert expected in ended.err


def test_shards_of_earlier_ranks_that_the_program_keeps_are_told(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "3", mistake="average", kills=[[0, "forward", 2]])
    assert_undisturbed(tmp_path, ended)
    expected = (
        "shardwise: 6 shards are kept outside of what build() returned, as by an average of weights: they belong to"
    )
    assert ended.err.count(expected) == 1


def test_values_that_differ_between_ranks_end_all_ranks(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "2", differs=2)
    assert ended.code == 1
    assert "ConfigError: user/seen: rank 0 has" in ended.err


def test_fewer_ranks_than_the_user_allows_end_the_run(tmp_path: Path) -> None:
    ended = elastic(tmp_path, "-n", "3", "--min-nproc", "3", kills=[[1, "forward", 2]])
    assert ended.code == 128 + 9
    assert "shardwise: process 1 (rank 1 of 3) was ended by SIGKILL; 2 ranks are left, --min-nproc is 3" in ended.err


def test_a_loss_ends_the_store_of_its_generation_for_a_call_that_waits_too(tmp_path: Path) -> None:
    deciding = launcher.Launcher(launcher.ElasticTerms(2), tmp_path)
    told = [json.loads(str(deciding.prepare(each)[0]["SHARDWISE_ELASTIC"])) for each in range(2)]
    for each in told:
        with socket.socket(fileno=os.dup(each["fds"][0])) as link:
            link.send(b'[1, 0, "", {"rank": 0}]')
            deciding.pause(False)  # both have come to the first generation
    store = dist.FileStore(str(tmp_path / "1"), -1)
    threading.Timer(0.5, deciding.outlives, (1, -signal.SIGKILL)).start()
    with pytest.raises(RuntimeError, match="symbolic links"):
        store.get("what the lost rank would have set")
    for number in range(2):
        deciding.started(number, os.getpid())
    deciding.close()


def test_a_program_that_this_launcher_has_not_started_is_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="no launcher that outlives its ranks has started this process"):
        shardwise.elastic(dict[str, Any], print, num_steps=1)
    monkeypatch.setenv("SHARDWISE_ELASTIC", "")
    with pytest.raises(StateError, match="this process has made an elastic run"):
        shardwise.elastic(dict[str, Any], print, num_steps=1)
    with pytest.raises(ConfigError, match="num_steps is -1 and num_microbatches 0"):
        shardwise.elastic(dict[str, Any], print, num_steps=-1, num_microbatches=0)


def test_the_script_of_the_page_runs_and_a_kill_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = next(each.text for each in read(ROOT / "docs" / "elastic.md") if each.language == "python")
    line = "    ranks = dist.get_world_size()\n"
    hurt = f"{line}    if run.number == 5 and ranks == 3 and dist.get_rank() == 1:\n        __import__('os').abort()\n"
    (tmp_path / "train.py").write_text(text.replace(line, hurt, 1))
    monkeypatch.chdir(tmp_path)
    ended = run_forked([*RUN, "-n", "3", "train.py"], TMPDIR=str(tmp_path))
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert [each.split(":")[0] for each in lines] == [f"step {number}" for number in range(1, 31)]
    assert [each.split(" on ")[1] for each in lines] == ["3 ranks"] * 5 + ["2 ranks"] * 25
    losses = [float(each.split("loss ")[1].split()[0]) for each in lines]
    assert losses[-1] < losses[0]
    assert [each.step for each in list_checkpoints(Files(), tmp_path / "checkpoints")] == [10, 20, 30]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--spares", "1"], "--spares and --hang-after need --elastic"),
        (["--hang-after", "1"], "--spares and --hang-after need --elastic"),
        (["--elastic", "--hang-after", "-1"], "--hang-after is -1.0, expected 0 or more seconds"),
        (["--elastic", "--nnodes", "2", "--node-rank", "1"], "torchrun --nnodes 1:2 --nproc-per-node"),
        (["--elastic", "--spares", "-1"], "--spares is -1, expected at least 0"),
        (["--elastic", "-n", "2", "--min-nproc", "3"], "--min-nproc is 3, expected at most the 2 rank(s) of the start"),
    ],
)
def test_options_that_cannot_work_are_refused(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("")
    assert main(["run", *words, str(tmp_path / "program.py")]) == 2
    assert expected in capsys.readouterr().err


def test_with_fixed_sums_a_run_that_lost_ranks_ends_with_the_bits_of_one_rank(tmp_path: Path) -> None:
    left: dict[str, Any] = {}
    for name, words, kills in (("whole", ["-n", "1"], []), ("hurt", ["-n", "4"], ["2:2", "5:0"])):
        ended = run_forked(
            [*RUN, *words, elastic_same_bits.__file__, str(tmp_path / name), *kills], TMPDIR=str(tmp_path)
        )
        assert ended.code == 0, ended.err
        left[name] = torch.load(tmp_path / name)
    (expected, _), (found, worlds) = left["whole"], left["hurt"]
    assert worlds[-1] == 2
    digests = [(tmp_path / f"{name}-digests" / "digests.jsonl").read_text() for name in left]
    assert digests[0] == digests[1]
    assert len(digests[0].splitlines()) == elastic_same_bits.NUM_STEPS + 1
    assert {name: torch.equal(found[name], value) for name, value in expected.items()} == dict.fromkeys(expected, True)
