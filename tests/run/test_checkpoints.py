"""A run's checkpoints: which are kept, which is used when some are damaged, and full disks."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sortedrl.errors import ConfigError, LearnerError, RunDirError
from sortedrl.learner.torch import TorchLearner
from sortedrl.run.checkpoint_folder import OPTIMIZER_FILE, STATE_FILE, Checkpoints, load_state
from sortedrl.run.manifest import MANIFEST_FILE, find_damage
from tests.run.test_checkpoint import SETTINGS, make_batch, make_model, make_tokenizer
from tests.support.small_disk import mount_small_disk

MODEL, TOKENIZER = make_model(), make_tokenizer()


def save(checkpoints: Checkpoints, version: int, note: str = "", add: Callable[[Path], object] | None = None) -> Path:
    return checkpoints.save(version, MODEL, TOKENIZER, extra={"version": version, "note": note}, add=add)


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.fixture
def three(tmp_path: Path) -> Checkpoints:
    """Sound checkpoints 9, 10 and 11, for tests to damage."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    save(checkpoints, 9)
    for version in (10, 11):
        shutil.copytree(checkpoints.folder / "9", checkpoints.folder / str(version))
    return checkpoints


def test_nothing_saved_is_no_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "absent")
    assert checkpoints.latest() is None
    assert checkpoints.versions() == []
    (tmp_path / "absent" / "notes").mkdir(parents=True)
    assert checkpoints.latest() is None


def test_everything_is_there_and_described(tmp_path: Path) -> None:
    def add(folder: Path) -> None:
        (folder / "ledger.sqlite").write_bytes(b"rows")
        (folder / "deep").mkdir()
        (folder / "deep" / "er").write_bytes(b"")

    model = make_model()
    learner = TorchLearner(model, SETTINGS, temperature=1.0)
    learner.start(make_batch(0))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    folder = checkpoints.save(1, model, TOKENIZER, learner=learner, extra={"seq": 7}, add=add)
    assert folder == tmp_path / "checkpoints" / "1" == checkpoints.latest()
    listed = json.loads((folder / MANIFEST_FILE).read_text())["files"]
    assert {"model.safetensors", "tokenizer.json", OPTIMIZER_FILE, STATE_FILE, "deep/er", "ledger.sqlite"} < set(listed)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(listed) == files - {MANIFEST_FILE}
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing, FIPS 180
    assert listed["deep/er"] == {"size": 0, "sha256": empty}
    summed = subprocess.run(["sha256sum", folder / "model.safetensors"], capture_output=True, text=True, check=True)
    assert listed["model.safetensors"]["sha256"] == summed.stdout.split()[0]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert load_state(folder, TorchLearner(loaded, SETTINGS, temperature=1.0)) == {"seq": 7}


