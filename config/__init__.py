"""Options from preset files and the command line, checked against dataclasses.

    python train.py config/small.py --batch_size=32 --attention mqa

Precedence: defaults of the dataclass < presets in the order given < flags. The three are merged first and the
dataclass is made once, so a preset only has to be valid together with the flags beside it.

A preset is a Python file of plain assignments. It is read, never run: numbers, text, True / False / None,
arithmetic, and names set further up in the same file. `base = "small.py"` as its first assignment starts
from another preset (a path relative to the preset's own folder); a name with a leading underscore is only a
helper.

tyro draws `--help` from the dataclasses and their comments. Values are checked here and not by tyro, because
a user's mistake should be one line that reads the same for a file and a flag.
"""

import ast
import difflib
import math
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_HERE = Path(__file__).resolve().parent
_INT_LIMIT = 2**63  # torch and numpy hold integers in 64 bits
_LONGEST_CHAIN = 20  # presets that start one from the other
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass
class Parsed(Generic[T]):
    """What `parse` found."""

    config: T  # the resolved dataclass
    presets: list[Path]  # preset files in the order given (not the files they start from)
    explicit: dict[str, Any]  # values that flags, not presets, set: by key, converted


@dataclass(frozen=True)
class _Option:
    kind: type  # int, float, str or bool
    choices: tuple[str, ...] = ()  # from Literal; empty: any value of the kind
    optional: bool = False  # None is accepted

    def __str__(self) -> str:
        names = {int: "int (64 bits)", float: "finite float", str: "UTF-8 text", bool: "True or False"}
        return (", ".join(self.choices) or names[self.kind]) + " or None" * self.optional


def parse(
    argv: Sequence[str], schema: type[T], *, prog: str, description: str,
    stored: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]] | None = None
) -> Parsed[T]:
    """Turn `[PRESET ...] [--key=value ...]` into a `schema`, a dataclass; nested ones count as part of it.

    Forms: `--key value`, `--key=value`, `_` or `-` between words; for True / False also `--key`, `--no_key`.
    The last of two equal flags wins. Text stays as typed, except that `None` or `none` unsets an option that
    may be None; text that looks like a flag needs the `=` form. Integers may be written `1e3` or `1_000`.
    `stored` may find values that come before presets and flags, such as those of a run to resume: given the
    flags, it returns where they are from, for messages, and the values.

    Errors: ValueError, one line, for any mistake of the user. SystemExit(0) after `--help`, which shows
    the values of the presets before it as defaults.
    """
    options = _options(schema)
    presets: list[Path] = []
    explicit: dict[str, Any] = {}
    wants_help = False
    rest = list(argv)
    while rest and not wants_help:
        token = rest.pop(0)
        flag = _FLAG.fullmatch(token)
        if token in ("-h", "--help"):
            wants_help = True
        elif flag:
            key, value = _read_flag(flag[1], flag[2], rest, options)
            explicit[key] = value
        elif token.startswith("-") or not token:
            raise ValueError(f"unexpected {_show(token)}: options are written --key=value, see --help")
        else:
            presets.append(_find_preset(token))

    values: dict[str, Any] = {}
    if stored and not wants_help:
        source, found = stored(explicit)
        values = {key: _check(_find_option(options, key, source), value, f"{source}: {key}")
                  for key, value in found.items()}  # fmt: skip
    for path in presets:
        values |= _read_preset(path, options)
    if wants_help:
        _print_help(schema, values, prog, description)
    return Parsed(_build(schema, values | explicit), presets, explicit)


