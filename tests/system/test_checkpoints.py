"""Checkpoints made by torch, DCP and by hand are complete; torn in each way that we know, they are recognised."""

import json
import os
import shutil
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from nvrx_slurm.core.checkpoint.files import needed
from nvrx_slurm.core.checkpoint.recognise import iteration_of
from nvrx_slurm.system.checkpoints import sample, survey

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def tensors(seed):
    return {"model": {"w": torch.full((200, 100), float(seed)), "b": torch.ones(7)}, "step": seed}


def dcp_save(place, seed):
    dcp.save(tensors(seed), checkpoint_id=place, no_dist=True)


def safetensors(path, seed):
    """As the format says: length of the header, header, tensors."""
    data = bytes([seed]) * 6000
    header = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "U8", "shape": [6000], "data_offsets": [0, 6000]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


def save(kind, root, n):
    """A checkpoint of that format, of iteration `n`."""
    if kind == "dcp":
        dcp_save(root / f"step-{n}", n)
        return root / f"step-{n}"
    if kind in ("lightning", "plain"):
        path = root / (f"epoch=1-step={n}.ckpt" if kind == "lightning" else f"step_{n}.pt")
        torch.save(tensors(n), path)
        return path
    place = root / {"megatron": f"iter_{n:07}", "legacy": f"iter_{n:07}", "ranks": f"global_step{n}"}.get(
        kind, f"checkpoint-{n}"
    )
    place.mkdir()
    if kind == "megatron":
        dcp_save(place, n)
        torch.save({"iteration": n}, place / "common.pt")
    elif kind in ("legacy", "ranks"):
        for rank in range(2):
            (place / f"mp_rank_{rank:02}").mkdir()
            torch.save(tensors(n), place / f"mp_rank_{rank:02}" / "model_optim_rng.pt")
    else:
        shards = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
        for shard in shards:
            safetensors(place / shard, n % 256)
        index = {"weight_map": {f"w{k}": shard for k, shard in enumerate(shards)}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        torch.save(tensors(n), place / "optimizer.pt")
        torch.save({}, place / "training_args.bin")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": n}))
    if kind in ("megatron", "legacy"):
        (root / "latest_checkpointed_iteration.txt").write_text(str(n))
    return place


def cut(path, part=0.5):
    os.truncate(path, int(path.stat().st_size * part))


def zeros(path):
    """A file that was allocated, and whose first part never came."""
    with path.open("r+b") as file:
        file.write(bytes(1000))


def later_save_died(place):
    """A save into the same directory writes shards first; the old .metadata stays until its end."""
    shard = place / "__0_0.distcp"
    os.utime(shard, (time.time() + 60, time.time() + 60))


def tracker(place, text):
    (place.parent / "latest_checkpointed_iteration.txt").write_text(text)


TORN = {
    "empty": ("plain", lambda p: cut(p, 0), "empty"),
    "cut zip": ("lightning", cut, "cut off"),
    "cut in its directory": ("plain", lambda p: os.truncate(p, p.stat().st_size - 30), "cut off"),
    "head never written": ("plain", zeros, "first bytes were never"),
    "middle missing": ("plain", lambda p: p.write_bytes(p.read_bytes()[:500] + p.read_bytes()[900:]), "directory"),
    "cut shard": ("dcp", lambda p: cut(p / "__0_0.distcp"), "__0_0.distcp"),
    "shard missing": ("dcp", lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "no .metadata": ("dcp", lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    ".metadata not renamed": ("dcp", lambda p: (p / ".metadata").rename(p / ".metadata.tmp"), ".metadata is missing"),
    "cut .metadata": ("dcp", lambda p: cut(p / ".metadata"), "cut off"),
    "older .metadata": ("dcp", later_save_died, "newer than .metadata"),
    "tracker behind": ("megatron", lambda p: tracker(p, "100"), "says 100"),
    "no common.pt": ("megatron", lambda p: (p / "common.pt").unlink(), "common.pt is missing"),
    "cut rank": ("legacy", lambda p: cut(p / "mp_rank_01" / "model_optim_rng.pt"), "cut off"),
    "rank missing": ("ranks", lambda p: shutil.rmtree(p / "mp_rank_01"), "mp_rank_01"),
    "cut safetensors": ("hf", lambda p: cut(p / "model-00002-of-00002.safetensors"), "bytes"),
    "header only": ("hf", lambda p: os.truncate(p / "model-00001-of-00002.safetensors", 20), "header"),
    "shard of the index missing": ("hf", lambda p: (p / "model-00002-of-00002.safetensors").unlink(), "is missing"),
    "no trainer state": ("hf", lambda p: (p / "trainer_state.json").unlink(), "trainer_state.json is missing"),
    "cut trainer state": ("hf", lambda p: cut(p / "trainer_state.json"), "JSON"),
    "cut optimizer": ("hf", lambda p: cut(p / "optimizer.pt"), "cut off"),
    "not renamed": ("hf", lambda p: p.rename(p.with_name(f"tmp-{p.name}")), "unfinished"),
}


@pytest.mark.parametrize("kind", ["dcp", "lightning", "plain", "megatron", "legacy", "ranks", "hf"])
def test_what_was_saved_well_is_complete(tmp_path, kind):
    for n in (100, 200, 300):
        save(kind, tmp_path, n)
    assert [(one.iteration, one.why) for one in survey(os.fspath(tmp_path))] == [(300, ""), (200, ""), (100, "")]


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_checkpoint_is_recognised_and_the_one_before_it_is_found(tmp_path, torn):
    kind, tear, why = TORN[torn]
    for n in (99, 100, 200):
        last = save(kind, tmp_path, n)
    tear(last)
    newest, *older = survey(os.fspath(tmp_path))
    assert newest.iteration == 200 and why in newest.why, newest
    assert [(one.iteration, one.why) for one in older] == [(100, ""), (99, "")]


@pytest.mark.parametrize("kind", ["dcp", "lightning", "plain"])
def test_the_same_bytes_again_have_the_same_sample(tmp_path, kind):
    for n, seed in ((100, 1), (200, 1), (300, 2)):
        path = save(kind, tmp_path, n)
        if kind == "dcp":
            shutil.rmtree(path)
            dcp_save(path, seed)
        else:
            torch.save(tensors(seed) | {"step": n}, path)
    root = os.fspath(tmp_path)
    last, before, oldest = survey(root)
    assert sample(root, before.name) == sample(root, oldest.name) != sample(root, last.name)


def test_what_is_beside_checkpoints_is_none(tmp_path):
    """Nor do marks, settings and files of other kinds make one torn."""
    place = save("ranks", tmp_path, 100)
    for name, content in (("done", ""), ("config.json", "{}"), ("tokens.bin", "abc"), ("rng.pkl", "x")):
        (place / name).write_text(content)
    (tmp_path / "eval_step_200").mkdir()
    (tmp_path / "eval_step_200" / "samples.json").write_text("[]")
    (tmp_path / "step_300.log").write_text("text")
    (tmp_path / "latest").symlink_to(place)
    assert [(one.name, one.why) for one in survey(os.fspath(tmp_path))] == [("global_step100", "")]


def test_fewer_ranks_are_a_torn_checkpoint_only_once(tmp_path):
    for n in (100, 200, 300):
        place = save("ranks", tmp_path, n)
        if n > 100:
            shutil.rmtree(place / "mp_rank_01")
    assert [bool(one.why) for one in survey(os.fspath(tmp_path))] == [False, True, False]


def test_64_files_take_at_most_50_ms(tmp_path):
    place = save("dcp", tmp_path, 100)
    for rank in range(1, 64):
        shutil.copy2(place / "__0_0.distcp", place / f"__{rank}_0.distcp")
    os.utime(place / ".metadata")
    began_s = time.process_time()
    (found,) = survey(os.fspath(tmp_path))
    assert (found.why, found.files) == ("", 65) and time.process_time() - began_s <= 0.05


def test_the_metadata_of_several_ranks_names_shards_and_sizes(tmp_path):
    """Indices have an offset, too: that of the shard in its tensor."""
    writer = dcp.FileSystemWriter(tmp_path)
    results = [
        WriteResult(MetadataIndex(name, torch.Size([rank * 200, 0]), rank), 9, _StorageInfo(shard, at, 300))
        for rank, shard in enumerate(("__0_0.distcp", "__1_0.distcp"))
        for name, at in (("w", 70_000 + rank), ("b", 0))
    ]
    writer.finish(Metadata({}), [results])
    data = (tmp_path / ".metadata").read_bytes()
    for whole, found in ((data, {"__0_0.distcp": 70_300, "__1_0.distcp": 70_301}), (data[:-9], {})):
        assert needed(".metadata", len(whole), lambda at, length, whole=whole: whole[at : at + length]) == found


def test_names_tell_iterations():
    names = {"epoch=1-step=200-v1.ckpt": 200, "iter_0000300": 300, "checkpoint-7": 7, "runs": -1, "last.ckpt": -1}
    assert {name: iteration_of(name) for name in names} == names
    assert [iteration_of(name, r"m(\d+)\.pt") for name in ("m12.pt", "step_3.pt")] == [12, -1]
