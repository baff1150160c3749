"""Look up an object by its name in a folder of this package, or by a user's import path.

`gsm8k` in the folder `cosmos_core.rewards` is `cosmos_core/rewards/gsm8k.py:gsm8k`. `my_pkg.my_module:thing` and
`path/to/file.py:thing` are import paths of a user's own code and need no change in this package.
"""

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
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from cosmos_core.error_handling import cleanup_on_error, convert_errors
from cosmos_core.errors import ConfigError


def is_import_path(name: str) -> bool:
    """Return True if `name` has the form `module:thing` or `file.py:thing`; a plain name has no colon."""
    return ":" in name


def is_user_code(name: str) -> bool:
    """Return True if `name` has the form of user code, `file.py:thing` or `module:thing`; other names in the same field
    can be paths or ids on the Hub."""
    return _USER_CODE_PATTERN.fullmatch(name) is not None


_USER_CODE_PATTERN = re.compile(r"(?!stage:)(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


def import_object(import_path: str) -> Any:
    """Return the object at `module:thing` or `path/file.py:thing`. Raises `ConfigError` if the module, the file or the
    name in it does not exist."""
    module_name, object_name = _split_import_path(import_path)
    is_file_path = module_name.endswith(".py")
    module = _load_module_file(Path(module_name)) if is_file_path else _import_module(module_name, import_path)
    try:
        return getattr(module, object_name)
    except AttributeError:
        raise ConfigError(f"{import_path!r}: {module_name} has no {object_name!r}") from None


def list_module_names(package_folder: str) -> list[str]:
    """Return the module names of a package folder, without private modules and sub-packages."""
    package = importlib.import_module(package_folder)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg and not m.name.startswith("_"))


def list_defined_names(package_folder: str, suffix: str = "") -> list[str]:
    """Return the names of the modules in a package folder that define a function of the same name or, with a `suffix`,
    a class `SomeNameSuffix` in `some_name.py`. The modules are not imported."""
    [path] = importlib.import_module(package_folder).__path__
    defined_names = []
    for name in list_module_names(package_folder):
        definition_pattern = rf"class {to_class_name(name)}{suffix}\b" if suffix else rf"(async )?def {name}\("
        if re.search(f"^{definition_pattern}", Path(path, f"{name}.py").read_text(encoding="utf-8"), re.M):
            defined_names.append(name)
    return defined_names


def to_class_name(module_name: str) -> str:
    """Return the class name of a module: `SomeName` for `some_name`."""
    return module_name.title().replace("_", "")


def load_class(name: str, package_folder: str, class_suffix: str) -> Any:
    """Return the class `SomeNameSuffix` of `some_name.py` in a package folder, or the object at a user's import path.
    Raises `ConfigError` if the class or object does not exist, or the user's file cannot be imported."""
    if is_import_path(name):
        return import_user_code(name)
    if name not in (defined_names := list_defined_names(package_folder, class_suffix)):
        raise ConfigError(f"there is no {name!r}{suggest_names(name, defined_names)}")
    return import_object(f"{package_folder}.{name}:{to_class_name(name)}{class_suffix}")


def import_user_code(import_path: str) -> Any:
    """Return the object at an import path of user code; an error during the import is reported as an error of the
    user's file. Raises `ConfigError` if the object does not exist, or its file raised an error; the message has the
    location."""

    def make_config_error(error: BaseException) -> ConfigError:
        error_text = f"{type(error).__name__}: {error} ({find_error_location(error)})"
        return ConfigError(f"{import_path!r} cannot be imported: {error_text}")

    if (current_folder := os.getcwd()) not in sys.path:
        # Add the current folder, which may contain the user's code: Python adds it only for `python -m`.
        sys.path.append(current_folder)
    try:
        with convert_errors(make_config_error):
            return import_object(import_path)
    except SystemExit as error:  # raised if the imported file is a script that calls `sys.exit` at its end
        raise make_config_error(error) from error


