"""chat_template.py: which templates are proved to render a prompt in the same way at any time."""

from __future__ import annotations

import pytest

from openjev_fast_plugin.chat_template import MOST_SUM, why_not_fixed

# Every kind of statement and expression of the templates of models that see, use tools and think.
LIKE_QWEN = """\
{%- set images = namespace(count=0) %}
{%- macro render(content, counted=true) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or item.type == 'image' %}
                {%- if counted %}{%- set images.count = images.count + 1 %}{%- endif %}
                {%- if add_vision_id %}{{- 'Picture ' ~ images.count ~ ': ' }}{%- endif %}
                {{- '<|vision_start|>' }}
            {%- elif 'text' in item %}{{- item.text }}
            {%- else %}{{- raise_exception('Unexpected item.') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}{{- '' }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('No messages.') }}{%- endif %}
{%- if tools and tools is iterable %}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set place = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set content = render(message.content, false)|trim %}
        {%- if not(content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.searching = false %}{%- set ns.last = place %}{%- break %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = render(message['content'])|trim %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {{- '<think>\\n' + thought }}
        {%- endif %}
        {%- if loop.index0 > ns.last %}{{- content }}{%- endif %}
        {%- for name, value in message.call.arguments|items if loop.first %}{%- endfor %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<think>\\n' if enable_thinking is not defined else '' }}{%- endif %}
"""


def test_what_templates_of_models_do_is_proved():
    assert why_not_fixed(LIKE_QWEN, ["bos_token"]) is None
    assert why_not_fixed(LIKE_QWEN, ["add_vision_id"]) == "it depends on add_vision_id"
    # Set inside a condition.
    assert why_not_fixed(LIKE_QWEN, ["thought"]) == "it depends on thought"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ strftime_now('%Y') }}", "depends on strftime_now"),
        ("{% if false %}{{ strftime_now('%Y') }}{% endif %}", "depends on strftime_now"),
        ("{% macro year() %}{{ strftime_now('%Y') }}{% endmacro %}{{ year() }}", "depends on strftime_now"),
        ("{% set range = strftime_now %}{{ range('%Y') }}", "depends on strftime_now"),
        ("{% if tools %}{% set strftime_now = 1 %}{% endif %}{{ strftime_now('%Y') }}", "on strftime_now"),
        ("{% if tools %}{% set lipsum = 1 %}{% endif %}{{ lipsum() }}", "on lipsum"),
        ("{{ lipsum() }}", "depends on lipsum"),
        ("{{ joiner() }}", "depends on joiner"),
        ("{{ bos_token }}{{ eos_token }}", "depends on bos_token, eos_token"),
        ("{{ something_new }}", "depends on something_new"),
        ("{{ dict(a=1) }}", "depends on dict"),
        ("{{ tools | random }}", "filter random"),
        ("{% filter random %}abc{% endfilter %}", "FilterBlock"),
        ("{{ tools | map('random') | join }}", "filter map"),
        ("{{ messages[0].content | upper }}", "filter upper"),
        ("{{ 1 if messages[0].content|length is divisibleby 2 }}", "test divisibleby"),
        ("{{ 1 if messages is sameas tools }}", "test sameas"),
        ("{{ messages.pop() }}", "call of something unknown"),
        ("{{ messages[0].content.count('a') }}", "call of something unknown"),
        ("{{ messages[0]['content']() }}", "call of something unknown"),
        ("{% call(item) range(3) %}{% endcall %}", "CallBlock"),
        ("{{ messages[0].content[:9] }}", "item of something unknown"),
        ("{{ messages[0].content[add_generation_prompt] }}", "item of something unknown"),
        ("{{ messages|length % 2 }}", "Mod"),
        ("{{ 100 * 100 }}", "Mul"),
        ("{{ 10 ** 5 }}", "Pow"),
        ("{% include 'other' %}", "Include"),
        ("{% import 'other' as other %}", "Import"),
        ("{% extends 'other' %}", "Extends"),
        ("{% block inner %}{% endblock %}", "Block"),
        ("{% with a = 1 %}{% endwith %}", "With"),
        ("{% generation %}{% endgeneration %}", "not understood"),
        ("{{ messages | no_such_filter }}", "not understood"),
        ("{{ 1 if messages is no_such_test }}", "test no_such_test"),
        ("{% if %}", "not understood"),
        (f"{{{{ 'a' if messages[0].content|length > {MOST_SUM + 1} }}}}", "numbers"),
        (f"{{{{ 'a' if messages[0].content|length > {MOST_SUM} - -1 }}}}", "numbers"),
    ],
)
def test_what_is_not_proved(template, reason):
    found = why_not_fixed(template, ["bos_token", "dict"])
    assert found is not None and reason in found


def test_a_name_in_a_text_is_not_a_use_of_it():
    assert why_not_fixed("strftime_now {% raw %}{{ strftime_now() }}{% endraw %}{# random #}", []) is None


def test_numbers_up_to_the_limit_are_proved():
    assert why_not_fixed(f"{{{{ 'a' if messages[0].content|length > {MOST_SUM} }}}}", []) is None
