"""The model of a disk that forgets: what a power loss leaves, worked out by hand."""

from __future__ import annotations

import random

from fuzz.disk import Call, Disk, crash_states


def disk_after(*calls: Call) -> Disk:
    disk = Disk()
    for call in calls:
        disk.apply(call)
    return disk


def make(path: str) -> Call:
    return Call(kind="m", path=path)


def create(path: str) -> Call:
    return Call(kind="c", path=path)


def write(path: str, data: bytes, offset: int = 0) -> Call:
    return Call(kind="w", path=path, data=data, offset=offset)


def flush(path: str) -> Call:
    return Call(kind="s", path=path)


def rename(path: str, other: str) -> Call:
    return Call(kind="r", path=path, other=other)


def test_a_file_without_a_flush_is_gone():
    disk = disk_after(create("/r/a"), write("/r/a", b"abc"))
    assert disk.after_power_loss() == (("/r",), {})
    assert disk.with_names_only() == (("/r",), {"/r/a": b""})


def test_a_content_needs_the_flush_of_its_file_and_a_name_that_of_its_folder():
    disk = disk_after(create("/r/a"), write("/r/a", b"abc"), flush("/r/a"))
    assert disk.after_power_loss() == (("/r",), {})
    disk.apply(flush("/r"))
    disk.apply(write("/r/a", b"XY", offset=1))
    assert disk.after_power_loss() == (("/r",), {"/r/a": b"abc"})
    disk.apply(flush("/r/a"))
    assert disk.after_power_loss() == (("/r",), {"/r/a": b"aXY"})


def test_a_flush_tells_what_a_file_holds_that_was_written_by_calls_which_are_not_seen():
    content = Call(kind="f", path="/r/a", data=b"mapped")
    disk = disk_after(content)
    assert disk.with_names_only() == (("/r",), {"/r/a": b""})
    disk.apply(flush("/r/a"))
    assert disk.after_power_loss() == (("/r",), {})
    disk.apply(flush("/r"))
    assert disk.after_power_loss() == (("/r",), {"/r/a": b"mapped"})
    disk.apply(write("/r/a", b"M"))
    disk.apply(Call(kind="f", path="/r/a", data=b"Mapped"))
    assert disk.after_power_loss() == (("/r",), {"/r/a": b"mapped"})


def test_a_rename_is_safe_only_after_the_flush_of_its_folder():
    disk = disk_after(
        *(create("/r/a"), write("/r/a", b"old"), flush("/r/a"), flush("/r")),
        *(create("/r/.t"), write("/r/.t", b"new"), flush("/r/.t"), rename("/r/.t", "/r/a")),
    )
    assert disk.after_power_loss() == (("/r",), {"/r/a": b"old"})
    disk.apply(flush("/r"))
    assert disk.after_power_loss() == (("/r",), {"/r/a": b"new"})


def test_a_folder_that_is_renamed_keeps_what_was_flushed_in_it():
    disk = disk_after(
        *(make("/r/.p"), create("/r/.p/x"), write("/r/.p/x", b"1"), create("/r/.p/y"), write("/r/.p/y", b"2")),
        *(flush("/r/.p/x"), flush("/r/.p"), rename("/r/.p", "/r/5"), flush("/r")),
    )
    assert disk.after_power_loss() == (("/r", "/r/5"), {"/r/5/x": b"1", "/r/5/y": b""})


def test_a_removed_file_is_back_until_its_folder_is_flushed():
    disk = disk_after(create("/r/a"), write("/r/a", b"1"), flush("/r/a"), flush("/r"), Call(kind="u", path="/r/a"))
    assert disk.after_power_loss() == (("/r",), {"/r/a": b"1"})
    disk.apply(flush("/r"))
    assert disk.after_power_loss() == (("/r",), {})


def test_torn_writes_keep_a_prefix_of_what_was_written_since_the_flush():
    disk = disk_after(
        create("/r/a"), write("/r/a", b"ab"), flush("/r/a"), write("/r/a", b"cd", 2), write("/r/a", b"ef", 4)
    )
    seen = {disk.torn(random.Random(seed))[1]["/r/a"] for seed in range(200)}
    assert seen == {b"ab", b"abc", b"abcd", b"abcde", b"abcdef"}


def test_truncating_and_extending():
    disk = disk_after(
        create("/r/a"), write("/r/a", b"abcdef"), Call(kind="t", path="/r/a", offset=2), write("/r/a", b"z", 4)
    )
    disk.apply(flush("/r/a"))
    assert disk.with_names_only() == (("/r",), {"/r/a": b"ab\0\0z"})


def test_states_come_at_every_flush_and_equal_ones_once():
    calls = [make("/r"), create("/r/a"), write("/r/a", b"1"), flush("/r/a"), flush("/r"), flush("/r")]
    names = [state.name for state in crash_states(calls, num_torn=0, seed=0)]
    assert names == ["call 3, unflushed gone", "call 3, names kept", "call 4, names kept"]


def test_a_checkpoint_is_saved_once_its_folder_is_flushed_after_the_rename():
    calls = [
        *(make("/r"), make("/r/checkpoints"), flush("/r")),
        *(
            make("/r/checkpoints/.2.partial-7"),
            flush("/r/checkpoints"),
            rename("/r/checkpoints/.2.partial-7", "/r/checkpoints/2"),
        ),
        *(create("/r/a"), flush("/r/a"), flush("/r/checkpoints"), create("/r/b"), flush("/r/b")),
    ]
    saved = {state.name.partition(",")[0]: state.saved for state in crash_states(calls, num_torn=0, seed=0)}
    assert saved == {"call 2": 0, "call 4": 0, "call 7": 0, "call 10": 2}


def test_what_the_last_flush_saves_is_a_state_too():
    calls = [create("/r/a"), flush("/r"), write("/r/a", b"1"), flush("/r/a")]
    last = list(crash_states(calls, num_torn=0, seed=0))[-1]
    assert (last.name, last.files) == ("the end, unflushed gone", {"/r/a": b"1"})
