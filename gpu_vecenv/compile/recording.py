"""Records what a function does on the device, instead of doing it: work of several callers can then be joined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NotRecordableError(Exception):
    """A function uses torch for more than views and writes into tensors that it was given."""


class Recorded(Protocol):
    """Recorded work: a launch, an operation of torch, a mark of a timer."""

    @property
    def kind(self) -> Hashable:
        """Works of equal kinds can be joined."""

    def join(self, others: Sequence[Any]) -> Callable[[], None]:
        """A function that does this and the others, of the same kind."""


class _Recorder(threading.local):
    record: Callable[[Recorded], None] | None = None


_recorder = _Recorder()


def recorder() -> Callable[[Recorded], None] | None:
    """What takes the work of this thread while it is recorded; None: it is done."""
    return _recorder.record


def recorded(function: Callable[[], None]) -> list[Recorded]:
    """What ``function`` would do on the device, in order; it is called but nothing is done.

    Raises:
        NotRecordableError: It uses torch for more than views and writes into existing tensors, or reads values.
    """
    found: list[Recorded] = []
    before, _recorder.record = _recorder.record, found.append
    try:
        with _RecordOperations(found.append):
            function()
    finally:
        _recorder.record = before
    return found


@dataclass(frozen=True)
class RecordedOperation:
    """An operation of torch that writes into one of its arguments."""

    operator: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def kind(self) -> Hashable:
        """The operation, whatever its arguments."""
        return str(self.operator)

    def join(self, others: Sequence[RecordedOperation]) -> Callable[[], None]:
        """A function that does this and the others in turn."""
        return _OneByOne([self, *others])


class _OneByOne:
    """Calls operations that cannot be joined one after the other."""

    def __init__(self, operations: Iterable[RecordedOperation]) -> None:
        self._operations = list(operations)

    @torch.no_grad()
    def __call__(self) -> None:
        for own in self._operations:
            own.operator(*own.args, **own.kwargs)


class _RecordOperations(TorchDispatchMode):
    def __init__(self, record: Callable[[Recorded], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, returned = kwargs or {}, [value.alias_info for value in func._schema.returns]
        if returned and all(alias is not None and not alias.is_write for alias in returned):
            return func(*args, **kwargs)  # a view
        first = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if len(returned) == 1 and returned[0] is not None and first is not None and first.is_write:
            self._record(RecordedOperation(func, args, kwargs))
            return args[0]
        raise NotRecordableError(str(func))
