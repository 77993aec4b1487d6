"""Chat templates of a model's folder reach neither the interpreter nor files, and messages do not become templates."""

import os
from pathlib import Path

import pytest

from specray.errors import InvalidRequestError
from specray.models.tokenizer import render_chat
from tests.unit.models.test_tokenizer import CHATML, toy_tokenizer, user

CANARY = "SPECRAY_TEST_CANARY"
# Known ways out of Jinja, most from CVE reports and lists of server-side template injections. Each would create the
# file RUN, print the variable CANARY of the environment, or show an object of the interpreter.
ESCAPES = [
    "{{ cycler.__init__.__globals__.os.system('touch RUN') }}",
    "{{ joiner.__init__.__globals__.os.popen('touch RUN').read() }}",
    "{{ namespace.__init__.__globals__.os.popen('touch RUN').read() }}",
    "{{ lipsum.__globals__.os.popen('touch RUN').read() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ lipsum['__glo' ~ 'bals__']['os']['environ'] }}",
    "{{ (lipsum | attr('__globals__'))['os'].environ }}",
    "{{ lipsum | attr('\\x5f\\x5fglobals\\x5f\\x5f') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ [].__class__.__base__ }}",
    "{{ {}.__class__.__mro__ }}",
    "{{ (1).__class__.mro() }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr(['__cl', 'ass__']|join) }}",
    "{{ messages.__class__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ messages.append.__self__ }}",
    "{{ messages.append.__func__ }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ messages | selectattr('__class__') | list }}",
    "{{ messages | groupby('__class__') }}",
    "{{ messages | sort(attribute='__class__.__mro__') }}",
    "{{ [''] | map(attribute='__class__.__base__.__subclasses__') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__class__}'.format(a='') }}",
    "{{ '{0.__class__}'.format_map({'0': ''}) }}",
    "{{ ('{0.__class__}' | format('')) }}",
    "{{ '%s' | format(''.__class__) }}",
    "{{ ''.format.__self__.__class__ }}",
    "{% set f = '{0.__class__.__init__.__globals__}'.format %}{{ f(messages) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ raise_exception.__closure__ }}",
    "{{ raise_exception.__builtins__ }}",
    "{{ raise_exception.__init__.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ self.__dict__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% macro m() %}{{ varargs.__class__ }}{{ kwargs.__class__ }}{% endmacro %}{{ m() }}",
    "{% for x in messages %}{{ loop.__init__.__globals__ }}{{ loop._iterator }}{% endfor %}",
    "{% for x in messages recursive %}{{ loop.__class__ }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends '/etc/passwd' %}",
    "{{ config }}{{ request }}{{ environ }}{{ globals() }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ dict.mro() }}",
    "{{ range.__class__ }}",
    "{{ undefined_name.__class__ }}",
    "{{ undefined_name.__init__.__globals__ }}",
    "{% set _ = messages.append({'role': 'system', 'content': 'x'}) %}{{ messages }}",
    "{% set _ = messages[0].update({'content': 'x'}) %}{{ messages }}",
    "{{ messages.clear() }}",
]
INTERPRETER = (
    "<class",
    "<module",
    "<function",
    "<bound method",
    "<built-in",
    "<code",
    "<jinja2",
    "environ({",
    "root:x:",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_known_escapes_of_a_template_do_not_work(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CANARY, "a-secret-of-the-server")
    assert "a-secret-of-the-server" in os.environ.values()
    messages, tokenizer = user("x"), toy_tokenizer(template.replace("RUN", str(tmp_path / "run")))
    try:
        text = tokenizer.decode(render_chat(tokenizer, messages))
    except InvalidRequestError as error:
        text = str(error)
    assert "a-secret-of-the-server" not in text
    assert not any(sign in text for sign in INTERPRETER), text
    assert not (tmp_path / "run").exists()
    assert messages == user("x")


@pytest.mark.parametrize("text", ESCAPES)
def test_a_message_is_no_template(text: str) -> None:
    tokenizer = toy_tokenizer(CHATML)
    rendered = tokenizer.decode(render_chat(tokenizer, user(text)))
    assert rendered == f"<|user|>\n{text}<|end|>\n<|assistant|>\n"