def split_lists(
    argv: Sequence[str], schema: type, always: Sequence[str] = ()
) -> tuple[list[str], dict[str, list[str]]]:
    """Take the flags with several values, `--norm=post,pre`, out of a command line, and `always` those named.

    Returns the rest, and the values as they were typed, by key, each once. They are checked when `parse` sees
    them one at a time. A comma in an option of free text is a character like any other.
    """
    options, rest, lists, tokens = _options(schema), list[str](), dict[str, list[str]](), list(argv)
    while tokens:
        token = tokens.pop(0)
        flag = _FLAG.fullmatch(token)
        key = flag[1].replace("-", "_") if flag else ""
        apart = flag is not None and flag[2] is None and bool(tokens)  # --key value
        text = tokens[0] if apart else (flag and flag[2]) or ""
        option = options.get(key)
        is_list = "," in text and option is not None and (option.kind is not str or bool(option.choices))
        if text and (is_list or key in always):
            lists[key] = list(dict.fromkeys(text.split(",")))
            del tokens[: int(apart)]
        else:
            rest.append(token)
    return rest, lists


def flatten(config: Any) -> dict[str, Any]:
    """All options of a (nested) dataclass as one dict, leaf name -> value: what a run stores as JSON."""
    flat: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        flat |= flatten(value) if is_dataclass(value) else {field.name: value}
    return flat


def run_main(main: Callable[[list[str]], object], prog: str) -> None:
    """Call `main(sys.argv[1:])` as a program: a user's mistake is one line on stderr, not a traceback.

    Exit codes: 1 for a ValueError or OSError (full disk, no permission), 130 for Ctrl-C, 141 when the reader
    of a pipe has gone (`| head`). Other exceptions are bugs and keep their traceback.
    HEADCOUNT_TRACEBACK=1 in the environment shows the traceback of the first kind too.
    """
    try:
        main(sys.argv[1:])
        sys.stdout.flush()  # so that a closed pipe is seen here and not by the interpreter at exit
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # What is still buffered has no reader: send it nowhere, or the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        if os.environ.get("HEADCOUNT_TRACEBACK") == "1":
            raise
        message = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            message = error.strerror + (f": {error.filename}" if error.filename else "")
        print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(1)


# The dataclass: its options, and making one


def _options(schema: type) -> dict[str, _Option]:
    """Leaf fields of the dataclass and of those nested in it, by name, without those of init=False."""
    options: dict[str, _Option] = {}
    hints = get_type_hints(schema)
    for field in fields(schema):
        hint = hints[field.name]
        if not field.init:
            continue
        if is_dataclass(hint):
            # A factory with values of its own would be a second place for a default.
            assert field.default is MISSING and field.default_factory in (MISSING, hint), field.name
            found = _options(hint)  # type: ignore[arg-type]
        else:
            found = {field.name: _option(hint)}
        twice = options.keys() & found.keys()
        assert not twice, f"two options with one name: {twice}"
        options |= found
    assert not options.keys() & {"base", "help"}, "base and help have a meaning of their own"
    return options


def _option(hint: Any) -> _Option:
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        optional = type(None) in get_args(hint)
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is Literal:
        return _Option(str, get_args(hint), optional)
    assert hint in (int, float, str, bool), f"no rule to read a {hint}"
    return _Option(hint, (), optional)


def _build(schema: type[T], values: dict[str, Any]) -> T:
    kwargs: dict[str, Any] = {}
    hints = get_type_hints(schema)
    for field in fields(schema):  # type: ignore[arg-type]
        if is_dataclass(hints[field.name]):
            kwargs[field.name] = _build(hints[field.name], values)
        elif field.name in values:
            kwargs[field.name] = values[field.name]
        elif field.init and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"--{field.name} is missing and has no default")
    return schema(**kwargs)


# Checks, the same for files and flags. `where` is "--key" or "config/x.py:3: key" and starts the message.


def _find_option(options: dict[str, _Option], key: str, where: str) -> _Option:
    if key in options:
        return options[key]

    def likeness(name: str) -> tuple[bool, float]:
        initials = "".join(word[:1] for word in name.split("_"))  # lr is learning_rate
        return initials == key, difflib.SequenceMatcher(None, key, name).ratio()

    nearest = max(options, key=likeness)
    raise ValueError(f"{where} is not an option; did you mean {nearest}? --help lists all")


