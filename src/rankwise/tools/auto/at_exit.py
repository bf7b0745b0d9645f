# SPDX-License-Identifier: Apache-2.0
"""What a script registers for its end, called at its end: the ranks are together until then."""

from __future__ import annotations

import atexit
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rankwise.tools.auto.caller import calling_module
from rankwise.tools.replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@contextmanager
def exit_functions_called() -> Generator[None]:
    """Call what the script passes to ``atexit.register`` when the block ends, not when the process does."""

    def registering(register: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if calling_module() != "__main__":
                return register(function, *args, **kwargs)
            registered.append((function, args, kwargs))
            at_end.callback(called, registered[-1])
            return function

        return call

    def called(entry: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> None:
        if any(one is entry for one in registered):
            function, args, kwargs = entry
            function(*args, **kwargs)

    def unregistering(unregister: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any]) -> None:
            registered[:] = [entry for entry in registered if entry[0] != function]
            unregister(function)

        return call

    registered: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    with ExitStack() as at_end, replaced((atexit, ["register"], registering), (atexit, ["unregister"], unregistering)):
        yield
