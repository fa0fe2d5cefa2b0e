"""``shardwise checkpoint`` on small folders: what is there is shown, damage is found, differences are named."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shardwise.checkpoint import finish, load, save
from shardwise.cli.main import main


class Tied(nn.Module):
    """Two names of one weight, and a buffer of a kind of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("short", torch.arange(6, dtype=torch.bfloat16).view(2, 3))
        self.register_buffer("empty", torch.zeros(0, 2))


def _save(folder: Path, model: nn.Module, at: int = 1, **values: object) -> Path:
    try:
        found = save(folder, {"model": model, "values": dict(values)}, step=at)
    finally:
        finish(folder)
    assert found is not None
    return found


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err


def _row(out: str, name: str) -> list[str]:
    """Return the cells of the row that begins with ``name``."""
    return next(
        [c.strip() for c in line.split("│")] for line in out.splitlines() if line.startswith(name) and "│" in line
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        _save(tmp_path / "run" / "checkpoints", Tied(), step, step=step, ratio=float("nan"))
    return tmp_path / "run"


def test_show_lists_checkpoints_tensors_values_and_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "show", run)
    assert (code, err) == (0, "")
    assert _row(out, "step-00000001")[1:3] == ["1", "4"]
    assert _row(out, "model/first.weight (also model/second.weight)")[1:5] == ["F32", "5 x 3", "60 B", "1"]
    assert _row(out, "model/short")[1:4] == ["BF16", "2 x 3", "12 B"]
    assert _row(out, "4 tensors")[2:4] == ["26 elements", "92 B"]
    assert '"step": 2' in _row(out, "values")[1]
    assert _row(out, "part-00000.safetensors")[2] == "1"
    assert '"step": 1' in _run(capsys, "show", run, "--step", 1)[1]


def test_sums_are_those_of_the_tensors_whatever_else_is_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _run(capsys, "show", run, "--sums")[1]
    changed = Tied()
    with torch.no_grad():
        changed.first.bias += 1
    path = _save(run.parent / "other", changed, 7)
    other = _run(capsys, "show", path, "--sums")[1]
    for name, is_same in (("model/first.bias", False), ("model/first.weight", True), ("model/short", True)):
        assert (_row(out, name)[-1] == _row(other, name)[-1]) == is_same, name


def test_verify_finds_one_changed_byte_and_names_its_tensor(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "verify", run)
    assert (code, err) == (0, "")
    assert out.count("whole") == 2
    part = run / "checkpoints" / "step-00000001" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    code, out, err = _run(capsys, "verify", run)
    assert code == 1
    assert (out.count("whole"), out.count("DAMAGED: 1 problem(s)")) == (1, 1)
    assert len(err.splitlines()) == 1
    assert err.startswith(f"shardwise: error: {part}: block 0")
    assert _run(capsys, "verify", run, "--step", 2)[0] == 0


def test_a_manifest_that_is_damaged_is_named_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000002" / "manifest.json").write_text("{}")
    assert "DAMAGED" in _run(capsys, "verify", run)[1]
    code, out, err = _run(capsys, "show", run)
    assert code == 2
    assert "DAMAGED" in _row(out, "step-00000002")[-1]
    assert len(err.splitlines()) == 1
    assert "manifest.json" in err


def test_diff_of_the_same_state_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = _save(run.parent / "again", Tied(), 2, step=2, ratio=float("nan"))
    code, out, err = _run(capsys, "diff", run, again)
    assert (code, err) == (0, "")
    assert "hold the same 5 tensors, to the bit, and the same values" in out


def test_diff_says_which_tensors_differ_and_by_how_much(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Tied()
    with torch.no_grad():
        model.first.bias[1] += 0.5
        model.first.bias[2] = float("nan")
    model.short[0, 0] = -0.0  # other bits, the same value
    model.register_buffer("empty", torch.zeros(3))
    model.register_buffer("more", torch.zeros(1))
    other = _save(run.parent / "other", model, 3, step=3, ratio=float("nan"))
    code, out, _ = _run(capsys, "diff", run, other)
    assert code == 1
    assert _row(out, "model/first.bias")[1:5] == ["F32 [5]", "same", "2", "nan"]
    assert _row(out, "model/short")[3:] == ["1", "0", "0"]
    assert _row(out, "model/empty")[1:] == ["F32 [0, 2]", "F32 [3]", "-", "-", "-"]
    assert _row(out, "values/step")[1:] == ["2", "3"]
    assert "model/more" in [line.strip() for line in out.splitlines()]
    assert "2 tensors are the same to the bit" in out
    assert "ratio" not in out


def test_places_without_checkpoints_are_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "old" / "checkpoints" / "step-00000001" / ".metadata").touch()
    (tmp_path / "file").touch()
    _save(tmp_path / "one", Tied(), 1)
    part = next((tmp_path / "one").glob("step-*/part-*"))
    cases = {
        ("show", tmp_path / "none"): "no such folder",
        ("show", tmp_path / "file"): "is a file; name the folder of a checkpoint, or a run",
        ("verify", part): f"is a file; name {part.parent}",
        ("export", tmp_path / "one", tmp_path / "file"): "is a file; name a folder to export into",
        ("verify", tmp_path): "has no checkpoint",
        ("show", tmp_path / "old"): "torch's own format (DCP)",
        ("show", tmp_path / "one", "--step", 3): "no checkpoint of step 3; it has: 1",
        ("show", part.parent, "--step", 3): "is the checkpoint of step 1, not of --step 3",
        ("diff", tmp_path / "one", tmp_path / "none"): "no such folder",
    }
    for words, expected in cases.items():
        code, _, err = _run(capsys, *words)
        assert code == 2
        assert len(err.splitlines()) == 1, err
        assert expected in err


def test_export_writes_what_safetensors_loads(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = Tied(), run.parent / "out"
    assert _run(capsys, "export", run, out, "--file-bytes", 64)[0] == 0
    files = sorted(out.glob("model-0000?-of-0000?.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    loaded = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    assert len(files) > 1
    assert {name: index[name] for name in loaded} == index
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "second.weight"}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)

    code, _, err = _run(capsys, "export", run, out / "new", "--key", "other")
    assert (code, len(err.splitlines())) == (2, 1), err


def test_convert_takes_dcp_folders_with_the_state_of_the_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[1].parameters()}], lr=0.01
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=flat), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(parts, checkpoint_id=tmp_path / "step-00000012", no_dist=True)
        dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    assert _run(capsys, "convert", tmp_path / "step-00000012", tmp_path / "new")[0] == 0
    again = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fresh = torch.optim.AdamW([{"params": part.parameters()} for part in again])
    assert load(tmp_path / "new", {"model": again, "optimizer": fresh}).step == 12
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(fresh.state[mine][key], optimizer.state[theirs][key]) for key in optimizer.state[theirs])
    assert [(group["lr"], group["weight_decay"]) for group in fresh.param_groups] == [(0.01, 0.0), (0.01, 0.01)]
    for path, expected in ((tmp_path / "other", "expected model.NAME"), (tmp_path, "is not a DCP folder")):
        code, _, err = _run(capsys, "convert", path, tmp_path / "wrong")
        assert (code, len(err.splitlines())) == (2, 1), err
        assert expected in err