def find_error_location(error: BaseException, function: Any = None) -> str:
    """Return the file and line at which an error was raised. With `function`, return the last line in the traceback
    from the file of that function, or the first line of the function if the traceback has no line of the file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    stack_frames = traceback.extract_tb(error.__traceback__)
    code_object = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if code_object is None:
        return f"{stack_frames[-1].filename}:{stack_frames[-1].lineno}"
    error_line_numbers = [frame.lineno for frame in stack_frames if frame.filename == code_object.co_filename]
    return f"{code_object.co_filename}:{error_line_numbers[-1] if error_line_numbers else code_object.co_firstlineno}"


def suggest_names(name: str, known_names: list[str]) -> str:
    """Return `; did you mean X?` if a known name is similar, otherwise the list of known names."""
    similar_names = difflib.get_close_matches(name, known_names, n=1, cutoff=0.6)
    return f"; did you mean {similar_names[0]!r}?" if similar_names else f"; known: {', '.join(sorted(known_names))}"


def locate_code(import_path: str) -> Path:
    """Return the file of a user's code at an import path, without importing it or its packages. Raises `ConfigError` if
    the file or module does not exist, or does not define the object that the path names."""
    code_file, object_name = _find_code_file(import_path), import_path.rpartition(":")[2]
    if (top_level_names := _read_top_level_names(code_file)) is not None and object_name not in top_level_names:
        suggestion_text = suggest_names(object_name, sorted(top_level_names)) if top_level_names else ""
        raise ConfigError(f"{import_path!r}: {code_file} has no {object_name!r}{suggestion_text}")
    return code_file


def read_signature(import_path: str) -> inspect.Signature | None:
    """Return the signature of a user's function, without annotations and with None in place of each default; the file
    is not run. Return None if the file must be run to know the signature, as with a decorator, or is invalid."""
    code_file, function_name = _find_code_file(import_path), import_path.rpartition(":")[2]
    module_globals: dict[str, Any] = {}
    try:
        with _AST_PARSER_LOCK:
            syntax_nodes = [*ast.walk(module := ast.parse(code_file.read_bytes()))]
    except (SyntaxError, ValueError):  # ignore an invalid file: the later import reports its error
        return None
    func_nodes = [node for node in syntax_nodes if isinstance(node, ast.FunctionDef) and node.name == function_name]
    is_name_reassigned = any(
        isinstance(n, ast.Name) and n.id == function_name and isinstance(n.ctx, ast.Store) for n in syntax_nodes
    )
    if len(func_nodes) != 1 or func_nodes[0] not in module.body or func_nodes[0].decorator_list or is_name_reassigned:
        return None
    [function_node], none_literal_node = func_nodes, ast.Constant(None)
    function_node.args.defaults = [none_literal_node] * len(function_node.args.defaults)
    function_node.args.kw_defaults = [default and none_literal_node for default in function_node.args.kw_defaults]
    for node in ast.walk(function_node.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    function_node.body, function_node.returns = [ast.Pass()], None
    exec(compile(ast.fix_missing_locations(ast.Module([function_node], [])), str(code_file), "exec"), module_globals)
    return inspect.signature(module_globals[function_name])


_AST_PARSER_LOCK = threading.Lock()
"""Lock around Python's parser: Python 3.11 counts the depth of the syntax tree once for all threads, so two threads
that parse at once raise a `SystemError` (CPython issue 106905)."""


def _read_top_level_names(code_file: Path) -> set[str] | None:
    """Return the names that a file defines at its top level; None if they are known only after the file has run."""
    try:
        with _AST_PARSER_LOCK:
            pending_nodes: list[ast.AST] = [ast.parse(code_file.read_bytes())] if code_file.suffix == ".py" else []
    except (SyntaxError, ValueError):  # ignore an invalid file: the later import reports its error
        return None
    if not pending_nodes:
        return None
    top_level_names = set()
    while pending_nodes:
        syntax_node = pending_nodes.pop()
        if isinstance(syntax_node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            top_level_names.add(syntax_node.name)
            continue  # skip the body, because names inside a function or class are not top-level names
        if isinstance(syntax_node, ast.Import | ast.ImportFrom):
            top_level_names |= {alias.asname or alias.name.partition(".")[0] for alias in syntax_node.names}
        elif isinstance(syntax_node, ast.Name):
            top_level_names.add(syntax_node.id)
        pending_nodes += ast.iter_child_nodes(syntax_node)
    return None if top_level_names & {"*", "__getattr__", "globals", "exec", "setattr"} else top_level_names


def _split_import_path(import_path: str) -> tuple[str, str]:
    module_name, _, object_name = import_path.rpartition(":")
    if not module_name or not object_name:
        raise ConfigError(f"{import_path!r} is not an import path; write module:function or path/file.py:function")
    return module_name, object_name


def _find_code_file(import_path: str) -> Path:
    module_name, _ = _split_import_path(import_path)
    if module_name.endswith(".py"):
        if not os.path.isfile(module_name):  # Path.is_file would raise an error for a long name
            raise ConfigError(f"{import_path!r}: file {module_name} does not exist")
        return Path(module_name)
    root_package, *submodule_names = module_name.split(".")
    module_spec: ModuleSpec | None = PathFinder.find_spec(root_package, [os.getcwd(), *sys.path])
    if module_spec is None and root_package:  # search again with import hooks, which may provide the module
        module_spec = importlib.util.find_spec(root_package)
    for name in submodule_names:
        search_folders = module_spec.submodule_search_locations if module_spec else None
        module_spec = PathFinder.find_spec(name, list(search_folders)) if search_folders else None
    if module_spec is None or not module_spec.origin or not Path(module_spec.origin).is_file():
        raise ConfigError(f"{import_path!r}: module {module_name!r} was not found")
    return Path(module_spec.origin)


def compute_code_digest(import_path: str) -> str:
    """Return the digest of a user's code at an import path, for the fingerprint of a stage; it covers the whole file.
    Raises `ConfigError` if the file or module does not exist."""
    return hashlib.sha256(_find_code_file(import_path).read_bytes()).hexdigest()


def _import_module(module_name: str, import_path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{import_path!r}: module {error.name!r} was not found") from error


_USER_IMPORT_LOCK = threading.RLock()
"""Lock around the import of a user's file, so that no other thread gets the partly initialised module."""


def _load_module_file(module_file: Path) -> Any:
    if not os.path.isfile(module_file):
        raise ConfigError(f"user code {module_file} does not exist")
    module_name = f"user_{module_file.stem}_{hashlib.sha256(str(module_file.resolve()).encode()).hexdigest()[:8]}"
    with _USER_IMPORT_LOCK:
        if module_name not in sys.modules:
            module_spec = importlib.util.spec_from_file_location(module_name, module_file)
            assert module_spec is not None and module_spec.loader is not None
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[module_name] = module
            # Remove a module that failed, so that a later import does not get a partly initialised one.
            with cleanup_on_error(partial(sys.modules.pop, module_name)):
                module_spec.loader.exec_module(module)
        return sys.modules[module_name]
