"""A chat template, rendered as engines render it.

Templates are jinja2 with the extensions that the model community settled on. What a template sees and how white
space is treated decide the token ids, so every option here follows transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import IdentityUnavailable

CONTINUE_MARK = "PREFIX_GATEWAY_CONTINUES_HERE "
"""Put behind a final message that is to be continued. The trailing space tells whether the template trims."""


class ChatTemplate:
    """A compiled template and the special tokens it may name. Immutable after construction.

    `lists` says whether the template iterates over the parts of a message's content; one that does not is given
    strings. `developer` says whether it knows the role of that name. Raises IdentityUnavailable("bad_template") when
    the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.lists = _iterates_content(environment.parse(source))
        except (jinja2.TemplateError, RecursionError, ValueError, TypeError) as error:
            raise IdentityUnavailable("bad_template", str(error)) from error
        self.developer = "'developer'" in source or '"developer"' in source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], continues: bool) -> str:
        """The prompt text. `variables` are the template's besides `messages` and the special tokens.

        With `continues` the text ends where the final message's content ends. Raises IdentityUnavailable:
        "template_error" when the template raises, "bad_request" when there is no final content to continue. It may
        also never return: run it where it can be killed.
        """
        if continues:
            messages = _marked(messages)
        try:
            text = self._template.render(**{**self._special_tokens, **variables, "messages": messages})
        except MemoryError as error:
            raise IdentityUnavailable("template_error", "out of memory") from error
        except Exception as error:  # a template is code: it may raise anything
            raise IdentityUnavailable("template_error", f"{type(error).__name__}: {error}"[:500]) from error
        return _cut(text) if continues else text


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy whose final content ends with the mark."""
    if not messages:
        raise IdentityUnavailable("bad_request", "no message to continue")
    final = dict(messages[-1])
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + CONTINUE_MARK
    elif isinstance(content, list) and any("text" in part for part in content):
        parts = [dict(part) for part in content]
        last = next(part for part in reversed(parts) if "text" in part)
        last["text"] += CONTINUE_MARK
        final["content"] = parts
    else:
        raise IdentityUnavailable("bad_request", "the final message has no text to continue")
    return [*messages[:-1], final]


def _cut(text: str) -> str:
    position = text.rfind(CONTINUE_MARK.strip())
    if position < 0:
        raise IdentityUnavailable("bad_request", "the template drops the final message")
    kept = text[:position]
    # Where the template trimmed the content, the mark lost its space, and engines trim what stands before it as well.
    return kept if text.startswith(CONTINUE_MARK, position) else kept.rstrip()


class _Generation(Extension):
    """`{% generation %}` marks an assistant's own words for training; for a prompt it is its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no engine does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


# Whether a template iterates over content parts is read from its syntax tree, by the rule that vLLM applies
# (vllm/renderers/hf.py, 0.32.0): a loop over `content` of a loop variable over `messages`, looking through filters,
# tests, slices and renamings of `messages`; over a macro parameter given it; or over a variable named `content`.


def _strip(node: nodes.Node | None) -> nodes.Node | None:
    """What a value is made from: the node below filters, tests and slices."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _is_name(node: nodes.Node | None, names: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _is_content(node: nodes.Node | None, messages: set[str]) -> bool:
    node = _strip(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _is_name(node.node, messages)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content" and _is_name(node.node, messages)
    return False


def _renamings(root: nodes.Node, names: set[str]) -> set[str]:
    """`names` and every variable that is assigned one of them or a slice or filtering of it."""
    known = set(names)
    while True:
        found = {
            assign.target.name
            for assign in root.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_name(_strip(assign.node), known)
        }
        if found <= known:
            return known
        known |= found


def _macro_content_loops(root: nodes.Node, messages: set[str]) -> Iterator[tuple[nodes.For, set[str]]]:
    """Every loop inside a macro, with the macro's parameters that some call gives a message's content."""
    calls = [call for call in root.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in root.find_all(nodes.Macro):
        parameters = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                positional = zip(parameters, call.args, strict=False)
                given |= {name for name, value in positional if _is_content(value, messages)}
                given |= {word.key for word in call.kwargs if _is_content(word.value, messages)}
        for loop in macro.find_all(nodes.For):
            yield loop, given & set(parameters)


def _iterates_content(root: nodes.Template) -> bool:
    lists = _renamings(root, {"messages"})
    messages = {
        loop.target.name
        for loop in root.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _is_name(_strip(loop.iter), lists)
    }
    in_macros = {id(loop): given for loop, given in _macro_content_loops(root, messages)}
    return any(
        _is_content(loop.iter, messages) or _is_name(loop.iter, in_macros.get(id(loop), {"content"}))
        for loop in root.find_all(nodes.For)
    )
