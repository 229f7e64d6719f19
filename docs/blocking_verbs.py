"""An extension of griffe: the reference shows ``f_sync = blocking(f, "rows")`` as a method."""

from typing import Any

import griffe


class BlockingVerbs(griffe.Extension):
    """Puts a function with the parameters of the coroutine in the place of each attribute."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        for name, made in cls.attributes.items():
            call = made.value
            if not isinstance(call, griffe.ExprCall) or str(call.function) != "blocking":
                continue
            verb = cls.functions[str(call.arguments[0])]
            answer = str(call.arguments[1]).strip("\"'") if len(call.arguments) > 1 else "answer"
            said = f"Return the same {answer} as `{verb.name}`, blocking the calling thread."
            function = griffe.Function(
                name,
                lineno=made.lineno,
                endlineno=made.endlineno,
                parameters=verb.parameters,
                returns=verb.returns,
                docstring=griffe.Docstring(said),
            )
            cls.set_member(name, function)
