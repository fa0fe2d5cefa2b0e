"""Hosts of an elastic run, each a launcher of its own on this machine: killed as a whole, or some of their ranks."""

from __future__ import annotations

import json
import mmap
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import elastic_program
from helpers.commands import COMMAND, Ended
from helpers.forked_commands import start_forked

from shardwise.elastic.memory import copied_bytes

RUN = [*COMMAND[: COMMAND.index("train")], "run", "--elastic"]


def run_hosts(
    folder: Path, words: list[list[str]], program: str = elastic_program.__file__, **settings: Any
) -> list[Ended]:
    """Run the program by one launcher for each of ``words``, its options; one with another ``--node-rank`` is no host."""
    settings["out"] = str(folder / "out")
    # below the ports of outgoing connections: one of those may take a free port before the launcher listens
    with socket.create_server(("127.0.0.1", random.SystemRandom().randrange(20000, 32000))) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    num_hosts = sum("--node-rank" not in each for each in words)
    hosts = ["--nnodes", str(num_hosts), "--rdzv-endpoint", endpoint]
    commands = [
        start_forked(
            [*RUN, *hosts, "--node-rank", str(host), *each, program, json.dumps(settings)], {"TMPDIR": str(folder)}
        )
        for host, each in enumerate(words)
    ]
    ended: list[Ended] = []
    for command in commands:
        with command:
            out, err = command.communicate(timeout=120)
            assert command.returncode is not None
            ended.append(Ended(command.returncode, out, err))
    return ended


def assert_undisturbed(folder: Path, ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    return elastic_program.read_outcome(folder / "out")


def test_a_rank_of_another_host_is_lost_and_then_the_host(tmp_path: Path) -> None:
    kills = [[3, "backward", 2], [1, "host", 5]]
    ended = run_hosts(tmp_path, [["-n", "2"], ["-n", "2"]], kills=kills)
    more = assert_undisturbed(tmp_path, ended[0])
    assert more["recoveries"] == ["process 3 was ended by SIGKILL", "host 1 is silent"]
    assert (more["worlds"][0], more["worlds"][-1]) == (4, 2)


def test_without_the_first_host_the_others_say_where_to_go_on(tmp_path: Path) -> None:
    ended = run_hosts(tmp_path, [["-n", "1"], ["-n", "1"]], kills=[[0, "host", 3]])
    assert ended[1].code == 1
    assert "the launcher of the first host, which has the run's store, is lost" in ended[1].err
    assert "elastic(folder=...) goes on from the newest checkpoint" in ended[1].err
    assert "Traceback" not in ended[1].err


@pytest.mark.exhaustive
def test_each_host_has_half_of_two_copies_and_replaces_its_ranks(tmp_path: Path) -> None:
    words = ["-n", "2", "--max-restarts", "1"]
    ended = run_hosts(tmp_path, [words, words], kills=[[1, "optimizer step", 2]], slow_ms=300, ballast=64)
    more = assert_undisturbed(tmp_path, ended[0])
    assert ended[1].code == 0, ended[1].err
    assert more["recoveries"] == ["process 1 was ended by SIGKILL", "1 joined"]
    assert more["worlds"][-1] == 4
    once = copied_bytes(elastic_program.Layers(), 4) + copied_bytes(torch.nn.Linear(64, 64), 4)
    assert 0 <= more["num_bytes"] - once <= 2 * 4 * 3 * mmap.PAGESIZE, "every part, its own or that of the other host"


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 1, 1]])
def test_what_the_living_hosts_lack_of_each_other_is_sent(sizes: list[int], tmp_path: Path) -> None:
    words = [["-n", str(each)] for each in sizes]
    ended = run_hosts(tmp_path, words, kills=[[4, "forward", 1], [1, "host", 4]][-sizes[0] :])
    more = assert_undisturbed(tmp_path, ended[0])
    assert ended[2].code == 0, ended[2].err
    assert "host 1 is silent" in more["recoveries"]


@pytest.mark.exhaustive
def test_a_spare_on_another_host_takes_the_place_of_a_lost_host(tmp_path: Path) -> None:
    words = ["-n", "1", "--spares", "1"]
    more = assert_undisturbed(tmp_path, run_hosts(tmp_path, [words, words], kills=[[1, "host", 4]], slow_ms=300)[0])
    assert more["worlds"][-1] == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_a_part_that_both_its_hosts_had_is_lost(has_checkpoints: bool, tmp_path: Path) -> None:
    words = [["-n", "1"]] * 3
    more: dict[str, Any] = {"checkpoints": str(tmp_path / "checkpoints")} if has_checkpoints else {}
    ended = run_hosts(tmp_path, words, kills=[[1, "host", 4], [2, "host", 4]], **more)
    assert "is lost with the hosts that had both copies of a part" in ended[0].err
    if has_checkpoints:
        assert_undisturbed(tmp_path, ended[0])
        assert "going on from the checkpoint after step" in ended[0].err
    else:
        assert ended[0].code == 1
        assert "StateError" in ended[0].err


@pytest.mark.exhaustive
def test_an_exception_on_another_host_ends_all(tmp_path: Path) -> None:
    ended = run_hosts(tmp_path, [["-n", "1"], ["-n", "1"]], raises=2)
    assert [each.code for each in ended] == [1, 1]
    assert "ValueError: no such column" in ended[1].err
    assert "rank 1 failed with exit code 1; all ranks have been stopped" in ended[0].err


@pytest.mark.exhaustive
def test_fewer_ranks_than_the_user_allows_end_all_hosts(tmp_path: Path) -> None:
    words = ["-n", "1", "--min-nproc", "3"]
    ended = run_hosts(tmp_path, [words] * 3, kills=[[2, "backward", 2]])
    assert [each.code for each in ended] == [1, 1, 1]
    assert "fewer than --min-nproc ranks are left" in ended[1].err


@pytest.mark.exhaustive
def test_a_program_that_makes_no_elastic_run_ends_on_all_hosts(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'])")
    ended = run_hosts(tmp_path, [["-n", "2"], ["-n", "2"]], program=str(program))
    assert [(each.code, sorted(each.out.split("\n"))) for each in ended] == [
        (0, ["", f"0 {host}", f"1 {host}"]) for host in range(2)
    ]


@pytest.mark.exhaustive
def test_hosts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    one = ["-n", "1"]
    ended = run_hosts(tmp_path, [one, one, [*one, "--node-rank", "1"], ["-n", "2", "--node-rank", "1"]], slow_ms=500)
    assert_undisturbed(tmp_path, ended[0])
    assert sorted(each.code for each in ended[1:3]) == [0, 2]
    assert "--node-rank 1 has come before" in ended[1].err + ended[2].err
    assert ended[3].code == 2
    assert "num_ranks 4 and 2" in ended[3].err
