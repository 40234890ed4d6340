"""The cache of compiled libraries: damaged files are compiled again, files that others could write are not loaded."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sortedrl.native import c_library

pytestmark = pytest.mark.skipif(c_library._find_compiler() is None, reason="needs a C compiler")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "tiny.c"
    path.parent.mkdir()
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sortedrl"


def answer(source: Path) -> int:
    library = c_library.load_library(source, [], fallback="the test fails")
    assert library is not None
    return library.answer()


def cached(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def compile_impostor(folder: Path) -> Path:
    """A working library with the same function and another answer."""
    folder.mkdir()
    (folder / "impostor.c").write_text("int answer(void) { return 13; }\n")
    built, compiler = folder / "impostor.so", c_library._find_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, folder / "impostor.c"], check=True)
    built.chmod(0o700)
    return built


# Loading a damaged library may kill a process. This one starts in a moment, because it does without torch.
_CHILD = """
import sys, types
cpu = types.SimpleNamespace(get_cpu_capability=lambda: "DEFAULT")
sys.modules["torch"] = types.SimpleNamespace(backends=types.SimpleNamespace(cpu=cpu))
from pathlib import Path
from sortedrl.native.c_library import load_library
print(load_library(Path(sys.argv[1]), [], fallback="the test fails").answer())
"""


def answer_of_child(source: Path) -> str:
    done = subprocess.run([sys.executable, "-c", _CHILD, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the process died with {done.returncode}: {done.stderr}"
    return done.stdout.strip()


@pytest.mark.parametrize(
    "damage",
    [lambda good: b"", lambda good: good[:5000], lambda good: good[:512] + bytes(len(good) - 512)],
    ids=["empty", "cut short", "zeros"],
)
def test_a_damaged_library_is_compiled_again(source: Path, cache: Path, damage: Callable[[bytes], bytes]) -> None:
    assert answer_of_child(source) == "42"
    library = cached(cache)
    good = library.read_bytes()
    library.write_bytes(damage(good))
    assert answer_of_child(source) == "42"
    assert cached(cache).read_bytes() == good, "the cache was not repaired"


def test_a_library_is_on_disk_before_it_has_its_name(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def record(descriptor: int) -> None:
        assert not list(cache.glob("*.so")), "renamed before it was synced"
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", record)
    assert answer(source) == 42
    assert synced == [cached(cache).stat().st_size]


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_library_that_is_swapped_after_the_check_is_not_loaded(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_proc: bool
) -> None:
    if not has_proc:
        monkeypatch.setattr(c_library, "_DESCRIPTORS", tmp_path / "none")
    monkeypatch.setattr(c_library, "_processor_flags", lambda: ())  # those of the child
    assert answer_of_child(source) == "42"
    impostor, load = compile_impostor(tmp_path / "impostor"), ctypes.CDLL
    library = cached(cache)

    def swap_and_load(path: str) -> ctypes.CDLL:
        impostor.replace(library)
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", swap_and_load)
    assert answer(source) == 42


def test_a_link_in_the_cache_is_not_loaded(source: Path, cache: Path, tmp_path: Path) -> None:
    assert answer(source) == 42
    library = cached(cache)
    library.rename(tmp_path / "moved.so")
    library.symlink_to(tmp_path / "moved.so")
    assert answer(source) == 42
    assert not cached(cache).is_symlink()


def test_a_cache_below_a_folder_that_others_can_write_is_not_used(
    source: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cache.parent.mkdir()
    cache.parent.chmod(0o777)
    assert answer(source) == 42
    assert list(cache.glob("*.so")) == []
    assert f"other users can replace files in {cache.parent}: run chmod go-w on it" in caplog.text
    cache.parent.chmod(0o1777)  # with the sticky bit, others cannot rename what is not theirs
    assert answer(source) == 42
    assert len(list(cache.glob("*.so"))) == 1


def test_two_libraries_in_one_process_are_told_apart(source: Path, cache: Path) -> None:
    other = source.with_name("other.c")
    other.write_text("int answer(void) { return 7; }\n")
    for _ in range(2):
        assert (answer(source), answer(other)) == (42, 7)
