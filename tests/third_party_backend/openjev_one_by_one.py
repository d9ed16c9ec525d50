"""A whole backend: the original forward, one question at a time."""

from dataclasses import dataclass

from openjev_fast_plugin import hookimpl


@dataclass
class Scores:
    logits: list
    input_tokens: int
    stats: dict


class Engine:
    def __init__(self, model):
        self._model, self._forward = model, type(model).forward

    def score(self, records):
        logits, tokens = [], 0
        for record in records:
            logits += self._forward(self._model, [record])
            tokens += self._model.last_input_tokens
        return Scores(
            logits, tokens, {"rows_asked": tokens, "rows_computed": tokens, "forwards": len(records)}
        )

    def describe(self):
        return {"kernels": "original"}


class OneByOne:
    name = "one-by-one"
    summary = "the original forward, one question at a time"

    def refusal(self, model):
        return "max_length is 13" if model.max_length == 13 else None

    def build(self, model, settings):
        return Engine(model)


@hookimpl
def openjev_fast_backends():
    return [OneByOne()]
