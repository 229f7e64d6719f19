"""An extension of griffe: the reference shows ``f_sync = blocking(f, "rows")`` as a function."""

from typing import Any

import griffe


class BlockingVerbs(griffe.Extension):
    """Puts a function with the parameters of the coroutine in the place of each attribute."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        _make_functions(cls)

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        _make_functions(mod)


def _make_functions(owner: griffe.Class | griffe.Module) -> None:
    for name, made in owner.attributes.items():
        call = made.value
        if not isinstance(call, griffe.ExprCall):
            continue
        if str(call.function) == "checked_field":
            made.value = call.arguments[0]  # the default, without the check of the field
        if str(call.function) not in ("blocking", "blocking_form"):
            continue
        verb = owner.functions[str(call.arguments[0])]
        answer = str(call.arguments[1]).strip("\"'") if len(call.arguments) > 1 else "answer"
        said = f"Return the same {answer} as `{verb.name}`, blocking the calling thread."
        function = griffe.Function(
            name,
            lineno=made.lineno,
            endlineno=made.endlineno,
            parameters=verb.parameters,
            returns=verb.returns,
            docstring=made.docstring or griffe.Docstring(said),
        )
        owner.set_member(name, function)
