"""prompts.py against the host's own calls: the chat template per prompt, then one padded tokenizer call."""

from __future__ import annotations

import json
import logging
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jev.api import candidate_prompts, compile_request
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from openjev_fast_plugin import prompts
from openjev_fast_plugin.prompts import PromptEncoder

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# With the turns of Qwen's templates: tool answers are no user query, and a chat needs one.
STRICT_TEMPLATE = """\
{%- set ns = namespace(found=false) %}
{%- for message in messages[::-1] %}
    {%- set content = message.content|trim %}
    {%- set tool = content.startswith('<tool_response>') and content.endswith('</tool_response>') %}
    {%- if message.role == "user" and not tool %}
        {%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- if not ns.found %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content|trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

NASTY = [
    *("\n", "\n\n", "\r", "\r\n", " ", "  ", "\t", "\x0b", "\x0c", "\x85", "\xa0", "\u2028", "\u3000"),
    *("'", "'s", "'S", "\u017f", "'\u017f", "'re", "it's", "I'LL", "don't", "x", "Q", "a b", "Is", "No."),
    *("\u0301", "e\u0301", "\xe9", "\u1100\u1161", "\uac00", "\u0e33", "\u0327\u0301", "\u212b", "\u2126"),
    *("0", "12345", "3.14", "\u0664", "\u00bd", "...", "!?", "{", '"', "\\n", "\\", "{{ x }}", "{% i %}"),
    *("\u4e2d\u6587", "\U0001f642", "\U0001f468\u200d\U0001f469", "\u05e9\u05dc", "\U0010ffff", "\x00"),
    *("<|im_start|>", "<|im_end|>", "<|im_start|>user\n", "<|im_end|>\n", "<|endoftext|>", "<|im_", "end|>"),
    *("<think>", "</think>", "<think>\n\n</think>\n\n", "<tool_response>", "</tool_response>", "<think"),
    *("Context:\n", "\n\nQuestion: ", "\nProposed answer: ", "\nIs this", "assistant\n", "\u037e"),
]  # fmt: skip

texts = st.one_of(
    st.text(max_size=40),
    st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=3)), max_size=14).map("".join),
)
some_text = texts.filter(bool)
states = st.one_of(
    texts,
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
        max_leaves=6,
    ).filter(lambda value: isinstance(value, (dict, list))),
)
questions = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("choice"),
            "instructions": some_text,
            "criteria": st.dictionaries(some_text, st.one_of(st.none(), texts), min_size=1, max_size=5),
        }
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("score"),
            "instructions": some_text,
            "criteria": st.lists(some_text, min_size=2, max_size=4),
        }
    ),
    st.fixed_dictionaries({"type": st.just("noul"), "instructions": some_text}),
)
requests = st.tuples(states, st.lists(questions, min_size=1, max_size=3)).map(
    lambda drawn: compile_request(
        drawn[0], {f"q{index}": question for index, question in enumerate(drawn[1])}
    )
)


def host_ids(tokenizer, records) -> list[list[list[int]]]:
    """The host's calls as its contract states them, padding removed again by the attention mask."""
    groups = [candidate_prompts(record) for record in records]
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        for group in groups
        for prompt in group
    ]
    batch = tokenizer(rendered, padding=True, truncation=False)
    rows = iter(zip(batch["input_ids"], batch["attention_mask"], strict=True))
    return [[[i for i, m in zip(*next(rows), strict=True) if m] for _ in group] for group in groups]


def same_ids(encoder: PromptEncoder, tokenizer, records) -> None:
    found = encoder.encode(records)
    assert all(ids.dtype == np.int32 and ids.ndim == 1 for group in found for ids in group)
    assert [[ids.tolist() for ids in group] for group in found] == host_ids(tokenizer, records)


def example(state="The parcel is late. Refund me!") -> list[dict]:
    return compile_request(
        state,
        {
            "route": {
                "type": "choice",
                "instructions": "Who handles it?",
                "criteria": {"billing": "money and refunds", "shipping": None, "other": ""},
            },
            "refund": {
                "type": "noul",
                "instructions": "Is a refund asked for?",
                "criteria": {"true": "it is", "false": "it is not"},
            },
            "urgency": {
                "type": "score",
                "instructions": "How urgent?",
                "criteria": ["low", "medium", "high"],
            },
        },
    )


