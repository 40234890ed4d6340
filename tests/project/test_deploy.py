"""Slurm script, Dockerfile, release workflow and citation: they parse, and what they name exists."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sortedrl.config.shipped import shipped_names

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "deploy" / "slurm.sh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Stands in for sortedrl: tells its arguments, then ends, or waits for SIGTERM and ends as a saved run does.
TRAINER = """#!/usr/bin/env bash
trap 'echo saving; sleep 0.2; exit 143' TERM
echo "trainer: $*"
[ "$ENDS" = yes ] && exit 0
touch started
while true; do sleep 0.05; done
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a Slurm job on one node, in a folder with programs that stand in for the real ones."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    for name, text in {"sortedrl": TRAINER, "scontrol": '#!/usr/bin/env bash\necho "scontrol: $*"\n'}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    return {**os.environ, **slurm, "SORTEDRL_VENV": "venv", "ENDS": "yes"}


def submit(job: dict[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = ["bash", str(SLURM), *arguments]
    return subprocess.Popen(command, cwd=folder, env=job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_job_starts_a_run_of_its_own_name_and_continues_it(job: dict[str, str], tmp_path: Path) -> None:
    first = submit(job, tmp_path, "quickstart", "run.seed=1")
    assert first.communicate()[0] == "trainer: train quickstart run.name=job-7 run.seed=1\n"
    assert first.returncode == 0
    (tmp_path / "runs" / "job-7").mkdir(parents=True)
    (tmp_path / "runs" / "job-7" / "config.toml").write_text("")
    again = submit(job, tmp_path, "quickstart", "run.seed=1")
    assert again.communicate()[0] == "trainer: train --resume runs/job-7\n"


def test_a_job_at_its_limit_waits_for_the_checkpoint_and_is_queued_again(job: dict[str, str], tmp_path: Path) -> None:
    running = submit({**job, "ENDS": "no"}, tmp_path, "quickstart")
    while not (tmp_path / "started").exists():
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    output = running.communicate()[0]
    assert output.splitlines()[-2:] == ["saving", "scontrol: requeue 7"]
    assert running.returncode == 143


def test_a_job_that_is_told_to_end_while_ray_starts_is_queued_again(job: dict[str, str], tmp_path: Path) -> None:
    stand_ins = {"srun": "exit 0", "python": "touch started\necho 1", "sleep": "exec /bin/sleep 0.05"}
    for name, text in stand_ins.items():
        program = tmp_path / "venv" / "bin" / name
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    starting = submit({**job, "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "first"}, tmp_path, "quickstart")
    while not (tmp_path / "started").exists():
        assert starting.poll() is None
        time.sleep(0.02)
    starting.send_signal(signal.SIGTERM)
    assert starting.communicate()[0] == "scontrol: requeue 7\n"
    assert starting.returncode == 143


def test_a_job_without_a_configuration_says_how_to_call_it(job: dict[str, str], tmp_path: Path) -> None:
    done = submit(job, tmp_path)
    assert "usage: sbatch slurm.sh CONFIG" in done.communicate()[0]
    assert done.returncode != 0


def test_the_configurations_that_it_names_ship() -> None:
    named = re.findall(r"slurm\.sh ([\w-]+)(?=\s)", SLURM.read_text())
    assert {"quickstart", "scale-4nodes"} <= set(named)
    assert set(named) - {"CONFIG"} <= set(shipped_names())


def test_the_dockerfile_copies_files_that_exist_and_are_sent() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    sent = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert len(copied) == 6
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in sent
    for names in re.findall(r"EXTRAS=([\w,-]+)", text):
        assert set(names.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_release_workflow_builds_checks_and_publishes_without_a_token() -> None:
    # YAML 1.1 reads the key `on` as true.
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    commands = "\n".join(step.get("run", "") for step in build["steps"])
    for part in ("python -m build", "twine check --strict", 'sortedrl" train quickstart', 'sortedrl" init demo'):
        assert part in commands
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert "password" not in str(publish)


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert {"cff-version", "message", "title", "abstract", "type", "authors"} <= citation.keys()