def _check(option: _Option, value: Any, where: str) -> Any:
    """The value in the option's type, or ValueError. Takes an int for a float, and 1e3 for an int."""
    if value is None and option.optional:
        return None
    if option.kind is int and type(value) is float and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # up to 2**53 a float is exactly the integer that was written
    elif option.kind is float and type(value) is int and abs(value) < _INT_LIMIT:
        value = float(value)
    good = type(value) is option.kind and (not option.choices or value in option.choices)
    if good and type(value) is str:
        good = not re.search(r"[\ud800-\udfff]", value)  # bytes of another encoding, from the command line
    elif good:
        good = math.isfinite(value) if type(value) is float else abs(value) < _INT_LIMIT
    if not good:
        raise ValueError(f"{where} takes {option}, not {_show(value)}")
    return value


def _show(value: Any) -> str:
    """The value for a message: on one line and not too long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return "a very large number"
    return text if len(text) <= 60 else text[:57] + "..."


# The command line


def _read_flag(name: str, text: str | None, rest: list[str], options: dict[str, _Option]) -> tuple[str, Any]:
    """Key and value of one flag; takes its value off `rest` when it has none after an `=`."""
    where, key = f"--{name}", name.replace("-", "_")
    positive = key.removeprefix("no_")
    if key not in options and positive in options and options[positive].kind is bool:
        if text is not None:
            raise ValueError(f"{where} takes no value; write --{positive}=True or --{positive}=False")
        return positive, False
    option = _find_option(options, key, where)
    if text is None and option.kind is bool:
        is_value = bool(rest) and rest[0].lower() in ("true", "false", "none")
        text = rest.pop(0) if is_value else "True"
    elif text is None:
        if not rest or _FLAG.fullmatch(rest[0]):
            hint = f"; if {_show(rest[0])} is its text, join them with =" if rest else ""
            raise ValueError(f"{where} needs a value: {option}{hint}")
        text = rest.pop(0)
    return key, _check(option, _from_text(option, text), where)


def _from_text(option: _Option, text: str) -> Any:
    """What the text stands for in this option's type; the text itself when it stands for nothing."""
    if text in option.choices:
        return text
    if option.optional and text in ("None", "none"):
        return None
    if option.kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    for number in {int: (int, float), float: (float,)}.get(option.kind, ()):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _print_help(schema: type, values: dict[str, Any], prog: str, description: str) -> None:
    """Print the options with the presets' values as defaults, and leave with exit code 0."""
    import tyro

    try:
        default = _build(schema, values) if values else tyro.MISSING_NONPROP
    except ValueError:  # the presets need a flag beside them: show the plain defaults
        default = tyro.MISSING_NONPROP
    usage = f"{prog} [PRESET ...] [--key=value ...]\n\nPresets: {', '.join(_shipped())}"
    tyro.cli(
        schema,
        args=["--help"],
        prog=prog,
        description=f"{description}\n\n{usage}",
        default=default,
        use_underscores=True,
        config=(tyro.conf.OmitArgPrefixes,),
    )


# Preset files


def _shipped() -> list[str]:
    return sorted(path.stem for path in _HERE.glob("*.py") if path.stem != "__init__")


def _is(test: Callable[[Path], bool], path: Path) -> bool:
    try:
        return test(path)
    except (OSError, ValueError):  # a name too long, or with a zero byte: nothing is there
        return False


def _find_preset(name: str) -> Path:
    """The file of `config/small.py`, `small.py` or `small`: in the working directory, else in this folder."""
    names = [name, f"config/{name}"] if name.endswith(".py") else [f"config/{name}.py", name]
    for folder in (Path(), _HERE.parent):
        for candidate in names:
            if _is(Path.is_file, folder / candidate):
                return folder / candidate
    near = difflib.get_close_matches(Path(name).stem, _shipped(), n=1)
    if _is(Path.is_dir, Path(name)):
        hint = "is a folder"
    elif "=" in name:
        hint = "is no file; options begin with two dashes"
    else:
        hint = f"is no file; did you mean config/{near[0]}.py?" if near else "is no file"
    raise ValueError(f"preset {_show(name)} {hint} (presets: {', '.join(_shipped())})")