def encoder_of(tokenizer, caplog, *, plain: str | None) -> PromptEncoder:
    """An encoder that must, or must not, have chosen the plain way; plain is part of the reason it logs."""
    with caplog.at_level(logging.INFO, logger="openjev_fast_plugin.prompts"):
        caplog.clear()
        encoder = PromptEncoder(tokenizer, candidate_prompts)
    assert len(caplog.messages) == (plain is not None), caplog.messages
    if plain is not None:
        assert plain in caplog.messages[0]
    return encoder


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> str:
    return json.loads((tiny_checkpoint / "model.json").read_text("utf-8"))["model_id"]


@pytest.fixture(scope="module")
def qwen(base):
    return AutoTokenizer.from_pretrained(base)


@pytest.fixture(scope="module")
def encoder(qwen):
    return PromptEncoder(qwen, candidate_prompts)


@pytest.fixture
def variant(base):
    """variant(change, **options): the tokenizer with its JSON changed in place by change."""

    def make(change=lambda data: None, *, kind=PreTrainedTokenizerFast, **options):
        original = AutoTokenizer.from_pretrained(base)
        data = json.loads(original.backend_tokenizer.to_str())
        change(data)
        options = {"chat_template": original.chat_template, "pad_token": "<|endoftext|>", **options}
        return kind(tokenizer_object=Tokenizer.from_str(json.dumps(data)), **options)

    return make


def set_split(data, pattern=QWEN2_SPLIT):
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}


# Same ids


def test_qwen_tokenizer_is_cut(qwen, caplog):
    same_ids(encoder_of(qwen, caplog, plain=None), qwen, example())


@settings(max_examples=200, deadline=None)
@given(requests)
def test_same_ids_as_the_host(encoder, qwen, records):
    same_ids(encoder, qwen, records)


@settings(max_examples=40, deadline=None)
@given(st.lists(requests, min_size=2, max_size=4), st.booleans())
def test_several_requests_in_one_call(encoder, qwen, drawn, interleaved):
    records = [record for request in drawn for record in request]
    same_ids(encoder, qwen, records[::2] + records[1::2] if interleaved else records)


def test_hundreds_of_seeded_requests(encoder, qwen):
    random_ = random.Random(7)

    def text(pieces: int) -> str:
        words = random_.choices(
            ["refund", "the order", "late,", "Please", *NASTY], k=random_.randint(1, pieces)
        )
        return random_.choice(("", " ")).join(words)

    for _ in range(60):
        records = []
        for _ in range(6):
            state = random_.choice(
                (text(60), {text(2): text(9), "list": [text(5), 1, None]}, [text(9), {"k": text(9)}])
            )
            asked = {}
            for index in range(random_.randint(1, 3)):
                options = {text(3): random_.choice((None, text(4))) for _ in range(random_.randint(1, 5))}
                asked[f"q{index}"] = {"type": "choice", "instructions": text(8), "criteria": options}
            records += compile_request(state, asked)
        same_ids(encoder, qwen, records)


@pytest.mark.parametrize("end", NASTY)
def test_state_question_and_option_ending_anywhere(encoder, qwen, end):
    asked = {
        "c": {
            "type": "choice",
            "instructions": f"Which?{end}",
            "criteria": {f"one{end}": None, f"two{end}": end},
        },
        "n": {"type": "noul", "instructions": f"{end}Really?{end}"},
    }
    same_ids(encoder, qwen, compile_request(f"{end}A state{end}", asked))


@pytest.mark.parametrize(
    "state",
    [
        "word " * 3000,
        "One line.\nAnother line\n" * 500,
        "x" * 6000,
        "\n" * 6000,
        " " * 5000 + "a",
        "\u4e2d\u6587\u5b57" * 2500,
        "a e\u0301 b \u0301c it's <|im_end|> d\r\n" * 400,
        {"conversation": [{"role": "user", "text": "Where is my order 4471?\nIt's late."}] * 150},
    ],
    ids=["words", "lines", "one-word", "line-feeds", "spaces", "no-cut", "mixed", "json"],
)
def test_long_states(encoder, qwen, state):
    same_ids(encoder, qwen, example(state))


