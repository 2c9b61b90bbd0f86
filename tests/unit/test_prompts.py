"""Loading prompts: bad rows named by number, lengths (case C05), empty files (C08), train/held-out overlap."""

from __future__ import annotations

import json

import pytest

from rlhf_cluster.data.chat import ChatRenderer
from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.data.prompts import Overlap, check_overlap, load_prompts, normalise
from rlhf_cluster.types import Prompt
from tests.tiny_tokenizers import ASSISTANT, BOS, EOS, SYSTEM, USER, WITH_BOS, byte_tokenizer, word, word_tokenizer

TWELVE_TOKENS = "w0 w1 w2 w3 w4 w5 w6 w7"  # and 4 of the template
EIGHT_TOKENS = "w0 w1 w2 w3"


@pytest.fixture
def load(tmp_path):
    """Loads rows (objects, or strings written as they are) through the word tokenizer; limit 8, errors by default."""

    def load(*rows, field="prompt", max_prompt_tokens=8, too_long="error", renderer=None):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return load_prompts(
            path,
            field=field,
            renderer=renderer or ChatRenderer(word_tokenizer()),
            max_prompt_tokens=max_prompt_tokens,
            too_long=too_long,
        )

    return load


def test_prompt_of_exactly_the_limit_is_kept_with_all_its_tokens(load):
    loaded = load({"prompt": EIGHT_TOKENS, "topic": "numbers"})
    (prompt,) = loaded.prompts
    assert prompt.token_ids == (BOS, USER, word(0), word(1), word(2), word(3), EOS, ASSISTANT)
    assert (prompt.prompt_id, prompt.text, prompt.metadata) == ("000001", EIGHT_TOKENS, {"topic": "numbers"})
    assert (loaded.n_rows, loaded.dropped_too_long, loaded.truncated) == (1, 0, 0)


def test_prompt_over_the_limit_is_an_error_with_row_length_and_fix(load):
    with pytest.raises(DataError) as caught:
        load({"prompt": EIGHT_TOKENS}, {"prompt": TWELVE_TOKENS})
    assert "1 of 2 rows cannot be used: row 2: 12 tokens, limit 8." in str(caught.value)
    assert "data.max_prompt_tokens" in str(caught.value)
    assert "w5" not in str(caught.value)


def test_dropped_prompts_are_counted(load):
    loaded = load({"prompt": TWELVE_TOKENS}, {"prompt": EIGHT_TOKENS}, too_long="drop")
    assert [prompt.prompt_id for prompt in loaded.prompts] == ["000002"]
    assert (loaded.n_rows, loaded.dropped_too_long, loaded.truncated) == (2, 1, 0)


def test_truncation_cuts_text_on_the_left_and_keeps_question_template_and_generation_prompt(load):
    loaded = load({"prompt": TWELVE_TOKENS}, too_long="truncate_left")
    (prompt,) = loaded.prompts
    assert prompt.token_ids == (BOS, USER, word(4), word(5), word(6), word(7), EOS, ASSISTANT)
    assert prompt.text == "w4 w5 w6 w7"
    assert (loaded.truncated, loaded.dropped_too_long) == (1, 0)


def test_truncation_takes_no_more_words_than_it_must(load):
    (prompt,) = load({"prompt": TWELVE_TOKENS}, max_prompt_tokens=11, too_long="truncate_left").prompts
    assert prompt.text == "w1 w2 w3 w4 w5 w6 w7"


def test_truncation_of_a_conversation_leaves_the_earlier_turns_whole(load):
    turns = [{"role": "system", "content": "w9"}, {"role": "user", "content": EIGHT_TOKENS}]
    (prompt,) = load({"prompt": turns}, max_prompt_tokens=9, too_long="truncate_left").prompts
    assert prompt.token_ids == (BOS, SYSTEM, word(9), EOS, USER, word(2), word(3), EOS, ASSISTANT)
    assert prompt.metadata["messages"] == [turns[0], {"role": "user", "content": "w2 w3"}]


def test_truncation_cuts_inside_a_word_when_the_last_word_alone_is_too_long(load):
    # Byte tokenizer: <s> <|user|> text </s> \n <|assistant|> is 5 ids and one id a byte.
    renderer = ChatRenderer(byte_tokenizer())
    (prompt,) = load({"prompt": "ask abcdef"}, too_long="truncate_left", renderer=renderer).prompts
    assert prompt.text == "def"
    assert len(prompt.token_ids) == 8


def test_limit_without_room_for_text_is_an_error_even_when_truncating(load):
    with pytest.raises(DataError, match="row 1: no text of the last message fits beside the template"):
        load({"prompt": TWELVE_TOKENS}, max_prompt_tokens=4, too_long="truncate_left")