def test_the_newest_are_kept_in_numeric_order(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (0, 9, 10, 100):
        save(checkpoints, version)
        assert checkpoints.latest() == tmp_path / str(version)
    assert checkpoints.versions() == [10, 100]
    assert names(tmp_path) == {"10", "100"}
    save(Checkpoints(tmp_path), 101)
    assert checkpoints.versions() == [10, 100, 101]
    with pytest.raises(ConfigError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_old_ones_go_only_when_the_next_is_in_place(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    seen: list[object] = []
    save(checkpoints, 2, add=lambda folder: seen.extend([checkpoints.versions(), checkpoints.latest()]))
    assert seen == [[1], tmp_path / "1"]

    def fail(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(checkpoints, 3, add=fail)
    assert names(tmp_path) == {"2"}
    assert checkpoints.latest() == tmp_path / "2"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path, value: float) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    broken = make_model()
    with torch.no_grad():
        broken.lm_head.weight[3, 2] = value
    with pytest.raises(LearnerError, match=r"lm_head\.weight.*lower learner\.lr"):
        checkpoints.save(2, broken, TOKENIZER)
    assert names(tmp_path) == {"1"}


def test_a_version_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, "first")
    save(checkpoints, 1, "second")
    assert load_state(tmp_path / "1")["note"] == "second"
    assert names(tmp_path) == {"1"}


def test_later_ones_of_a_line_that_was_left_are_dropped(three: Checkpoints) -> None:
    three.drop_after(11)
    assert three.versions() == [9, 10, 11]
    shutil.copytree(three.folder / "10", three.folder / ".12.replaced-1")
    assert three.latest() == three.folder / ".12.replaced-1"
    three.drop_after(10)
    assert names(three.folder) == {"9", "10"}
    (three.folder / "10" / STATE_FILE).unlink()
    three.keep = 1
    path = save(three, 9, "again")  # went on from before 9, since 10 is damaged
    assert (three.latest(), names(three.folder)) == (path, {"9"})


def test_what_killed_processes_left_is_removed_or_put_back(three: Checkpoints) -> None:
    folder = three.folder
    (folder / "9").rename(folder / ".9.replaced-1")
    shutil.copytree(folder / "10", folder / ".10.replaced-1")
    shutil.copytree(folder / "10", folder / ".11.partial-1")
    shutil.copytree(folder / "10", folder / ".8.removed-1")
    (folder / "notes.txt").write_text("somebody's")
    save(three, 12)
    assert names(folder) == {"9", "10", "11", "12", "notes.txt"}


def test_one_that_was_about_to_be_replaced_is_still_found(three: Checkpoints) -> None:
    (three.folder / "11").rename(three.folder / ".11.replaced-1")
    shutil.copytree(three.folder / "10", three.folder / ".11.partial-1")
    shutil.copytree(three.folder / "10", three.folder / ".12.removed-1")
    before = names(three.folder)
    assert three.latest() == three.folder / ".11.replaced-1"
    assert names(three.folder) == before


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_manifest(folder: Path, name: str) -> None:
    document = json.loads((folder / MANIFEST_FILE).read_text())
    document["files"][name] = document["files"][STATE_FILE]
    (folder / MANIFEST_FILE).write_text(json.dumps(document))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (
        lambda f: flip_a_bit(f / "model.safetensors"),
        "model.safetensors: the content does not match its checksum",
    ),
    "short": (lambda f: os.truncate(f / STATE_FILE, 10), f"{STATE_FILE}: 10 bytes, "),
    "gone": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "no manifest": (lambda f: (f / MANIFEST_FILE).unlink(), f"{MANIFEST_FILE}: No such file"),
    "half a manifest": (lambda f: os.truncate(f / MANIFEST_FILE, 100), f"{MANIFEST_FILE}: unreadable"),
    "no text": (lambda f: (f / MANIFEST_FILE).write_bytes(b"\xff\x00"), f"{MANIFEST_FILE}: unreadable"),
    "a list": (lambda f: (f / MANIFEST_FILE).write_text("[]"), f"{MANIFEST_FILE}: unreadable"),
    "empty": (
        lambda f: (f / MANIFEST_FILE).write_text('{"schema_version": 1, "files": {}}'),
        f"{STATE_FILE}: not in {MANIFEST_FILE}",
    ),
    "later": (lambda f: (f / MANIFEST_FILE).write_text('{"schema_version": 2}'), f"{MANIFEST_FILE}: version 2"),
    "parent": (lambda f: edit_manifest(f, f"../10/{STATE_FILE}"), "names '../10/"),
    "absolute": (lambda f: edit_manifest(f, f"{f.parent}/10/{STATE_FILE}"), "not a plain path inside the folder"),
    "link": (
        lambda f: [(f / STATE_FILE).unlink(), (f / STATE_FILE).symlink_to(f"../10/{STATE_FILE}")],
        f"{STATE_FILE}: a symbolic link",
    ),
    "linked folder": (lambda f: (f / "more").symlink_to("../10"), "more: a symbolic link"),
    "all a link": (lambda f: [shutil.rmtree(f), f.symlink_to("10")], "11: a symbolic link"),
    "pipe": (lambda f: os.mkfifo(f / "pipe"), "pipe: not a regular file"),
    "a file": (lambda f: [shutil.rmtree(f), f.write_text("")], "11: Not a directory"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    kind: str, three: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    damage, expected = DAMAGE[kind]
    damage(three.folder / "11")
    with caplog.at_level(logging.WARNING):
        assert three.latest() == three.folder / "10"
    [message] = caplog.messages
    assert str(three.folder / "11") in message
    assert expected in message
    assert message.endswith(f"using {three.folder / '10'} instead")


def test_each_damaged_one_is_named(three: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    (three.folder / "11" / STATE_FILE).unlink()
    flip_a_bit(three.folder / "10" / STATE_FILE)
    with caplog.at_level(logging.WARNING):
        assert three.latest() == three.folder / "9"
    assert [re.findall(r"checkpoints/(\d+)", message) for message in caplog.messages] == [["11", "9"], ["10", "9"]]
    (three.folder / "9" / MANIFEST_FILE).unlink()
    with pytest.raises(RunDirError, match=r"every checkpoint is damaged: .*/11 \(.*/10 \(.*/9 \(.*a copy") as caught:
        three.latest()
    assert "\n" not in str(caught.value)


def test_files_that_came_later_do_no_harm(three: Checkpoints) -> None:
    (three.folder / "11" / "ledger.sqlite-shm").write_bytes(b"x")
    assert three.latest() == three.folder / "11"


def test_links_are_refused_when_saving(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    for ask in (lambda c: save(c, 1), Checkpoints.latest):
        with pytest.raises(RunDirError, match="is a symbolic link"):
            ask(Checkpoints(tmp_path / "link"))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(RunDirError, match="out: a symbolic link: write only regular files"):
        save(checkpoints, 1, add=lambda folder: (folder / "out").symlink_to(tmp_path))
    assert names(tmp_path / "checkpoints") == set()


def test_all_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    synced: list[tuple[int, bool]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, (checkpoints.folder / "1").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    path = save(checkpoints, 1)
    before = {inode for inode, is_named in synced if not is_named}
    assert {entry.stat().st_ino for entry in (*path.iterdir(), path, tmp_path / "run", tmp_path)} <= before
    assert synced[-1] == (checkpoints.folder.stat().st_ino, True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    yield from mount_small_disk("512k", tmp_path)


def fill(disk: Path, *, leave: int) -> None:
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(b"x" * (shutil.disk_usage(disk).free - leave))


def test_a_disk_that_gets_full_anywhere_in_a_save_costs_nothing(small_disk: Path) -> None:
    """Free one more page at a time until a save succeeds, so that each file in turn is the one that does not fit."""
    model = make_model(hidden_size=32)
    learner = TorchLearner(model, SETTINGS, temperature=1.0)
    learner.start(make_batch(0))
    checkpoints = Checkpoints(small_disk / "checkpoints", keep=1)

    def save_to_the_brim(version: int) -> str:
        """The error's text, or nothing."""
        # The estimate is not what is tested here: it would refuse most of these before they begin.
        checkpoints._check_space = lambda *args, **options: None
        try:
            checkpoints.save(version, model, TOKENIZER, learner=learner, add=add)
        except RunDirError as error:
            return str(error)
        return ""

    def add(folder: Path) -> None:
        (folder / "ledger").write_bytes(b"x" * 9000)

    assert save_to_the_brim(1) == ""
    refusals: set[str] = set()
    page = os.sysconf("SC_PAGE_SIZE")
    for num_pages in range(128):
        fill(small_disk, leave=num_pages * page)
        if not (refusal := save_to_the_brim(2)):
            break
        refusals.add(refusal)
        assert re.search(r"checkpoints/2 cannot be written \(.*No space left.*free some space", refusal)
        assert names(checkpoints.folder) == {"1"}
        assert find_damage(checkpoints.folder / "1") is None
    assert len(refusals) > 2  # by safetensors, by tokenizers, by Python
    assert names(checkpoints.folder) == {"2"}
    assert checkpoints.latest() == checkpoints.folder / "2"


def test_a_database_that_does_not_fit_is_the_same_error(small_disk: Path) -> None:
    def add(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
            database.execute("CREATE TABLE t (b BLOB)")
            database.execute("INSERT INTO t VALUES (zeroblob(600000))")
            database.commit()

    checkpoints = Checkpoints(small_disk / "checkpoints")
    with pytest.raises(RunDirError, match=r"cannot be written \(database or disk is full\): free some space"):
        save(checkpoints, 1, add=add)
    assert names(checkpoints.folder) == set()
    assert checkpoints.latest() is None


def test_a_save_that_cannot_fit_is_refused_before_it_begins(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk / "checkpoints")
    num_parameters = sum(parameter.numel() for parameter in MODEL.parameters())
    fill(small_disk, leave=8192)
    called: list[Path] = []
    expected = rf"checkpoints/1 needs about {3 * 4 * num_parameters / 1000:.3g} kB and the disk has 8.19 kB free: free"
    learner = TorchLearner(MODEL, SETTINGS, temperature=1.0)
    with pytest.raises(RunDirError, match=expected):
        checkpoints.save(1, MODEL, TOKENIZER, learner=learner, add=called.append)
    assert called == []
    assert names(small_disk) == {"ballast"}

    (small_disk / "ballast").unlink()
    path = save(checkpoints, 1, add=lambda folder: (folder / "ledger").write_bytes(b"x" * 200_000))
    size = sum(file.stat().st_size for file in path.iterdir() if file.name != MANIFEST_FILE)
    fill(small_disk, leave=150 * 1024)
    free = shutil.disk_usage(small_disk).free
    with pytest.raises(RunDirError, match=f"needs about {size / 1000:.3g} kB and the disk has {free / 1000:.3g} kB"):
        save(checkpoints, 2)
    assert names(checkpoints.folder) == {"1"}
    assert load_file(path / "model.safetensors").keys() <= MODEL.state_dict().keys()
