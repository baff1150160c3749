"""Find a thing by its name in one of our folders, or by a user's import path.

`gsm8k` in the folder `cosmos_core.rewards` is `cosmos_core/rewards/gsm8k.py:gsm8k`;
`my_pkg.my_module:thing` and `path/to/file.py:thing` are a user's own and need no edit here.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import threading
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError, CosmosError


def is_import_path(name: str) -> bool:
    """Return whether `name` is `module:thing` or `file.py:thing` rather than a plain name."""
    return ":" in name


def is_code(name: str) -> bool:
    """Return whether a name that might be a path or a name on the Hub too is `file.py:thing` or `module:thing`."""
    return _CODE.fullmatch(name) is not None


_CODE = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


def import_thing(path: str) -> Any:
    """Return the object at `module:thing` or `path/file.py:thing`.

    Raises:
        ConfigError: the module, the file or the name in it does not exist.
    """
    module_name, _, thing = path.rpartition(":")
    if not module_name or not thing:
        raise ConfigError(f"{path!r} is not an import path; write module:function or path/file.py:function")
    module = _module_from_file(Path(module_name)) if module_name.endswith(".py") else _module(module_name, path)
    try:
        return getattr(module, thing)
    except AttributeError:
        raise ConfigError(f"{path!r}: {module_name} has no {thing!r}") from None


def known_names(folder: str) -> list[str]:
    """Return the modules of a folder of ours, private ones and folders left out."""
    package = importlib.import_module(folder)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg and not m.name.startswith("_"))


def offered_names(folder: str, suffix: str = "") -> list[str]:
    """Return what a folder of ours offers, without importing any of it: modules that define a function of their own
    name, or, with a suffix, a class of it: `some_name.py` has `SomeNameSuffix`."""
    [path] = importlib.import_module(folder).__path__
    found = []
    for name in known_names(folder):
        thing = rf"class {class_name(name)}{suffix}\b" if suffix else rf"def {name}\("
        if re.search(f"^{thing}", Path(path, f"{name}.py").read_text(encoding="utf-8"), re.M):
            found.append(name)
    return found


def class_name(module: str) -> str:
    """Return `SomeName` of `some_name`."""
    return module.title().replace("_", "")


def load_named(name: str, folder: str, suffix: str) -> Any:
    """Return the class `SomeNameSuffix` of `some_name.py` in a folder of ours, or what a user's import path names.

    Raises:
        ConfigError: there is none, or a user's file cannot be imported.
    """
    if is_import_path(name):
        return import_user_code(name)
    if name not in (known := offered_names(folder, suffix)):
        raise ConfigError(f"there is no {name!r}{suggestion(name, known)}")
    return import_thing(f"{folder}.{name}:{class_name(name)}{suffix}")


def import_user_code(path: str) -> Any:
    """Return what an import path names; code that cannot even be imported is its author's mistake, not a crash.

    Raises:
        ConfigError: it is not there, or its file raised; the message says where.
    """
    try:
        return import_thing(path)
    except CosmosError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error} ({location_of(error)})"
        raise ConfigError(f"{path!r} cannot be imported: {reason}") from error


def location_of(error: BaseException, function: Any = None) -> str:
    """Return the file and line that an error comes from: of this function's file, where it has a part in it.

    A function that did not raise itself, but returned what it must not, is named by its own line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if code is None:
        return f"{frames[-1].filename}:{frames[-1].lineno}"
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"


def suggestion(name: str, known: list[str]) -> str:
    """Return `; did you mean X?` when a known name is near, otherwise the list of known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def code_file(path: str) -> Path:
    """Return the file of a user's code given by import path, found without importing it or its packages.

    Raises:
        ConfigError: the file or module does not exist, or has nothing of that name.
    """
    file, thing = _file_of(path), path.rpartition(":")[2]
    if (names := _names_in(file)) is not None and thing not in names:
        raise ConfigError(f"{path!r}: {file} has no {thing!r}{suggestion(thing, sorted(names)) if names else ''}")
    return file


_PARSER = threading.Lock()
"""Python 3.11 counts the depth of the tree that it builds once for all threads: two that parse at once end in a
`SystemError` (CPython issue 106905)."""


def _names_in(file: Path) -> set[str] | None:
    """The names that a file gives to something at its top level; None: that cannot be told without running it."""
    try:
        with _PARSER:
            waiting: list[ast.AST] = [ast.parse(file.read_bytes())] if file.suffix == ".py" else []
    except (SyntaxError, ValueError):  # told with its line where it is imported
        return None
    if not waiting:
        return None
    names = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)  # what is inside is no name of the file
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    is_open = names & {"*", "__getattr__", "globals", "exec", "setattr"}
    return None if is_open else names


def _file_of(path: str) -> Path:
    module_name, _, thing = path.rpartition(":")
    if not module_name or not thing:
        raise ConfigError(f"{path!r} is not an import path; write module:function or path/file.py:function")
    if module_name.endswith(".py"):
        if not os.path.isfile(module_name):  # Path.is_file raises for a name that is too long
            raise ConfigError(f"{path!r}: file {module_name} does not exist")
        return Path(module_name)
    # Workers have the current folder on their path; the `cosmos` script has not.
    folders: list[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    for part in module_name.split("."):
        spec = PathFinder.find_spec(part, folders) if folders is not None else None
        if spec is None and folders is not None and part == module_name.split(".")[0]:
            spec = importlib.util.find_spec(part) if part else None  # installed by an import hook
        folders = list(spec.submodule_search_locations) if spec and spec.submodule_search_locations else None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        raise ConfigError(f"{path!r}: module {module_name!r} was not found")
    return Path(spec.origin)


def code_digest(path: str) -> str:
    """Return the digest of a user's code given by import path, for the fingerprint; the whole file counts.

    Raises:
        ConfigError: the file or module does not exist.
    """
    return hashlib.sha256(_file_of(path).read_bytes()).hexdigest()


def _module(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path!r}: module {error.name!r} was not found") from error


def _module_from_file(file: Path) -> Any:
    if not os.path.isfile(file):
        raise ConfigError(f"user code {file} does not exist")
    name = f"user_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:  # half a module must not be found by the next who asks
            del sys.modules[name]
            raise
    return sys.modules[name]
