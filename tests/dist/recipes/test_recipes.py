"""Recipes for clusters and for other kinds of parallelism: each ran, on as many ranks as one host has."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.run as torchrun
import yaml
from helpers.snippets import ROOT, main_of_example

from shardwise.checkpoint import save
from shardwise.checkpoint.convert import CheckpointSource
from shardwise.testing import WorkerPool

SLURM = ROOT / "examples" / "slurm"
JOBSET = ROOT / "examples" / "kubernetes" / "jobset.yaml"
DOCKERFILE = ROOT / "examples" / "container" / "Dockerfile"


def losses_of(name: str, **arguments: Any) -> list[float]:
    return main_of_example(name)(steps=6, width=16, **arguments)


@pytest.mark.parametrize("name", ["context_parallel", "expert_parallel"])
def test_a_mesh_of_any_shape_trains_as_one_process(name: str, pool: WorkerPool) -> None:
    expected = pool.run(losses_of, num_ranks=1, name=name)[0]
    axis = name.replace("_parallel", "_ranks")
    for num_ranks, size in ((2, 2), (4, 2)):
        found = pool.run(losses_of, num_ranks=num_ranks, name=name, **{axis: size})[0]
        assert found == pytest.approx(expected, rel=1e-4), (num_ranks, size)


@pytest.mark.parametrize(("name", "num_ranks"), [("experts", 2), ("vision_tower", 4)])
def test_ranks_that_run_different_modules_train_as_one_process(name: str, num_ranks: int, pool: WorkerPool) -> None:
    expected = pool.run(losses_of, num_ranks=1, name=name)[0]
    found = pool.run(losses_of, num_ranks=num_ranks, name=name)
    assert all(each == pytest.approx(expected, rel=1e-4) for each in found)  # rounded in another order


def saved(name: str, folder: str, **arguments: Any) -> None:
    """Save the model of an example after training, as its optimizer had it last."""
    kept: list[Any] = []

    class Kept(torch.optim.SGD):
        def __init__(self, params: Any, **options: Any) -> None:
            kept[:] = [list(params)]
            super().__init__(kept[0], **options)

    with mock.patch.object(torch.optim, "SGD", Kept):
        losses_of(name, **arguments)
    params = torch.nn.ParameterList(kept[0])
    save(folder, {"model": params}, step=1)


def test_a_checkpoint_of_experts_holds_those_of_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    for num_ranks in (1, 4):
        pool.run(saved, num_ranks=num_ranks, name="expert_parallel", folder=str(tmp_path / str(num_ranks)))
    sources = [CheckpointSource.open(tmp_path / str(num_ranks)) for num_ranks in (1, 4)]
    whole, split = ({name: each.read(name) for name in each.names} for each in sources)
    assert any(value.shape == (4, 16, 16) for value in split.values())
    for name, value in whole.items():
        torch.testing.assert_close(split[name], value, rtol=1e-3, atol=1e-5)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return an environment in which ``scontrol`` and ``srun`` stand for those of one node."""
    tools = {"scontrol": "echo 127.0.0.1; echo other-node", "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"'}
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def run(command: list[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["train", "elastic"])
def test_the_scripts_for_slurm_run_what_they_are_given_on_the_ranks_of_a_node(name: str, tmp_path: Path) -> None:
    job = {
        "SLURM_JOB_NODELIST": "node[0-0]",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
    }
    env = environment(tmp_path, **job, SLURM_GPUS_ON_NODE="1")
    script = tmp_path / "my script.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n")
    batch = SLURM / f"{name}.sbatch"
    assert run(["bash", str(batch), str(script), "--lr", "3e-4"], env) == "0 1 ['--lr', '3e-4']\n"
    options = re.findall(r"^#SBATCH (--[\w-]+)(?:=\S+)?$", batch.read_text(), flags=re.MULTILINE)
    assert len(options) == batch.read_text().count("#SBATCH")


def test_the_pods_of_the_jobset_run_their_command(tmp_path: Path) -> None:
    job = yaml.safe_load(JOBSET.read_text())["spec"]["replicatedJobs"][0]
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert env["MASTER"] == "shardwise-node-0-0.shardwise"  # JOBSET-JOB-INDEX-POD.SUBDOMAIN
    here = {"NUM_NODES": "1", "RANKS_PER_NODE": "2", "MASTER": "127.0.0.1", "RUN": str(tmp_path / "run")}
    assert here.keys() <= env.keys()
    command = [*container["command"], *container["args"]]
    in_pod = environment(tmp_path, **{**env, **here}, JOB_COMPLETION_INDEX="0")
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')  # the test above runs the real one
    (tmp_path / "torchrun").chmod(stat.S_IRWXU)
    given = torchrun.parse_args(run(command, in_pod).splitlines())
    assert (given.nnodes, given.nproc_per_node, given.node_rank) == ("1", "2", 0)
    assert (ROOT / given.training_script).exists()
    assert given.training_script_args == [str(tmp_path / "run")]


def check(value: Any, field: Any, place: str) -> None:
    """Compare a manifest with the list of fields in ``jobset_fields.yaml``, which says how to read it."""
    if isinstance(field, dict):
        names = {name.rstrip("!"): kind for name, kind in field.items()}
        assert isinstance(value, dict), place
        assert value.keys() <= names.keys(), f"{place}: no such field: {value.keys() - names.keys()}"
        needed = {name.rstrip("!") for name in field if name.endswith("!")}
        assert needed <= value.keys(), f"{place} lacks {needed - value.keys()}"
        for name, inner in value.items():
            check(inner, names[name], f"{place}.{name}")
    elif isinstance(field, list):
        assert isinstance(value, list), place
        for number, inner in enumerate(value):
            check(inner, field[0], f"{place}[{number}]")
    elif field.startswith("<"):
        for name, inner in value.items():
            check(inner, field.strip("<>"), f"{place}.{name}")
    elif field in ("int", "bool", "str"):
        assert type(value).__name__ == field, f"{place}: {value!r}, expected {field}"
    else:
        assert value in field.split("|"), f"{place}: {value!r}, expected {field}"


def test_the_jobset_has_the_fields_of_its_kind_and_no_others() -> None:
    fields = yaml.safe_load((ROOT / "tests" / "pure" / "jobset_fields.yaml").read_text())
    manifest = yaml.safe_load(JOBSET.read_text())
    check(manifest, fields, "JobSet")
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["paralellism"] = 4
    with pytest.raises(AssertionError, match="paralellism"):
        check(manifest, fields, "JobSet")


def test_the_dockerfile_copies_what_is_there_and_starts_an_example() -> None:
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "ENTRYPOINT", "CMD"}
    lines = [line.split(maxsplit=1) for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    assert {word for word, _ in lines} == known
    for _, text in (line for line in lines if line[0] == "COPY"):
        assert all((ROOT / name).exists() for name in shlex.split(text)[:-1]), text
    parts = {word: yaml.safe_load(text) for word, text in lines if word in ("ENTRYPOINT", "CMD")}
    assert parts["ENTRYPOINT"] == ["torchrun", "--standalone"]
    pods = yaml.safe_load(JOBSET.read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    user = pods["securityContext"]["fsGroup"]  # else the user of the image cannot write to the volume
    assert f"useradd --uid {user} " in DOCKERFILE.read_text()
    assert (ROOT / parts["CMD"][-1]).exists()
