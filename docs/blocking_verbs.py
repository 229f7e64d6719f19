"""An extension of griffe: what ``blocking(f, "rows")`` and ``@shows_options(Options)`` make."""

from typing import Any

import griffe


class BlockingVerbs(griffe.Extension):
    """Puts functions in the place of attributes, and options in the place of ``**options``."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        _make_functions(cls)

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        _make_functions(mod)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        _show_options(pkg)


def _make_functions(owner: griffe.Class | griffe.Module) -> None:
    for name, made in owner.attributes.items():
        call = made.value
        if not isinstance(call, griffe.ExprCall):
            continue
        if str(call.function) == "checked_field":
            made.value = call.arguments[0]  # the default, without the check of the field
        if str(call.function) != "blocking":
            continue
        verb = owner.functions[str(call.arguments[0])]
        answer = str(call.arguments[1]).strip("\"'") if len(call.arguments) > 1 else "answer"
        said = f"Return the same {answer} as `{verb.name}`, blocking the calling thread."
        function = griffe.Function(
            name,
            lineno=made.lineno,
            endlineno=made.endlineno,
            parameters=verb.parameters,
            decorators=verb.decorators,
            returns=verb.returns,
            docstring=made.docstring or griffe.Docstring(said),
        )
        owner.set_member(name, function)


def _show_options(owner: Any) -> None:
    for member in owner.members.values():
        if member.is_alias:
            continue
        if member.is_module or member.is_class:
            _show_options(member)
        elif member.is_function:
            for decorator in member.decorators:
                call = decorator.value
                if isinstance(call, griffe.ExprCall) and str(call.function) == "shows_options":
                    _replace_options(member, *call.arguments)


def _replace_options(function: griffe.Function, kind: Any, *own: Any) -> None:
    defaults = {keyword.name: str(keyword.value) for keyword in own}
    *parameters, options = function.parameters
    for name, annotation in _options_of(function.modules_collection[kind.canonical_path]).items():
        shown, option = annotation.slice.elements
        default = f"{option}.default"
        if isinstance(option, griffe.ExprCall):
            default = str(option.arguments[0]) if option.arguments else "None"
        parameter = griffe.Parameter(
            name,
            annotation=shown,
            kind=griffe.ParameterKind.keyword_only,
            default=defaults.get(name, default),
        )
        parameters.append(parameter)
    function.parameters = griffe.Parameters(*parameters, options)  # which the docstring explains


def _options_of(kind: Any) -> dict[str, Any]:
    inherited = [_options_of(base) for base in kind.resolved_bases if base.is_class]
    own = {name: option.annotation for name, option in kind.attributes.items()}
    return {n: option for options in [*inherited, own] for n, option in options.items()}
