"""Secrets are removed from saved settings, text and log records; other text stays unchanged."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from rich.logging import RichHandler

from sortedrl.config import SortedConfig
from sortedrl.config.shipped import shipped_names
from sortedrl.redact import REDACTED, SafeText, looks_secret, redact, redact_text


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("OLD_HF_TOKEN", "hf_abcdefgh_old")
    monkeypatch.setenv("DEBUG_KEY", "1")
    monkeypatch.setenv("HARMLESS", "harmless-value")


@pytest.mark.parametrize(
    "name", ["API_KEY", "wandb_key", "HF_TOKEN", "client_secret", "Password", "DB_PASSWD", "passphrase"]
)
def test_names_that_look_like_secrets(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["PATH", "TOKENIZERS_PARALLELISM", "tokenizer", "seed", "model.path"])
def test_names_that_do_not(name: str) -> None:
    assert not looks_secret(name)


def test_strings_under_secret_names_are_hidden_at_any_depth() -> None:
    tree = {
        "engine": {"api_key": "abc", "url": "http://host", "max_new_tokens": 512, "password": ""},
        "sinks": [{"kind": "wandb", "credentials": {"user": "ann", "pins": ["x", 7, True, None]}}],
        "pair": ("a", 1.5),
    }
    assert redact(tree) == {
        "engine": {"api_key": REDACTED, "url": "http://host", "max_new_tokens": 512, "password": ""},
        "sinks": [{"kind": "wandb", "credentials": {"user": REDACTED, "pins": [REDACTED, 7, True, None]}}],
        "pair": ("a", 1.5),
    }
    assert tree["engine"]["api_key"] == "abc"  # a copy


def test_secrets_of_the_environment_are_hidden_wherever_they_stand() -> None:
    assert redact({"run": {"note": "uses hf_abcdefgh here"}}) == {"run": {"note": f"uses {REDACTED} here"}}
    assert redact_text("hf_abcdefgh_old, hf_abcdefgh") == f"{REDACTED}, {REDACTED}"
    assert redact_text("harmless-value 1 and 11") == "harmless-value 1 and 11"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("api_key=s3cr3t rest", f"api_key={REDACTED} rest"),
        ("engine.api_key = 's3 cr3t', x", f"engine.api_key = {REDACTED}, x"),
        ('{"hub_token": "abc", "n": 1}', f'{{"hub_token": {REDACTED}, "n": 1}}'),
        ("https://ann:pw@host/x", f"https://ann:{REDACTED}@host/x"),
        ("https://host/x?token=abc&y=1", f"https://host/x?token={REDACTED}&y=1"),
        ("Authorization: Bearer abcdefghij", f"Authorization: Bearer {REDACTED}"),
        ("{'authorization': 'Basic YTpi'}", f"{{'authorization': 'Basic {REDACTED}'}}"),
    ],
)
def test_secrets_in_text(text: str, safe: str) -> None:
    assert redact_text(text) == safe
    assert redact_text(safe) == safe


@pytest.mark.parametrize(
    "text",
    [
        "engine.max_new_tokens=512, learner.micro_tokens = 2014",
        "KeyError: 'no answer'",
        "unknown configuration key 'run.sed': did you mean run.seed?",
        "stop_token = 7, token=1e-3, has_key = true, password=''",
        "tokens: 12, http://host:8000/path, a@b.c, basic configuration",
    ],
)
def test_plain_text_stays(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize("config", shipped_names())
def test_a_configuration_without_secrets_is_saved_as_it_is(config: str) -> None:
    loaded = SortedConfig.load(config)
    assert redact(loaded.model_dump()) == loaded.model_dump()
    assert redact_text(loaded.to_toml()) == loaded.to_toml()


def test_log_records_are_safe_in_a_terminal() -> None:
    screen = io.StringIO()
    handler = RichHandler(
        console=Console(file=screen, force_terminal=True, color_system=None, width=200), show_path=False
    )
    handler.addFilter(SafeText())
    log = logging.getLogger("test_redact")
    log.addHandler(handler)
    try:
        log.warning("answer %r was %s, key=%s", 1, "\x1b[2J\x1b]0;owned\x07", "abcdef")
    finally:
        log.removeHandler(handler)
    shown = screen.getvalue()
    assert rf"answer 1 was \x1b[2J\x1b]0;owned\x07, key={REDACTED}" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