def test_255_candidates_that_share_lines(encoder, qwen):
    criteria = {
        f"Same first line\nSame second line\n\n{index % 16} and\nlast {index}": None for index in range(255)
    }
    asked = {"c": {"type": "choice", "instructions": "Which?\nThink.", "criteria": criteria}}
    same_ids(encoder, qwen, compile_request("state\n" * 20, asked))


def test_one_candidate(encoder, qwen):
    same_ids(
        encoder,
        qwen,
        compile_request("s", {"q": {"type": "choice", "instructions": "?", "criteria": {"a": None}}}),
    )


def test_equal_states_that_render_differently(encoder, qwen):
    asked = {"q": {"type": "noul", "instructions": "?"}}
    same_ids(encoder, qwen, compile_request({"a": 1}, asked) + compile_request({"a": True}, asked))


def test_nothing_to_encode(encoder, qwen):
    assert encoder.encode([]) == []
    assert PromptEncoder(qwen, lambda record: []).encode(example()) == [[], [], []]


@pytest.mark.parametrize(
    "left_over", [{"padding": True}, {"truncation": True, "max_length": 4}], ids=["padding", "truncation"]
)
def test_settings_left_by_another_call_do_not_matter(encoder, qwen, left_over):
    expected = host_ids(qwen, example())
    qwen(["a", "a longer text than the other"], **left_over)
    assert [[ids.tolist() for ids in group] for group in encoder.encode(example())] == expected


def test_shared_text_is_tokenized_once(encoder, monkeypatch):
    seen: list[str] = []
    original = prompts._chunks

    def record(text: str) -> list[str]:
        seen.append(text)
        return original(text)

    monkeypatch.setattr(prompts, "_chunks", record)
    # Text that looks like the prompt's own must not hide what is shared.
    state = "A long\n\nQuestion: in the state\nProposed answer: x\nIs it? " * 40
    encoder.encode(example(state) + example("Another " + state))
    assert sum(map(len, seen)) < 2 * len(state) + 2000
    assert len(seen) == len(set(seen))


def test_chunks_cover_long_text():
    text = "Some words here\nand there, " * 1000
    chunks = prompts._chunks(text)
    assert "".join(chunks) == text
    assert len(chunks) > 8
    assert max(map(len, chunks)) < 2 * prompts._CHUNK


# The cuts


@pytest.mark.parametrize("split", ["qwen3.5", "qwen2"])
class TestCuts:
    """The module's proof, tried: pieces between cuts have the ids of the whole."""

    @pytest.fixture
    def backend(self, split, variant, caplog) -> Tokenizer:
        tokenizer = variant(set_split if split == "qwen2" else lambda data: None)
        encoder_of(tokenizer, caplog, plain=None)
        return tokenizer.backend_tokenizer

    def ids(self, backend, batch) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(batch, add_special_tokens=False)]

    def test_everything_of_three_around_a_cut(self, backend):
        left = [
            "",
            "x",
            "'",
            "'r",
            "s",
            " ",
            "\n",
            "\r",
            "\t",
            "1",
            ".",
            "\u0301",
            "e\u0301",
            "\u4e2d",
            "\u2028",
            "\x85",
        ]
        left += ["<|im_end|>", "<think>", "\u017f"]
        right = ["", "s", "\u0301", " ", "\n", "'s", "<think>"]
        lefts = ["".join(parts) for parts in product(left, repeat=3)]
        for end, start in (("\n", "s"), ("\ns", " s"), ("d", " e"), ("'s", " t")):
            for rest in right if end == "\n" else right[:3]:
                before = self.ids(backend, [text + end for text in lefts])
                (after,) = self.ids(backend, [start + rest])
                whole = self.ids(backend, [text + end + start + rest for text in lefts])
                assert whole == [ids + after for ids in before]

    def test_all_cuts_at_once(self, backend):
        @settings(max_examples=300, deadline=None)
        @given(texts)
        def check(text):
            bounds = [0, *(cut.end() for cut in prompts._ANY_CUT.finditer(text)), len(text)]
            pieces = [text[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
            (whole,) = self.ids(backend, [text])
            assert sum(self.ids(backend, pieces), []) == whole

        check()


# Tokenizers and templates that must not be cut


def add_bos(data):
    bos = next(token["id"] for token in data["added_tokens"] if token["content"] == "<|endoftext|>")
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [bos], "tokens": ["<|endoftext|>"]}
        },
    }