def test_nothing_left_says_how_many_rows_and_why(load):
    with pytest.raises(DataError, match=r"0 of 3 rows left: 3 too long \(limit 8\)"):
        load(*[{"prompt": TWELVE_TOKENS}] * 3, too_long="drop")
    with pytest.raises(DataError, match="0 of 0 rows left"):
        load()


def test_bad_rows_are_named_by_line_number(load):
    with pytest.raises(DataError) as caught:
        load('{"prompt": ', {"text": "w0"}, {"prompt": " "}, {"prompt": 7}, "", {"prompt": "w0"})
    assert [row.line for row in caught.value.rows] == [1, 2, 3, 4, 5]
    message = str(caught.value)
    assert "5 of 6 rows" in message
    assert "row 1: not valid JSON" in message
    assert "row 2: no field 'prompt'" in message
    assert "row 3: field 'prompt' is empty" in message
    assert "row 4: field 'prompt' is a JSON int" in message
    assert "row 5: a blank line" in message


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "w0", "id": "\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "w0 \\udfff"}', "half of a surrogate pair"),
        ('{"prompt": "w0", "n": ' + "9" * 5000 + "}", "cannot be read (ValueError"),
        ('{"prompt": ' + "[" * 100_000, "cannot be read (RecursionError"),
    ],
)
def test_json_that_python_cannot_hold_is_a_bad_row(load, row, reason):
    with pytest.raises(DataError) as caught:
        load(row, {"prompt": "w0"})
    assert [bad.line for bad in caught.value.rows] == [1]
    assert reason in str(caught.value)


def test_only_the_first_five_bad_rows_are_shown(load):
    with pytest.raises(DataError, match=r"row 5: a JSON list, not an object; and 2 more\."):
        load(*["[]"] * 7)


def test_blank_lines_at_the_end_are_ignored(load):
    assert load({"prompt": "w0"}, "", "  ").n_rows == 1


def test_line_separator_inside_a_string_does_not_end_the_row(load):
    (prompt,) = load('{"prompt": "w0\u2028w1"}').prompts
    assert prompt.token_ids[2:4] == (word(0), word(1))


def test_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read \(No such file"):
        load_prompts(
            tmp_path / "nowhere.jsonl",
            field="prompt",
            renderer=ChatRenderer(word_tokenizer()),
            max_prompt_tokens=8,
            too_long="error",
        )


def test_own_ids_are_used_and_doubled_ones_refused(load):
    loaded = load({"id": "a", "question": "w0"}, {"id": 7, "question": "w1"}, field="question")
    assert [prompt.prompt_id for prompt in loaded.prompts] == ["a", "7"]
    with pytest.raises(DataError, match="row 2: id 'a' is already that of row 1"):
        load({"id": "a", "prompt": "w0"}, {"id": "a", "prompt": "w1"})


def test_row_that_the_template_refuses_is_named(load):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + WITH_BOS
    turns = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w0"}]
    with pytest.raises(DataError, match=r"row 1: the chat template refuses the conversation \(no system role\)"):
        load({"prompt": turns}, renderer=ChatRenderer(word_tokenizer(template)))


def test_messages_field_beside_a_plain_prompt_is_not_taken_for_its_conversation(load):
    (prompt,) = load({"prompt": "w0", "messages": "unrelated", "source": "x"}).prompts
    assert prompt.metadata == {"source": "x"}


def test_prompt_text_stays_out_of_the_repr(load):
    assert "w3" not in repr(load({"prompt": EIGHT_TOKENS}).prompts[0])


def prompt_of(prompt_id, text):
    return Prompt(prompt_id, (1,), text)


def test_overlap_is_found_exactly_and_after_normalising():
    train = [prompt_of("t1", "How are you?"), prompt_of("t2", "Tell me a joke."), prompt_of("t3", "?!")]
    heldout = [
        prompt_of("h1", "How are you?"),
        prompt_of("h2", "  TELL me --\n a   joke "),
        prompt_of("h3", "Tell me a story."),
        prompt_of("h4", "..."),
    ]
    assert check_overlap(train, heldout) == [Overlap("h1", "t1", True), Overlap("h2", "t2", False)]


def test_overlap_compares_whole_conversations():
    def chat(prompt_id, system):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
        return Prompt(prompt_id, (1,), "hi", {"messages": messages})

    assert check_overlap([chat("t", "Be kind")], [chat("h1", "Be short"), chat("h2", "be kind!")]) == [
        Overlap("h2", "t", False)
    ]


def test_normalise_collapses_case_width_spaces_and_punctuation():
    assert normalise("  Straße…  it's_OK \uff21\uff22 ") == "strasse it s ok ab"
