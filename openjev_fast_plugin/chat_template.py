"""Whether a chat template renders a prompt in the same way at any time: a proof from its syntax tree.

Transformers gives a template the messages, the arguments of the call and the tokenizer's special tokens, in an
environment that also knows the time (`strftime_now`) and draws at random. A template is proved where each part of it is
known:

- The names it takes from outside are arguments of the call, or functions without state. The time, special tokens, which
  may be changed later, and other templates are none of these.
- Its filters, tests and methods depend on nothing but what they are applied to.
- All it can do with a text is to compare it, its length or parts of it with strings and sums of numbers that stand in
  the template. `prompts` tries a prompt with each of these strings, and one that is longer than all numbers together.

Whatever is not listed here is not proved. The text of an address, of a function say, is for the caller to rule out.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import Environment, TemplateError, meta, nodes

# All numbers of a template together.
MOST_SUM = 4000

_ARGUMENTS = {"messages", "tools", "documents", "add_generation_prompt", "enable_thinking"}
# The last is asked for by templates of models that see; nobody gives it.
_NAMES = _ARGUMENTS | {"namespace", "range", "dict", "raise_exception", "add_vision_id"}
_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Break, nodes.Continue),
    *(nodes.Assign, nodes.AssignBlock, nodes.Macro, nodes.Call, nodes.Keyword, nodes.Filter, nodes.Test),
    *(nodes.Name, nodes.NSRef, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Compare, nodes.Operand, nodes.CondExpr),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Sub, nodes.Neg, nodes.Concat),
)
_FILTERS = {"default", "items", "join", "length", "safe", "string", "tojson", "trim"}
_TESTS = {"defined", "undefined", "none", "true", "false", "boolean", "string", "number", "mapping"}
_TESTS |= {"iterable", "sequence", "eq", "equalto", "ne", "in"}
_METHODS = {"startswith", "endswith", "split", "strip", "lstrip", "rstrip"}


def why_not_fixed(template: str, special_tokens: Iterable[str]) -> str | None:
    """Why a template may render the same prompt in another way later: None where it is proved that it does not.

    special_tokens: the names under which it is given special tokens.
    """
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    # Else they are not found among the names from outside.
    functions = {*environment.globals, "strftime_now"}
    environment.globals.clear()
    try:
        tree = environment.parse(template)
        outside = meta.find_undeclared_variables(tree)
    except TemplateError as error:
        return f"it is not understood: {error}"
    # One that is set on some paths only is asked for on the others, where nobody gives it.
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"} - functions
    if unknown := outside - _NAMES - own or outside & set(special_tokens):
        return f"it depends on {', '.join(sorted(unknown))}"
    total: float = 0
    for node in tree.find_all(nodes.Node):
        if not isinstance(node, _NODES):
            return f"it has a {type(node).__name__}"
        if isinstance(node, nodes.Filter) and node.name not in _FILTERS:
            return f"it has the filter {node.name}"
        if isinstance(node, nodes.Test) and node.name not in _TESTS:
            return f"it has the test {node.name}"
        if isinstance(node, nodes.Call) and not _is_known_call(node):
            return "it has a call of something unknown"
        if isinstance(node, nodes.Getitem) and not _is_known_item(node):
            return "it takes an item of something unknown"
        if isinstance(node, nodes.Const) and isinstance(node.value, int | float):
            total += abs(node.value)
    return None if total <= MOST_SUM else f"its numbers together are more than {MOST_SUM}"


def _is_known_call(call: nodes.Call) -> bool:
    """Whether it calls a macro, a function that is known by its name, or a method of a text."""
    called = call.node
    return isinstance(called, nodes.Name) or (isinstance(called, nodes.Getattr) and called.attr in _METHODS)


def _is_known_item(item: nodes.Getitem) -> bool:
    """Whether it takes a field by its name, some of the messages, or a piece of a text that was split."""
    taken_from, which = item.node, item.arg
    if isinstance(which, nodes.Const) and isinstance(which.value, str):
        return True
    if isinstance(taken_from, nodes.Name):
        return taken_from.name in _ARGUMENTS
    return (
        isinstance(taken_from, nodes.Call)
        and isinstance(taken_from.node, nodes.Getattr)
        and taken_from.node.attr == "split"
    )
