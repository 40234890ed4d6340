"""Whatever is in a file or a row, loaders answer with a value or with an error of this package."""

from __future__ import annotations

import json
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sortedrl.config import SortedConfig
from sortedrl.errors import SortedRLError
from sortedrl.learner.model import load_tokenizer
from sortedrl.simulate.traces import load_trace
from sortedrl.tasks.base import DatasetTask, PromptStream
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.summary import Summary

MANY = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TOKENIZER = load_tokenizer(knights_tiny_path())

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
sections = st.sampled_from([*SortedConfig.model_fields, "runs", "", "x"])
keys = st.sampled_from(
    [key for field in SortedConfig.model_fields.values() for key in type(field.default).model_fields] + ["", "y", "a.b"]
)


@MANY
@given(tree=st.dictionaries(sections, st.dictionaries(keys, values, max_size=3) | values, max_size=3))
@example(tree={"schedule": {"update_batch": 10**400}})
@example(tree={"task": {"people": {"two": 1.0}}})
def test_any_tree_is_a_configuration_or_a_configuration_error(tree: dict[str, Any]) -> None:
    with suppress(SortedRLError):
        config = SortedConfig(**tree)
        assert SortedConfig(**tomllib.loads(config.to_toml())).resolved() == config.resolved()


@MANY
@given(text=st.text(max_size=60) | st.binary(max_size=60), overrides=st.lists(st.text(max_size=20), max_size=2))
@example(text="[run]\nsamples = 16", overrides=["run.dir='\x00'"])
def test_any_file_is_a_configuration_or_a_configuration_error(text: str | bytes, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.toml")
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        with suppress(SortedRLError):
            SortedConfig.load(path, overrides)


messages = st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), scalars, max_size=3), max_size=3)
rows = st.dictionaries(
    st.sampled_from(["prompt", "answer", "x"]), values | messages | st.just("Ann says Bob-knave . ?")
)


@MANY
@given(dataset=st.lists(rows, max_size=3))
@example(dataset=[{"prompt": [{"role": "user", "content": None}]}])
@example(dataset=[{"prompt": "\ud800"}])
def test_any_rows_are_prompts_or_a_data_error(dataset: list[dict[str, Any]]) -> None:
    with suppress(SortedRLError):
        task = DatasetTask(rows=dataset, reward_funcs=[lambda **columns: [0.0]])
        PromptStream(task=task, tokenizer=TOKENIZER, seed=0, max_prompt_tokens=64).take(len(dataset))


documents = values.map(lambda value: json.dumps(value, default=str)) | st.text(max_size=40)


@MANY
@given(text=documents, ending=st.sampled_from([".json", ".csv", ".jsonl", ".parquet", ".txt", ""]))
@example(text="[1e999]", ending=".json")
@example(text="length\n1e999\n", ending=".csv")
@example(text="[" * 5000, ending=".json")
def test_any_file_is_a_trace_or_an_error_that_says_why(text: str, ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"trace{ending}")
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with suppress(SortedRLError):
            assert load_trace(str(path)).num_samples > 0


@MANY
@given(
    text=st.sampled_from(["lognormal", "bimodal", "x"]).flatmap(
        lambda name: st.lists(scalars.map(str), max_size=5).map(lambda parts: f"{name}({', '.join(parts)})")
    )
)
def test_any_distribution_is_a_trace_or_an_error_that_says_why(text: str) -> None:
    with suppress(SortedRLError):
        assert load_trace(text, samples=16).num_samples == 16


@MANY
@given(lines=st.lists(documents, max_size=4))
@example(lines=['{"kind": "BatchTaken", "t": []}', '{"kind": "RunStarted"}'])
def test_any_file_is_events_and_a_summary_or_an_error_that_says_why(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "events.jsonl")
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        for read in (lambda: list(read_events(path)), lambda: Summary.read(path)):
            with suppress(SortedRLError):
                read()
