"""The embedded task: puzzles, verifier, teachers, split, prompt streams, and the shipped checkpoint's files."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from sortedrl.errors import ConfigError, DataError
from sortedrl.records import Prompt
from sortedrl.tasks.base import DatasetTask, PromptStream, make_prompt
from sortedrl.tasks.knights import MAX_TRACE_WORDS, KnightsTask, draw, is_heldout, parse, teach, verify
from sortedrl.tasks.tiny import knights_tiny_path, make_tokenizer

PROMPT = "Ann says Bob-knave . Bob says both Ann-knight Bob-knight . ?"
ANSWER = "Ann=knight Bob=knave"
# Pinned: were it to change, runs would no longer be comparable with earlier ones.
FIRST_PROMPT_OF_SEED_7 = (
    "Fay says Dan-knave . Dan says both Dan-knave Bob-knight . Bob says Cid-knight . Cid says Dan-knight . ?"
)


def solve_by_text(prompt: str) -> list[str]:
    """Every consistent assignment, from the words of the prompt alone."""
    sentences = [sentence.split() for sentence in prompt.rstrip("?").split(" . ") if sentence.strip()]
    names = [words[0] for words in sentences]
    found = []
    for roles in itertools.product(("knight", "knave"), repeat=len(names)):
        role_of: dict[str, str] = dict(zip(names, roles, strict=True))

        def is_true(literal: str, role_of: dict[str, str] = role_of) -> bool:
            name, role = literal.split("-")
            return role_of[name] == role

        def claim(said: Sequence[str]) -> bool:
            if said[0] == "both":
                return is_true(said[1]) and is_true(said[2])
            if said[0] == "either":
                return is_true(said[1]) or is_true(said[2])
            return is_true(said[0])

        if all(claim(words[2:]) == (role_of[words[0]] == "knight") for words in sentences):
            found.append(" ".join(f"{name}={role_of[name]}" for name in names))
    return found


@pytest.mark.parametrize("num_people", [2, 3, 4, 5])
def test_every_puzzle_has_the_one_solution_that_its_row_names(num_people: int) -> None:
    rows = KnightsTask(seed=3, people={num_people: 1}).train
    for index in range(60):
        row = rows.row(index)
        assert row["people"] == num_people
        assert solve_by_text(row["prompt"]) == [row["answer"]]


def test_hand_made_puzzle() -> None:
    # Were Ann a knave, Bob would be a knight and Ann a knight: a contradiction. So Ann is a knight and Bob a knave.
    assert solve_by_text(PROMPT) == [ANSWER]
    assert teach(parse(PROMPT)) == (
        "try Ann=knight Bob=knight Ann=knight Bob-knave no bad "
        "try Ann=knave Bob=knight Ann=knave Bob-knave no Bob=knight both Ann-knight no Bob-knight yes bad "
        "try Ann=knight Bob=knave Ann=knight Bob-knave yes Bob=knave both Ann-knight yes Bob-knight no "
        "answer Ann=knight Bob=knave done"
    )


def test_parse_is_the_inverse_of_prompt() -> None:
    rng = random.Random(5)
    for num_people in (2, 3, 4, 5):
        for _ in range(20):
            puzzle = draw(rng, num_people)
            assert parse(puzzle.prompt).prompt == puzzle.prompt


@pytest.mark.parametrize("prompt", ["", "hello", "Ann says Cid-knave . ?", "Ann says Ann-king . ?", PROMPT + " more"])
def test_parse_refuses_what_is_no_puzzle(prompt: str) -> None:
    with pytest.raises(DataError, match="not a Knights and Knaves prompt"):
        parse(prompt)


def reward(completion: str, answer: str = ANSWER) -> float:
    return verify([PROMPT], [completion], answer=[answer], people=[2])[0]


def test_verifier_accepts_the_right_answer_with_or_without_a_trace() -> None:
    assert reward("answer Ann=knight Bob=knave done") == 1.0
    assert reward("try Ann=knave bad try Ann=knight Bob=knave answer Ann=knight Bob=knave done") == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "answer Ann=knave Bob=knave done",  # each flip
        "answer Ann=knight Bob=knight done",
        "answer Ann=knave Bob=knight done",
        "answer Ann=knight Bob=knave",  # no end
        "answer Ann=knight Bob=knave done done",  # extra words
        "answer Ann=knight Bob=knave done try",
        "answer the Ann=knight Bob=knave done",
        "answer Ann=knave Bob=knave done answer Ann=knight Bob=knave done",  # two answers, the last or the first right
        "answer Ann=knight Bob=knave done answer Ann=knave Bob=knave done",
        "answer Ann=knight Bob=knave done answer Ann=knight Bob=knave done",
        "answer Ann=knight done",  # missing names
        "answer Bob=knave done",
        "answer done",
        "answer Bob=knave Ann=knight done",  # wrong order
        "answer Ann=knight Bob=knave Cid=knave done",  # a stranger
        "Ann=knight Bob=knave done",  # no answer at all
        "",
    ],
)
def test_verifier_refuses(completion: str) -> None:
    assert reward(completion) == 0.0


def test_patient_teacher_is_always_right_and_impatient_one_stops_at_a_refuted_guess() -> None:
    rng = random.Random(0)
    task = KnightsTask(seed=1)
    for index in range(200):
        row = task.train.row(index)
        puzzle = parse(row["prompt"])
        trace = teach(puzzle)
        assert verify([row["prompt"]], [trace], answer=[row["answer"]]) == [1.0]
        assert len(trace.split()) <= MAX_TRACE_WORDS
        hasty = teach(puzzle, rng, give_up=1.0)
        first_is_right = "knave" not in row["answer"]
        assert hasty.count("try") == 1
        assert verify([row["prompt"]], [hasty], answer=[row["answer"]]) == [float(first_is_right)]


def test_careless_teacher_overlooks_every_refutation_or_some() -> None:
    puzzle = parse(PROMPT)
    assert teach(puzzle, random.Random(0), overlook=1.0) == (
        "try Ann=knight Bob=knight Ann=knight Bob-knave no Bob=knight both Ann-knight yes Bob-knight yes "
        "answer Ann=knight Bob=knight done"
    )
    rng = random.Random(0)
    rewards = [reward(teach(puzzle, rng, overlook=0.5)) for _ in range(2000)]
    # Each of the two tries before the right one has a single refutation, so both are refuted a quarter of the time.
    assert sum(rewards) / 2000 == pytest.approx(0.25, abs=0.04)


def test_rows_depend_on_seed_and_index_alone() -> None:
    forwards = [KnightsTask(seed=7).train.row(index) for index in range(30)]
    backwards = [KnightsTask(seed=7).train.row(index) for index in reversed(range(30))]
    assert forwards == backwards[::-1]
    assert forwards != [KnightsTask(seed=8).train.row(index) for index in range(30)]
    assert forwards[0]["prompt"] == FIRST_PROMPT_OF_SEED_7


def test_training_never_meets_held_out_puzzles() -> None:
    heldout = {row["prompt"] for row in KnightsTask(seed=0, people={2: 1}).heldout(200)}
    assert len(heldout) == 200
    train = KnightsTask(seed=0, people={2: 1, 3: 1}).train
    prompts = {train.row(index)["prompt"] for index in range(20_000)}
    assert sum(prompt.count("says") == 2 for prompt in prompts) > 2_000  # of 3,814: a leak would show
    assert not heldout & prompts
    assert not any(is_heldout(prompt) for prompt in prompts)
    assert all(is_heldout(prompt) for prompt in heldout)


def test_held_out_rows_are_the_same_for_every_seed_and_distinct() -> None:
    rows = KnightsTask(seed=0).heldout(256)
    assert rows == KnightsTask(seed=9).heldout(256)
    assert rows[:40] == KnightsTask(seed=0).heldout(40)
    assert len({row["prompt"] for row in rows}) == 256
    assert {row["people"] for row in rows} == {2, 3, 4, 5}


def test_more_held_out_rows_than_puzzles_repeats_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sortedrl.tasks.knights.MAX_REDRAWS", 60)
    rows = KnightsTask(people={2: 1}).heldout(520)
    assert len(rows) == 520
    assert 100 < len({row["prompt"] for row in rows}) <= 506  # there are no more


@pytest.mark.parametrize("people", [{1: 1}, {6: 1}, {2: -1, 3: 2}, {2: 0}, {}])
def test_impossible_numbers_of_people_are_refused(people: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match=r"task\.people"):
        KnightsTask(people=people)


def ids(taken: list[tuple[int, Prompt]]) -> list[tuple[int, str]]:
    return [(epoch, prompt.id) for epoch, prompt in taken]


def test_stream_resumes_exactly_from_its_cursor() -> None:
    tokenizer = make_tokenizer()
    stream = PromptStream(task=KnightsTask(seed=2), tokenizer=tokenizer, seed=2, max_prompt_tokens=64)
    assert ids(stream.take(3)) == [(0, "knights/0"), (0, "knights/1"), (0, "knights/2")]
    state = stream.state_dict()
    rest = stream.take(5)
    again = PromptStream(task=KnightsTask(seed=2), tokenizer=tokenizer, seed=2, max_prompt_tokens=64)
    again.load_state_dict(state)
    assert again.take(5) == rest
    assert rest[0][1].columns.keys() == {"answer", "people"}
    assert tokenizer.decode(list(rest[0][1].tokens)) == rest[0][1].content
    with pytest.raises(DataError, match=r"run\.seed=2"):
        PromptStream(task=KnightsTask(), tokenizer=tokenizer, seed=3, max_prompt_tokens=64).load_state_dict(state)


def zero(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    return [0.0] * len(prompts)


def test_finite_dataset_comes_once_per_epoch_in_another_order() -> None:
    task = DatasetTask(rows=[{"prompt": PROMPT, "number": n} for n in range(20)], reward_funcs=[zero], name="small")
    stream = PromptStream(task=task, tokenizer=make_tokenizer(), seed=0, max_prompt_tokens=64)
    taken = ids(stream.take(7) + stream.take(40))
    first, second = taken[:20], taken[20:40]
    assert sorted(first) == sorted((0, f"small/{n}") for n in range(20))
    assert sorted(second) == sorted((1, f"small/{n}") for n in range(20))
    assert [name for _, name in first] != [name for _, name in second]
    resumed = PromptStream(task=task, tokenizer=make_tokenizer(), seed=0, max_prompt_tokens=64, cursor=15)
    assert ids(resumed.take(10)) == taken[15:25]


def test_dataset_errors_name_the_trouble() -> None:
    with pytest.raises(DataError, match="is empty"):
        DatasetTask(rows=[], reward_funcs=[zero])
    with pytest.raises(DataError, match=r"no column 'prompt' \(it has: 'question', 'answer'\)"):
        DatasetTask(rows=[{"question": "why", "answer": "so"}], reward_funcs=[zero])
    with pytest.raises(DataError, match="must be text that is not empty"):
        DatasetTask(rows=[{"prompt": " "}], reward_funcs=[zero])
    with pytest.raises(DataError, match="no reward function"):
        DatasetTask(rows=[{"prompt": "hi"}], reward_funcs=[])


def test_held_out_rows_of_a_dataset() -> None:
    rows = [{"prompt": f"question {n}"} for n in range(4)]
    task = DatasetTask(rows=rows, reward_funcs=[zero], eval_rows=rows[2:])
    assert task.heldout(5) == rows[2:]
    assert DatasetTask(rows=rows, reward_funcs=[zero]).heldout(5) == []


def test_unusable_prompts_are_refused_by_row() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match=r"row small/3 has 11 tokens, more than the limit of 10"):
        make_prompt({"prompt": PROMPT}, tokenizer, prompt_id="small/3", max_tokens=10)
    chat = [{"role": "user", "content": "a" * 6000}, {"role": "user", "content": "a" * 4241}]
    for prompt in ("a" * 10_241, chat):  # a tokenizer is not asked
        with pytest.raises(DataError, match=r"row small/3 has 10,241 characters, more than the limit of 10 tokens"):
            make_prompt({"prompt": prompt}, None, prompt_id="small/3", max_tokens=10)
    with pytest.raises(DataError, match="unknown to the tokenizer"):
        make_prompt({"prompt": "what is two plus two"}, tokenizer, prompt_id="x/0", max_tokens=99)
    chat = [{"role": "user", "content": PROMPT}]
    with pytest.raises(DataError, match="no chat template"):
        make_prompt({"prompt": chat}, tokenizer, prompt_id="x/0", max_tokens=99)


def test_chat_messages_go_through_the_chat_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}says {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}answer{% endif %}"
    )
    prompt = make_prompt({"prompt": [{"role": "user", "content": PROMPT}]}, tokenizer, prompt_id="x/0", max_tokens=99)
    assert tokenizer.decode(list(prompt.tokens)) == f"says {PROMPT} answer"
    assert prompt.content == [{"role": "user", "content": PROMPT}]


def test_tokenizer_round_trip_and_shipped_files() -> None:
    from transformers import AutoTokenizer

    shipped = AutoTokenizer.from_pretrained(knights_tiny_path())
    made = make_tokenizer()
    assert shipped.get_vocab() == made.get_vocab()
    assert (shipped.eos_token, shipped.pad_token) == ("<eos>", "<pad>")
    rng = random.Random(4)
    for num_people in (2, 3, 4, 5):
        text = (puzzle := draw(rng, num_people)).prompt + " " + teach(puzzle)
        tokens = shipped(text)["input_ids"]
        assert len(tokens) == len(text.split())
        assert shipped.unk_token_id not in tokens
        assert shipped.decode([*tokens, shipped.eos_token_id], skip_special_tokens=True) == text


def test_shipped_model_loads() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(knights_tiny_path())
    assert model.config.head_dim == 32
    assert model.config.max_position_embeddings >= 768
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
