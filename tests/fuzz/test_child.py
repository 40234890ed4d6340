"""Processes of the fuzzer: how they end, which faults hit them, and what they leave behind.

Each case runs in a new process without torch, because it adopts every process that its children leave.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer needs Linux")

PROGRAM = """
import atexit, os, subprocess, sys, tempfile, threading, time
from pathlib import Path
from fuzz import child, faults, planted
from fuzz.control import Control
from fuzz.scenario import Fault, Stage
child.adopt_orphans()
child.SETTLE_S = 0.15
Path("page").write_bytes(bytes(4096))
def leaves_a_process():
    subprocess.Popen(["sleep", "60"], start_new_session=True)
def waits():
    time.sleep(60)
def has_a_helper():
    sys.exit(5 if subprocess.Popen(["sleep", "60"], start_new_session=True).wait() == -9 else 6)
class InterruptedAtTheEnd:
    def flush(self):
        raise KeyboardInterrupt
def is_interrupted_at_the_end():
    sys.stdout = InterruptedAtTheEnd()
def takes_memory():
    bytearray(1 << 30)
def leaves_a_thread():
    threading.Thread(target=lambda: (time.sleep(0.05), print("the thread ended", file=sys.stderr))).start()
def fails_at_its_end():
    atexit.register(lambda: 1 / 0)
def shows_its_end(call, **stage):
    with tempfile.TemporaryDirectory() as folder:
        run(call, **stage)
        print(os.path.exists(folder), *(Path("home/stderr.txt").read_text().splitlines()[-1:]))
def strikes_a_dead_process():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    dead = {process.pid: "true"}
    stages = [Stage(fault=fault) for fault in (Fault.TERM, Fault.KILL, Fault.FREEZE, Fault.HELPER_KILLED)]
    struck = [faults.strike(process.pid, stage, dead, lambda: None) for stage in stages]
    process.wait()
    print(struck, faults.strike(process.pid, stages[-1], dead, lambda: None))
def plants_what_is_not_there():
    def gone():
        planted.replace_method(child, "gone", print)
    planted.PLANTED["gone"] = gone
    try:
        child.run(Control(Path("page")), print, Path("home").absolute(), Stage(), plant="gone")
    except planted.NotPlantedError as error:
        print(error)
def run(call, **stage):
    limits = child.Limits(fault_s=3.0)
    ended = child.run(Control(Path("page")), call, Path("home").absolute(), Stage(**stage), limits=limits)
    print(ended.code, ended.was_hit, [name.strip() for name in ended.processes], "MemoryError" in ended.err)
def run_past_the_deadline(call, **stage):
    limits = child.Limits(fault_s=3.0, deadline=child.Deadline(time.monotonic() + 0.15))
    try:
        child.run(Control(Path("page")), call, Path("home").absolute(), Stage(**stage), limits=limits)
    except child.OutOfTimeError:
        print("out of time", child._descendants(os.getpid()))
"""
CASES = {
    "a process that its starter leaves": ("run(leaves_a_process)", "0 False ['sleep 60'] False"),
    "a kill": ("run(waits, fault=Fault.KILL)", "-9 True [] False"),
    "a helper that is killed": ("run(has_a_helper, fault=Fault.HELPER_KILLED, at=0.02)", "5 True [] False"),
    "an interrupt after its end": ("run(is_interrupted_at_the_end)", "130 False [] False"),
    "no helper to kill": ("run(lambda: time.sleep(0.03), fault=Fault.HELPER_KILLED)", "0 False [] False"),
    "the fuzzer's deadline": ("run_past_the_deadline(has_a_helper)", "out of time {}"),
    "the deadline in a pause": (
        "run_past_the_deadline(waits, fault=Fault.FREEZE_MINUTE, at=0.0)",
        "out of time {}",
    ),
    "the interpreter's own end, or none": (
        "for is_normal in (False, True): shows_its_end(leaves_a_thread, ends_normally=is_normal)\n"
        "shows_its_end(fails_at_its_end, ends_normally=True)",
        "0 False [] False\nTrue\n"
        "0 False [] False\nTrue the thread ended\n"
        "0 False [] False\nTrue ZeroDivisionError: division by zero",
    ),
    "a dead process": ("strikes_a_dead_process()", "[False, False, False, False] False"),
    "a defect that cannot be planted": (
        "plants_what_is_not_there()",
        "gone: NotPlantedError: fuzz.child has no gone any more",
    ),
    "memory that runs out": ("run(takes_memory, fault=Fault.OUT_OF_MEMORY, at=0.5)", "1 False [] True"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_process_and_its_fault(case: str, tmp_path: Path) -> None:
    call, expected = CASES[case]
    command = [sys.executable, "-c", f"{PROGRAM}\n{call}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # this folder is not installed
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.stdout.strip() == expected, done.stderr
