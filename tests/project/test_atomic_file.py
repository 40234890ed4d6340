"""Files are written to a fresh temporary file and renamed, so that no link in the folder is ever followed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sortedrl import trainer
from sortedrl.config import SortedConfig
from sortedrl.errors import RunDirError
from sortedrl.ledger.atomic_file import atomic_file, remove_unfinished
from sortedrl.simulate.compare import SimulationQuestion, compare_strategies
from sortedrl.simulate.plan import Proposal
from sortedrl.telemetry.perfetto import open_trace
from sortedrl.telemetry.report import report
from sortedrl.telemetry.report.report import write_report
from sortedrl.telemetry.summary import Summary
from tests.support.synthetic_runs import SyntheticRun, write_run

PRECIOUS = "the user's own file"


def write_page(path: Path) -> None:
    question = SimulationQuestion(trace="lognormal(9, 1, 64)", strategies="sync", slots=8, update_batch=16, knobs={})
    compare_strategies(question, page=path)


def write_trace(path: Path) -> None:
    with open_trace(path):
        pass


def write_proposal(path: Path) -> None:
    parts: dict[str, Any] = dict.fromkeys(("plan", "fit", "check", "explanation", "notes"))  # it does not write these
    Proposal(config=SortedConfig(), **parts).write(path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "report.html": lambda path: write_report([path.parent], path),
    "summary.json": lambda path: Summary(strategy="sync").write(path),
    "trace.json": write_trace,
    "simulation.html": write_page,
    "plan.toml": write_proposal,
    "config.toml": lambda path: trainer._write_config(path, SortedConfig()),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_in_the_folder_leads_no_writer_to_another_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "")
    folder = tmp_path / "run"
    write_run(folder, SyntheticRun("sync", drain=True, updates=1), has_summary=False)
    precious = [tmp_path / "first", tmp_path / "second"]
    for path, link in zip(precious, (folder / f"{name}.part", folder / name), strict=True):
        path.write_text(PRECIOUS)
        link.symlink_to(path)
    before = set(folder.iterdir())
    WRITERS[name](folder / name)
    assert [path.read_text() for path in precious] == [PRECIOUS, PRECIOUS]
    assert not (folder / name).is_symlink()
    assert (folder / name).stat().st_size > 0
    assert set(folder.iterdir()) == before, "a temporary file is left"


def test_a_file_has_the_rights_of_the_umask(tmp_path: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            with atomic_file(tmp_path / "file") as file:
                file.write("text")
        finally:
            os.umask(before)
        assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_an_error_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError), atomic_file(tmp_path / "file") as file:
        file.write("\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


KILLED = """
import os, signal, sys
from pathlib import Path
from sortedrl.ledger.atomic_file import atomic_file
with atomic_file(Path(sys.argv[1]) / "file") as file:
    file.write("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    precious = tmp_path / "precious"
    precious.write_text(PRECIOUS)
    others = {".0123456789abcdef.part-2", ".notes.part", "0123456789abcdef.part", ".0123456789ABCDEF.part"}
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".0000000000000000.part").symlink_to(precious)
    (tmp_path / ".0000000000000001.part").mkdir()
    with atomic_file(tmp_path / "file") as file:
        file.write("whole")
        remove_unfinished(tmp_path)  # while another file is being written
    kept = {path.name for path in tmp_path.iterdir()}
    assert left.name not in kept
    assert kept == others | {"precious", "file", ".0000000000000000.part", ".0000000000000001.part"}
    assert ((tmp_path / "file").read_text(), precious.read_text()) == ("whole", PRECIOUS)


def test_a_folder_in_place_of_the_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"cannot write .*: Is a directory; create its folder or choose another"):
        Summary(strategy="sync").write(tmp_path)
    assert list(tmp_path.iterdir()) == []