def set_prefix_space(data):
    data["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def set_gpt2_regex(data):
    data["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = True


def set_behavior(data):
    data["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_bos, "post-processor"),
        (lambda data: data.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer"),
        (lambda data: data.update(pre_tokenizer=None), "pre-tokenizer"),
        (lambda data: set_split(data, r"\s+|\S+"), "pre-tokenizer"),
        (set_prefix_space, "pre-tokenizer"),
        (set_gpt2_regex, "pre-tokenizer"),
        (set_behavior, "pre-tokenizer"),
        (lambda data: data.update(normalizer={"type": "NFKC"}), "normalizer"),
        (
            lambda data: data.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
            "normalizer",
        ),
    ],
    ids=["bos", "whitespace", "none", "regex", "prefix-space", "gpt2", "behavior", "nfkc", "strip"],
)
def test_other_tokenizers_take_the_plain_way(variant, caplog, change, reason):
    tokenizer = variant(change)
    encoder = encoder_of(tokenizer, caplog, plain=reason)
    same_ids(encoder, tokenizer, example("It's \n late\u0301 <|im_end|> "))
    same_ids(encoder, tokenizer, example({"a": ["\ufb01n"]}))


def test_bos_is_kept(variant):
    tokenizer = variant(add_bos)
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ids = PromptEncoder(tokenizer, candidate_prompts).encode(example())
    assert all(row[0] == bos and row[1] != bos for group in ids for row in group)


def test_no_normalizer_is_cut(variant, caplog):
    tokenizer = variant(lambda data: data.update(normalizer=None))
    same_ids(encoder_of(tokenizer, caplog, plain=None), tokenizer, example("e\u0301\n"))


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("Is", lstrip=True),
        AddedToken("late.", rstrip=True),
        AddedToken("Refund", single_word=True),
        AddedToken("\nQuestion"),
        AddedToken("answer to"),
    ],
    ids=["lstrip", "rstrip", "single-word", "line-feed", "space"],
)
def test_added_tokens_that_look_around_take_the_plain_way(variant, caplog, token):
    tokenizer = variant()
    tokenizer.add_tokens([token])
    same_ids(encoder_of(tokenizer, caplog, plain="added token"), tokenizer, example())


def test_plain_added_tokens_are_cut(variant, caplog):
    tokenizer = variant()
    tokenizer.add_tokens([AddedToken("Question"), AddedToken("No.", normalized=True), AddedToken("o\u0301")])
    same_ids(
        encoder_of(tokenizer, caplog, plain=None), tokenizer, example("o\u0301 \xf3 Question\nQuestions")
    )


def test_dropout_takes_the_plain_way(variant, caplog):
    encoder_of(variant(lambda data: data["model"].update(dropout=0.1)), caplog, plain="dropout 0.1")


def test_split_special_tokens_takes_the_plain_way(variant, caplog):
    tokenizer = variant(split_special_tokens=True)
    same_ids(encoder_of(tokenizer, caplog, plain="splits special"), tokenizer, example("a <|im_end|> b"))


def test_a_tokenizer_with_its_own_call_takes_the_plain_way(variant, caplog):
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **kwargs):
            return super()._encode_plus([each.upper() for each in text], *args, **kwargs)

    tokenizer = variant(kind=Shouting)
    same_ids(encoder_of(tokenizer, caplog, plain="_encode_plus"), tokenizer, example())


TURN = "{{ '<|im_start|>user\\n' + %s + '<|im_end|>\\n' }}"


@pytest.mark.parametrize(
    "content",
    [
        "messages[0].content | upper",
        "messages[0].content | replace('\\n', ' ')",
        "messages[0].content[:5000]",
        "messages[0].content + messages[0].content",
        "(messages[0].content | e)",
        "messages[0].content.split('secret')[0]",
        "('short' if 'parcel' in messages[0].content else messages[0].content)",
        "(messages[0].content | replace('</think>', ''))",
        "'nothing'",
        "raise_exception('no user turns')",
    ],
)
def test_templates_that_change_the_prompt_take_the_plain_way(variant, caplog, content):
    tokenizer = variant(chat_template=TURN % content)
    encoder = encoder_of(tokenizer, caplog, plain="chat template")
    if "raise" in content:
        with pytest.raises(TemplateError, match="no user turns"):
            encoder.encode(example())
    else:
        same_ids(encoder, tokenizer, example("A secret <parcel>. " * 400))