def _read_preset(path: Path, options: dict[str, _Option], chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Checked values of a preset file and of the one it starts from. `chain`: the files that led here."""
    if path.resolve() in chain:
        raise ValueError(f"{path} starts from itself through `base`")
    if len(chain) == _LONGEST_CHAIN:
        raise ValueError(f"{path} is one `base` too many: at most {_LONGEST_CHAIN} in a row")
    chain += (path.resolve(),)
    names: dict[str, Any] = {}  # everything set so far in this file
    values: dict[str, Any] = {}  # the options among it
    for number, statement in enumerate(_statements(path)):
        line = f"{path}:{statement.lineno}"
        match statement:
            case ast.Assign(targets=[ast.Name(id=key)]):
                where = f"{line}: {key}"
            case _:
                raise ValueError(f"{line}: a preset holds plain assignments, such as n_layer = 4")
        try:
            value = names[key] = _evaluate(statement.value, names, line)
        except RecursionError:
            raise ValueError(f"{line}: expression nested too deep") from None
        if key == "base":
            if number > 0:
                raise ValueError(f"{where} must be the first assignment")
            if not isinstance(value, str) or not _is(Path.is_file, path.parent / value):
                raise ValueError(f"{where} takes a preset file in {path.parent}, not {_show(value)}")
            values |= _read_preset(path.parent / value, options, chain)
        elif not key.startswith("_"):
            values[key] = _check(_find_option(options, key, where), value, where)
    return values


def _statements(path: Path) -> list[ast.stmt]:
    """The statements of a preset file after its docstring."""
    try:
        body = ast.parse(path.read_bytes().decode("utf-8-sig")).body
    except SyntaxError as error:
        where = f"{path}:{error.lineno or 1}"
        raise ValueError(f"{where}: {error.msg}; a preset holds assignments such as n_layer = 4") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except (ValueError, RecursionError, MemoryError):  # zero bytes; nested too deep for Python's parser
        raise ValueError(f"{path} is not a preset: Python cannot read it") from None
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body


def _evaluate(node: ast.expr, names: dict[str, Any], line: str) -> Any:
    """Value of a constant, of a name set above, or of arithmetic on numbers. Runs no code from the file."""
    match node:
        case ast.Constant(value=int() | float() | str() | None as value):  # bool is an int
            return value
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"{line}: {name} is not set above; text needs quotes")
            return names[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            sign = -1 if isinstance(node.op, ast.USub) else 1  # a factor: 0 - 0.0 would lose its sign
            node = ast.BinOp(ast.Constant(sign), ast.Mult(), operand)
    if not (isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC):
        raise ValueError(f"{line}: only numbers, text, True, False, None and arithmetic (+ - * / // % **)")
    left, right = _evaluate(node.left, names, line), _evaluate(node.right, names, line)
    if not {type(left), type(right)} <= {int, float}:
        raise ValueError(f"{line}: arithmetic needs numbers, not {_show(left)} and {_show(right)}")
    try:
        # 9**9**9 would keep Python busy for ever, and no option needs more than 64 bits.
        if any(type(x) is int and abs(x) >= _INT_LIMIT for x in (left, right)):
            raise OverflowError
        if isinstance(node.op, ast.Pow) and type(left) is type(right) is int and abs(left) > 1 and right > 64:
            raise OverflowError
        result = _ARITHMETIC[type(node.op)](left, right)
        if type(result) is complex or (type(result) is int and abs(result) >= _INT_LIMIT):
            raise OverflowError
    except (OverflowError, ZeroDivisionError):
        raise ValueError(f"{line}: division by zero, or a result that is not a 64-bit number") from None
    return result
