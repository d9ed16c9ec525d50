"""Records to token sequences: the ids of the host's own template and tokenizer calls, without its repetition.

The host renders every candidate's prompt through the chat template and tokenizes each text whole, although
the prompts of a request share most of it. Here the template is taken apart once, the texts are cut where a
token can never lie across, and each distinct piece is tokenized once. Both need a proof for the template and
the tokenizer at hand (`_split_template`, `_why_not_cut`); without one the encoder makes the host's calls and
logs the reason once.

Where a text may be cut: after a line feed before an ASCII letter, and between an ASCII letter and a space
before another ASCII letter. With the pre-tokenizers of `_SPLITS`, byte-level BPE and at most NFC before it,
`ids(left + right) == ids(left) + ids(right)` at such a cut:

- Added tokens: whitespace touches the cut and no added token contains any, so none lies across; none strips
  whitespace or looks at its neighbours.
- NFC: the character on the right is ASCII, which never combines with anything before it.
- Split at a line feed: after a line feed every alternative matches whitespace only, so no match lies across.
  The last match on the left takes the run of whitespace up to the line feed as `\\s*[\\r\\n]+`, or the line
  feed as the end of punctuation: `(?!\\S)` is never asked at the cut.
- Split between letter and space: the letter ends a contraction or a word, and a space ends both just as the
  end of the text does.
- Nothing looks back, so the right side is matched as if it stood alone; BPE sees one match at a time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)

# Qwen2 to Qwen3, and Qwen3.5, whose words include combining marks.
_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_LAST_LINE_CUT = re.compile(r"(?s:.*)\n(?=[A-Za-z])")
_ANY_CUT = re.compile(r"\n(?=[A-Za-z])|(?<=[A-Za-z])(?= [A-Za-z])")
# Long text is tokenized in chunks of about this many characters, which the tokenizer's threads share.
_CHUNK = 2048

_PROMPT_START = "Context:\n"
_QUESTION = "Question: "
_PROMPT_END = " Answer Yes or No."


class PromptEncoder:
    """The token ids of every candidate of a record.

    tokenizer: the host's (`DecisionModel.tokenizer`).
    candidate_prompts: the host's function from a record to the prompt texts of its candidates.

    Threads may encode at the same time, as long as nobody sets padding or truncation on the tokenizer meanwhile.

    Raises ValueError when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, candidate_prompts: Callable[[dict[str, Any]], Iterable[str]]) -> None:
        self._tokenizer = tokenizer
        self._candidate_prompts = candidate_prompts
        self._logged: set[str] = set()
        self._head = self._tail = ""
        self._why_plain = _why_not_cut(tokenizer)
        if self._why_plain is None:
            # Not later, when another thread may be reading them.
            _clear_padding(tokenizer.backend_tokenizer)
            self._head, self._tail, self._why_plain = _split_template(tokenizer)
        if self._why_plain is not None:
            self._log_plain(self._why_plain)

    def encode(self, records: Sequence[dict[str, Any]]) -> list[list[np.ndarray]]:
        """Per record one int32 array [L] per candidate: the ids of the host's call, without padding.

        The arrays may share memory and must not be written to. Raises what the template or the tokenizer
        raises.
        """
        prompts = [list(self._candidate_prompts(record)) for record in records]
        why_plain = self._why_plain or self._why_not_split(prompts)
        if why_plain is not None:
            self._log_plain(why_plain)
            return self._encode_plain(prompts)
        return self._encode_shared(records, prompts)

    def state_lengths(
        self, records: Sequence[dict[str, Any]], sequences: Sequence[Sequence[np.ndarray]]
    ) -> list[int]:
        """Per record how many of its prompts' first ids are about its state alone, 0 where that is not known.

        sequences: of these records, from `encode`. A prompt can be cut before the line with its question, so the ids
        from there on are those of the rest; where prompts cannot be cut nothing is known.
        """
        if self._why_plain is not None:
            return [0 for _ in records]
        rests = []
        for record in records:
            prompt = next(iter(self._candidate_prompts(record)), "")
            at = prompt.find(f"\n{_QUESTION}{record.get('question')}\n")
            rests.append(prompt[at + 1 :] + self._tail if at >= 0 else "")
        encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(rests, add_special_tokens=False)
        return [
            max(len(group[0]) - len(each.ids), 0) if rest and group else 0
            for rest, each, group in zip(rests, encoded, sequences, strict=True)
        ]

    def _encode_plain(self, prompts: list[list[str]]) -> list[list[np.ndarray]]:
        """The host's two calls; only the padding is left out."""
        texts = [_render(self._tokenizer, prompt) for group in prompts for prompt in group]
        if not texts:
            return [[] for _ in prompts]
        encoded = self._tokenizer(texts, padding=False, truncation=False)["input_ids"]
        rows = iter(encoded)
        return [[np.array(next(rows), dtype=np.int32) for _ in group] for group in prompts]

    def _encode_shared(
        self, records: Sequence[dict[str, Any]], prompts: list[list[str]]
    ) -> list[list[np.ndarray]]:
        """Each text as up to four segments (state, question, option, end), each tokenized once."""
        segments = _Segments()
        recipes: list[list[list[int]]] = []
        rows = zip(records, prompts, strict=True)
        for _, same_state in groupby(rows, key=lambda row: row[0]["state"]):
            groups = [group for _, group in same_state]
            state_cut = self._shared_cut([prompt for group in groups for prompt in group])
            for group in groups:
                question_cut = self._shared_cut(group)
                first = self._head + group[0] if group else ""
                shared = segments.add(first[:state_cut], first[state_cut:question_cut])
                recipe = []
                for prompt in group:
                    text = self._head + prompt + self._tail
                    last = _LAST_LINE_CUT.match(text, question_cut)
                    option_cut = last.end() if last else question_cut
                    recipe.append(shared + segments.add(text[question_cut:option_cut], text[option_cut:]))
                recipes.append(recipe)
        ids = segments.tokenize(self._tokenizer.backend_tokenizer)
        return [[_joined([ids[index] for index in recipe]) for recipe in group] for group in recipes]

    def _shared_cut(self, prompts: list[str]) -> int:
        """Where the rendered prompts can be cut and are equal before it; 0 when there is no such place."""
        if not prompts:
            return 0
        low, high = min(prompts), max(prompts)
        last = _LAST_LINE_CUT.match(low, 0, _shared_length(low, high))
        return len(self._head) + last.end() if last else 0

    def _why_not_split(self, prompts: list[list[str]]) -> str | None:
        """Why this request cannot use the template's head and tail: None, or the reason."""
        every = [prompt for group in prompts for prompt in group]
        for prompt in every:
            if not (prompt.startswith(_PROMPT_START) and prompt.endswith(_PROMPT_END)):
                return f"a prompt does not run from {_PROMPT_START!r} to {_PROMPT_END!r}"
        # One rendering a call also notices a template that depends on the time, or one that was replaced.
        if every and _render(self._tokenizer, every[0]) != self._head + every[0] + self._tail:
            return "the chat template does not render a prompt as it did at the start"
        return None

    def _log_plain(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("Tokenizing every prompt by itself: %s", reason)


class _Segments:
    """Distinct pieces of text, and their ids once tokenized."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def add(self, *texts: str) -> list[int]:
        """Index of each text that is not empty, into what tokenize returns."""
        return [self._index.setdefault(text, len(self._index)) for text in texts if text]

    def tokenize(self, backend: Any) -> list[np.ndarray]:
        """Ids of each segment, int32 [L], in one call of the Rust tokenizer."""
        _clear_padding(backend)
        chunks = [_chunks(text) for text in self._index]
        flat = [chunk for parts in chunks for chunk in parts]
        encoded = iter(backend.encode_batch_fast(flat, add_special_tokens=False))
        return [_joined([np.array(next(encoded).ids, dtype=np.int32) for _ in parts]) for parts in chunks]


def _clear_padding(backend: Any) -> None:
    """Take out the padding and truncation that an earlier call left set on the Rust tokenizer."""
    if backend.padding is not None:
        backend.no_padding()
    if backend.truncation is not None:
        backend.no_truncation()


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _chunks(text: str) -> list[str]:
    """The text cut into pieces of at least _CHUNK characters."""
    bounds = [0]
    while len(text) - bounds[-1] > _CHUNK:
        cut = _ANY_CUT.search(text, bounds[-1] + _CHUNK)
        if cut is None:
            break
        bounds.append(cut.end())
    return [text[start:stop] for start, stop in pairwise([*bounds, len(text)])]


def _shared_length(one: str, other: str) -> int:
    """Length of the longest common prefix of two texts."""
    known, limit = 0, min(len(one), len(other))
    while known < limit:
        middle = (known + limit + 1) // 2
        if one[known:middle] == other[known:middle]:
            known = middle
        else:
            limit = middle - 1
    return known


def _render(tokenizer: Any, prompt: str) -> str:
    """The prompt as one user turn, exactly as the host renders it."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


def _split_template(tokenizer: Any) -> tuple[str, str, str | None]:
    """What the chat template puts before and after a prompt, and why that is not the same for all, or None.

    A template can tell one prompt from another by its length, by characters a filter changes, or by a string
    of its
    own: prompts with each are rendered and compared.
    """
    from jinja2 import Environment, TemplateError

    words = Environment().lexer.tokenize(tokenizer.get_chat_template())
    bodies = [
        "a",
        "long " * 4000,
        " \t\r\n\x0b\x85\u2028 leading and trailing whitespace \u3000\r\n ",
        "{{ braces }} {% percent %} {# hash #} <&> \" ' \\ \\n e\u0301 \u1100\u1161 \U0001f642 \x00 \ufeff",
        *(str(word.value) for word in words if word.type == "string"),
        *tokenizer.get_added_vocab(),
    ]
    marker = f"{_PROMPT_START}marker{_PROMPT_END}"
    try:
        head, found, tail = _render(tokenizer, marker).partition(marker)
        if not found:
            return "", "", "the chat template does not keep the prompt whole"
        for body in bodies:
            prompt = f"{_PROMPT_START}{body}\n\nQuestion: {body}\nIs {body}?{_PROMPT_END}"
            if _render(tokenizer, prompt) != head + prompt + tail:
                return "", "", f"the chat template renders a prompt with {body[:40]!r} in its own way"
    except TemplateError as error:
        return "", "", f"the chat template refuses a prompt: {error}"
    return head, tail, None


def _why_not_cut(tokenizer: Any) -> str | None:
    """Why text must not be cut for this tokenizer: None when each condition of the module's proof holds."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not isinstance(backend, Tokenizer):
        return f"{kind.__name__} is not a tokenizer of the tokenizers library"
    for name in ("__call__", "_encode_plus"):
        if getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name):
            return f"{kind.__name__} has a {name} of its own"
    if tokenizer.split_special_tokens:
        return "the tokenizer splits special tokens"
    model = type(backend.model).__name__
    if model != "BPE" or backend.model.dropout:
        return f"the tokenizer's model is {model} with dropout {getattr(backend.model, 'dropout', None)}"
    normalizer = _state(backend.normalizer)
    if normalizer not in (None, {"type": "NFC"}):
        return f"the normalizer is {normalizer}"
    pre_tokenizer = _state(backend.pre_tokenizer)
    if not _is_known_split(pre_tokenizer):
        return f"the pre-tokenizer is {pre_tokenizer}"
    post_processor = _state(backend.post_processor)
    if not _adds_nothing(post_processor):
        return f"the post-processor is {post_processor}"
    for token in backend.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or token.single_word or re.search(r"\s", token.content):
            return f"the added token {token!r} looks at what surrounds it"
    return None


def _state(part: Any) -> dict[str, Any] | None:
    """The JSON form of a part of a Rust tokenizer."""
    return None if part is None else json.loads(part.__getstate__())


def _is_known_split(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether it is Split on one of _SPLITS, then bytes to characters and nothing else."""
    if pre_tokenizer is None or pre_tokenizer.get("type") != "Sequence":
        return False
    steps = pre_tokenizer["pretokenizers"]
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    return (
        split["pattern"].get("Regex") in _SPLITS
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and not byte_level["add_prefix_space"]
        and not byte_level["use_regex"]
    )


def _adds_nothing(post_processor: dict[str, Any] | None) -> bool:
    """Whether the ids of a single text leave the post-processor as they came."""
    if post_processor is None or post_processor["type"] == "ByteLevel":
        return True
    if post_processor["type"] == "Sequence":
        return all(map(_adds_nothing, post_processor["processors"]))
    if post_processor["type"] == "TemplateProcessing":
        return [list(step) for step in post_processor["single"]] == [["Sequence"]]
    return False