@settings(max_examples=60, deadline=None)
@given(requests)
def test_strict_template(strict, records):
    encoder, tokenizer = strict
    same_ids(encoder, tokenizer, records)


@pytest.fixture(scope="module")
def strict(base):
    tokenizer = AutoTokenizer.from_pretrained(base, chat_template=STRICT_TEMPLATE)
    return PromptEncoder(tokenizer, candidate_prompts), tokenizer


def test_strict_template_is_split(strict, caplog):
    encoder_of(strict[1], caplog, plain=None)


def test_a_template_that_changes_later_is_noticed(variant, caplog):
    tokenizer = variant()
    encoder = encoder_of(tokenizer, caplog, plain=None)
    tokenizer.chat_template = TURN % "'Today. ' + messages[0].content"
    for _ in range(2):
        same_ids(encoder, tokenizer, example())
    assert len(caplog.messages) == 1
    assert "as it did at the start" in caplog.messages[0]


@pytest.mark.parametrize(
    "words", ["  {}", "{}\n", "<tool_response>{}</tool_response>"], ids=["before", "after", "tool"]
)
def test_prompts_in_other_words_take_the_plain_way(qwen, caplog, words):
    records = example()
    encoder = PromptEncoder(qwen, lambda record: [words.format(text) for text in candidate_prompts(record)])
    trimmed = PromptEncoder(
        qwen, lambda record: [words.format(text).strip() for text in candidate_prompts(record)]
    )
    found = encoder.encode(records)
    assert "a prompt does not run from" in caplog.messages[0]
    for group, expected in zip(found, trimmed.encode(records), strict=True):
        assert [ids.tolist() for ids in group] == [ids.tolist() for ids in expected]
    if "tool" not in words:
        assert [[ids.tolist() for ids in group] for group in found] == host_ids(qwen, records)


# Errors


def test_a_lone_surrogate_raises_what_the_host_raises(encoder, qwen):
    with pytest.raises(Exception) as host:
        host_ids(qwen, example("\ud800"))
    with pytest.raises(type(host.value)) as ours:
        encoder.encode(example("\ud800"))
    assert str(ours.value) == str(host.value)


def test_an_error_from_the_host_passes_through(qwen):
    def fail(record):
        raise LookupError("no such record")

    with pytest.raises(LookupError, match="no such record"):
        PromptEncoder(qwen, fail).encode(example())


def test_no_chat_template(variant):
    with pytest.raises(ValueError, match="chat_template"):
        PromptEncoder(variant(chat_template=None), candidate_prompts)


# What prompts say of their state


@settings(max_examples=150, deadline=None)
@given(requests)
def test_the_ids_about_a_state_are_those_of_every_prompt_about_it(encoder, qwen, records):
    encoded = encoder.encode(records)
    lengths = encoder.state_lengths(records, encoded)
    for record, group, length in zip(records, encoded, lengths, strict=True):
        assert 0 < length < min(map(len, group))
        assert all(np.array_equal(row[:length], group[0][:length]) for row in group)
        # Another question about the state has them too.
        other = {**record, "question": "Something else entirely?"}
        (again,) = encoder.encode([other])
        (its_length,) = encoder.state_lengths([other], [again])
        if "\nQuestion: " not in qwen.decode(group[0][:length]):
            assert its_length == length and np.array_equal(again[0][:length], group[0][:length])


def test_the_ids_about_a_state_end_where_its_question_begins(encoder, qwen):
    records = example()
    encoded = encoder.encode(records)
    for group, length in zip(encoded, encoder.state_lengths(records, encoded), strict=True):
        assert qwen.decode(group[0][:length]).endswith("Context:\nThe parcel is late. Refund me!\n\n")
        assert qwen.decode(group[0][length:]).startswith("Question: ")


def test_nothing_is_known_of_prompts_that_are_not_cut(qwen, variant, caplog):
    def in_other_words(record):
        return [prompt.replace("Question: ", "Asked: ") for prompt in candidate_prompts(record)]

    records = example()
    for encoder in (
        PromptEncoder(qwen, in_other_words),
        encoder_of(variant(add_bos), caplog, plain="post-processor"),
    ):
        assert encoder.state_lengths(records, encoder.encode(records)) == [0] * len(records)
