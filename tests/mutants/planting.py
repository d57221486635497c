"""Puts a changed module's functions in the place of those of the module that is loaded.

Whoever imported a function calls the changed one as well, since it is the same object with other
code. What a module ran as it was imported stays as it was.
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType


def loaded(path: Path) -> ModuleType:
    """Return the module of a path, which is relative to the package's parent."""
    return importlib.import_module(".".join(path.with_suffix("").parts))


def plant(path: Path, program: str | ast.Module, only: str | None = None) -> None:
    """Give functions of a loaded module the code that they have in a changed one.

    Args:
        path: Of the module, relative to the package's parent.
        program: The changed module.
        only: The function, as `Class.function`; None for all.

    Raises:
        LookupError: The module has no such function.
    """
    module = loaded(path)
    changed = {code.co_qualname: code for code in _codes(compile(program, path, "exec"))}
    found = False
    for function in _functions(module):
        name = function.__qualname__
        if name in changed and only in (None, name):
            # A method that no longer calls its base class has no cell for its own class.
            free_names = function.__code__.co_freevars
            function.__code__ = changed[name].replace(co_freevars=free_names)
            found = True
    if not found:
        raise LookupError(f"{module.__name__} has no function {only}")
    forget_results(path)


def forget_results(path: Path) -> None:
    """Let functions of a loaded module that remember their results run again when next called.

    Args:
        path: Of the module, relative to the package's parent.
    """
    for member in _members(loaded(path)):
        forget = getattr(member, "cache_clear", None)
        if forget is not None:
            forget()


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Code of the functions and methods of a module."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            if not constant.co_flags & inspect.CO_OPTIMIZED:
                yield from _codes(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for member in _members(module):
        for function in _within(member):
            if function.__module__ == module.__name__:
                yield function


def _members(module: ModuleType) -> Iterator[object]:
    """What a module and its classes consist of."""
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    for owner in (module, *classes):
        yield from list(vars(owner).values())


def _within(member: object) -> Iterator[FunctionType]:
    """The functions that an attribute of a module or a class consists of."""
    match member:
        case FunctionType():
            yield member
        case staticmethod() | classmethod():
            yield from _within(member.__func__)
        case functools.cached_property():
            yield from _within(member.func)
        case property():
            for accessor in (member.fget, member.fset, member.fdel):
                yield from _within(accessor)
        case object(cache_clear=_, __wrapped__=remembered):
            yield from _within(remembered)
