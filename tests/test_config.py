"""The options: presets and flags into dataclasses. Names like CFG-1 refer to the list of known cases."""

import errno
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from config import flatten, parse

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Net:
    """Shape of the model."""

    n_head: int = 4  # query heads
    n_kv_head: int | None = None
    """KV heads, for gqa."""
    n_embd: int = 32
    attention: Literal["mha", "gqa", "mqa"] = "mha"  # kind of heads
    kv_heads: int = field(init=False, default=0)

    def __post_init__(self):
        if self.n_head < 1 or self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        self.kv_heads = self.n_kv_head or self.n_head


@dataclass
class Job:
    """One run."""

    out_dir: str | None = None  # where results go
    prompt: str = "a"  # text [to] go 100% on from
    learning_rate: float = 1e-3  # peak rate
    dropout: float = 0.0  # share of zeros
    max_iters: int = 100  # optimizer steps
    compile: bool = False  # use torch.compile
    kv_cache: bool = True  # keep keys and values
    top_p: float | None = None  # nucleus
    fused: bool | None = None  # None: where available
    model: Net = field(default_factory=Net)


def read(*argv, schema=Job):
    return parse(argv, schema, prog="job.py", description="Does a job.")


def value(*argv):
    """The last flag's key, and what the config has for it."""
    found = read(*argv)
    (key,) = found.explicit
    assert flatten(found.config)[key] == found.explicit[key]
    return found.explicit[key]


def error(*argv):
    with pytest.raises(ValueError) as caught:
        read(*argv)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.fixture
def preset(tmp_path, monkeypatch):
    """Write preset files into an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="p.py"):
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
        return name

    return write


# Flags


def test_nothing_given():
    found = read()
    assert found.config == Job() and found.presets == [] and found.explicit == {}


@pytest.mark.parametrize("form", ["--max_iters 32", "--max_iters=32", "--max-iters=32", "--max-iters 32"])
def test_forms_of_a_flag(form):
    found = read(*form.split())
    assert found.config.max_iters == 32 and found.explicit == {"max_iters": 32}


def test_nested_fields_are_flat_flags():
    found = read("--n_head=8", "--attention", "mqa", "--dropout=0.5")
    assert (found.config.model.n_head, found.config.model.attention, found.config.dropout) == (8, "mqa", 0.5)
    assert found.config.model.kv_heads == 8  # __post_init__ saw the flag


@pytest.mark.parametrize(
    "text",
    [
        "1+1=",
        "=",
        "",
        " ",
        "a=b=c",
        "-x",
        "-",
        "--",
        "--- a",
        "-- b",
        "--a b",
        "1\n2",
        "None?",
        "naïve 🙂",
        "-h",
    ],
)
def test_cfg_1_text_arrives_whole(text):
    assert read(f"--prompt={text}").config.prompt == text
    assert read("--prompt", text).config.prompt == text


def test_value_that_looks_like_a_flag():
    assert read("--prompt=--seed").config.prompt == "--seed"
    assert "--prompt needs a value" in error("--prompt", "--max_iters", "3")
    assert "--prompt needs a value" in error("--prompt")


def test_cfg_2_default_none_set_and_unset(preset):
    assert value("--n_kv_head=4") == 4 and value("--n_kv_head", "4") == 4
    assert value("--n_kv_head=None") is None and value("--n_kv_head=none") is None
    assert value("--top_p=0.9") == 0.9
    assert value("--out_dir=here") == "here" and value("--out_dir=None") is None
    assert value("--fused") is True and value("--no_fused") is False and value("--fused=None") is None
    four, none = preset("n_kv_head = 4", "four.py"), preset("n_kv_head = None", "none.py")
    assert read(four).config.model.n_kv_head == 4
    assert read(four, none).config.model.n_kv_head is None
    assert read(four, "--n_kv_head=None").config.model.n_kv_head is None
    assert error("--n_kv_head=abc") == "--n_kv_head takes int (64 bits) or None, not 'abc'"
    wrong = preset("\nn_kv_head = 'abc'", "wrong.py")
    assert error(wrong) == "wrong.py:2: n_kv_head takes int (64 bits) or None, not 'abc'"


def test_none_where_there_is_no_none():
    assert read("--prompt=None").config.prompt == "None"  # plain text is only text
    assert "finite float" in error("--dropout=None")


def test_cfg_4_unknown_key(preset):
    assert error("--lr=1") == "--lr is not an option; did you mean learning_rate? --help lists all"
    assert "did you mean n_head" in error("--n-hed=2")
    assert "did you mean kv_cache" in error("--no_kv_cahe")
    name = preset("# a note\ndropout = 0.1\nlearning_rte = 1e-4\n")
    assert error(name).startswith("p.py:3: learning_rte is not an option; did you mean learning_rate?")
    assert error("--kv_heads=3").startswith("--kv_heads is not an option")  # init=False: computed, never set
    assert error("--model=3").startswith("--model is not an option")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--dropout=0", 0.0),
        ("--learning_rate=1", 1.0),
        ("--max_iters=1e3", 1000),
        ("--max_iters=1_000", 1000),
        ("--max_iters=5.0", 5),
        ("--max_iters=-3", -3),
        ("--prompt=123", "123"),
        ("--out_dir=007", "007"),
        ("--prompt=[1, 2]", "[1, 2]"),
        ("--prompt='q'", "'q'"),
        ("--prompt=True", "True"),
    ],
)
def test_cfg_5_harmless_differences(flag, expected):
    got = value(flag)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max_iters=1.5", "--max_iters takes int (64 bits), not 1.5"),
        ("--max_iters=1e17", "--max_iters takes int (64 bits), not 1e+17"),
        ("--max_iters=ten", "--max_iters takes int (64 bits), not 'ten'"),
        ("--max_iters=", "--max_iters takes int (64 bits), not ''"),
        ("--max_iters=1e999", "--max_iters takes int (64 bits), not inf"),
        ("--max_iters=True", "--max_iters takes int (64 bits), not 'True'"),
        ("--max_iters=9223372036854775808", "--max_iters takes int (64 bits), not 9223372036854775808"),
        ("--dropout=nan", "--dropout takes finite float, not nan"),
        ("--dropout=-inf", "--dropout takes finite float, not -inf"),
        ("--dropout=0,1", "--dropout takes finite float, not '0,1'"),
        ("--compile=1", "--compile takes True or False, not '1'"),
        ("--attention=mha ", "--attention takes mha, gqa, mqa, not 'mha '"),
        ("--prompt=\udce9", "--prompt takes UTF-8 text, not '\\udce9'"),
    ],
)
def test_wrong_values(flag, message):
    assert error(flag) == message


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--compile", True),
        ("--compile True", True),
        ("--compile=true", True),
        ("--compile=False", False),
        ("--compile False", False),
        ("--no_compile", False),
        ("--no-compile", False),
        ("--kv_cache", True),
        ("--no_kv_cache", False),
        ("--no-kv-cache", False),
    ],
)
def test_true_and_false(argv, expected):
    assert value(*argv.split()) is expected


def test_true_and_false_beside_others(preset):
    name = preset("dropout = 0.5")
    config = read("--compile", name, "--no_kv_cache", "--max_iters", "3").config
    assert (config.compile, config.dropout, config.kv_cache, config.max_iters) == (True, 0.5, False, 3)
    assert "takes no value" in error("--no_compile=False")


def test_the_last_of_two_flags_wins():
    assert read("--max_iters=1", "--max-iters=2").config.max_iters == 2
    assert read("--compile", "--no_compile").config.compile is False


@pytest.mark.parametrize("token", ["-x", "-n_head=3", "--", "---n_head=3", "--=3", "", "-", "--1=2"])
def test_stray_tokens(token):
    assert error(token).startswith(f"unexpected {token!r}")


# Presets


def test_precedence(preset):
    one = preset("max_iters = 1\ndropout = 0.1\nn_head = 2", "one.py")
    two = preset("max_iters = 2\ndropout = 0.2", "two.py")
    found = read(one, two, "--max_iters=3")
    assert (found.config.max_iters, found.config.dropout, found.config.model.n_head) == (3, 0.2, 2)
    assert found.presets == [Path("one.py"), Path("two.py")] and found.explicit == {"max_iters": 3}
    assert read("--max_iters=3", one).config.max_iters == 3  # a flag wins wherever it stands


def test_only_the_merged_values_must_fit_together(preset):
    name = preset("n_head = 5")
    assert error(name) == "n_embd=32 is not divisible by n_head=5"
    assert read(name, "--n_embd=40").config.model.n_embd == 40


def test_what_a_preset_may_say(preset):
    name = preset(
        '"""A docstring."""\n# a comment\n_tokens = 2**10\nmax_iters = 5 * 400 + _tokens // 4 % 7 - 1\n'
        "learning_rate = -(-1e-3) / 2\nn_head = max_iters // 500\nprompt = 'é\\n'\ncompile = True\n"
        "top_p = None\ndropout = +0\nout_dir = prompt  # text too\n"
    )
    config = read(name).config
    assert config.max_iters == 5 * 400 + 2**10 // 4 % 7 - 1 == 2003
    assert (config.learning_rate, config.model.n_head) == (5e-4, 4)
    assert config.prompt == config.out_dir == "é\n"
    assert (config.compile, config.top_p, config.dropout) == (True, None, 0.0)
    assert type(config.dropout) is float


def test_byte_order_mark_crlf_and_empty(preset):
    assert read(preset(b"\xef\xbb\xbfmax_iters = 3\r\ndropout = 0.5\r\n")).config.max_iters == 3
    assert read(preset("")).config == Job()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os", "p.py:1: a preset holds plain assignments"),
        ("\nprint(1)", "p.py:2: a preset holds plain assignments"),
        ("max_iters: int = 3", "plain assignments"),
        ("max_iters = n_head = 3", "plain assignments"),
        ("max_iters, n_head = 3, 4", "plain assignments"),
        ("max_iters += 1", "plain assignments"),
        ("max_iters = 3\n'text'", "p.py:2: a preset holds"),
        ("max_iters = int('3')", "p.py:1: only numbers, text"),
        ("prompt = f'{1}'", "only numbers, text"),
        ("prompt = b'x'", "only numbers, text"),
        ("max_iters = [1][0]", "only numbers, text"),
        ("max_iters = 1 if 1 else 2", "only numbers, text"),
        ("max_iters = ~1", "only numbers, text"),
        ("max_iters = 1 << 3", "only numbers, text"),
        ("dropout = 1j", "only numbers, text"),
        ("max_iters = n_head", "p.py:1: n_head is not set above"),
        ("attention = mqa", "mqa is not set above; text needs quotes"),
        ("prompt = 'a' * 10", "arithmetic needs numbers, not 'a' and 10"),
        ("max_iters = True + 1", "arithmetic needs numbers"),
        ("max_iters = None - 1", "arithmetic needs numbers"),
        ("prompt = -'a'", "arithmetic needs numbers"),
        ("max_iters = 9**9**9", "not a 64-bit number"),
        ("max_iters = 2**63", "not a 64-bit number"),
        ("max_iters = 99999999999 * 99999999999", "not a 64-bit number"),
        ("dropout = 10.0**999", "not a 64-bit number"),
        ("dropout = (-8)**0.5", "not a 64-bit number"),
        ("max_iters = 1 // 0", "division by zero"),
        ("dropout = 1 % 0.0", "division by zero"),
        ("dropout = 0**-1", "division by zero"),
        ("dropout = 1e308 * 10", "p.py:1: dropout takes finite float, not inf"),
        ("max_iters = 1.5", "p.py:1: max_iters takes int (64 bits), not 1.5"),
        ("max_iters = '3'", "p.py:1: max_iters takes int (64 bits), not '3'"),
        ("max_iters = True", "p.py:1: max_iters takes int (64 bits), not True"),
        ("dropout = '0.1'", "p.py:1: dropout takes finite float, not '0.1'"),
        ("prompt = 123", "p.py:1: prompt takes UTF-8 text, not 123"),
        ("compile = 1", "p.py:1: compile takes True or False, not 1"),
        ("compile = 'True'", "compile takes True or False, not 'True'"),
        ("attention = 'xyz'", "p.py:1: attention takes mha, gqa, mqa, not 'xyz'"),
        ("max_iters = 0x" + "f" * 5000, "takes int (64 bits), not a very large number"),
        ("max_iters = 3 4", "p.py:1: invalid syntax"),
        ("\nprompt = 'open", "p.py:2: unterminated string"),
        ("max_iters = " + "9" * 5000, "p.py:1: Exceeds the limit"),
        ("max_iters = " + "1+" * 5000 + "1", "p.py"),
        ("max_iters = " + "1+" * 1200 + "1", "p.py:1: expression nested too deep"),
        ("max_iters = " + "-" * 50000 + "1", "p.py"),
        ("max_iters = " + "(" * 5000 + "1" + ")" * 5000, "p.py"),
        (b"max_iters = 3\0", "p.py"),
        ("prompt = 'é'".encode("latin-1"), "p.py is not UTF-8 text"),
        ("prompt = '\\ud800'", "p.py:1: prompt takes UTF-8 text"),
    ],
)
def test_what_a_preset_may_not_say(preset, text, message):
    assert message in error(preset(text))


def test_a_preset_is_never_run(preset, tmp_path):
    error(preset("__import__('pathlib').Path('ran').touch()\nmax_iters = 3"))
    error(preset("max_iters = open('ran', 'w').write('x')"))
    assert not (tmp_path / "ran").exists()


def test_base(preset):
    preset("max_iters = 7\ndropout = 0.5", "folder/small.py")
    name = preset('"""One more."""\nbase = "small.py"\nmax_iters = 8', "folder/big.py")
    found = read(name)
    assert (found.config.max_iters, found.config.dropout) == (8, 0.5)
    assert found.presets == [Path("folder/big.py")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base = 'p.py'", "starts from itself"),
        ("base = 'other.py'", "starts from itself"),
        ("base = 'absent.py'", "p.py:1: base takes a preset file in ., not 'absent.py'"),
        ("base = ''", "p.py:1: base takes a preset file"),
        ("base = 3", "p.py:1: base takes a preset file in ., not 3"),
        ("max_iters = 3\nbase = 'other.py'", "p.py:2: base must be the first assignment"),
        ("base = 'wrong.py'", "wrong.py:1: max_itrs is not an option"),
    ],
)
def test_wrong_base(preset, text, message):
    preset("base = 'p.py'", "other.py")
    preset("max_itrs = 1", "wrong.py")
    assert message in error(preset(text))


def test_finding_a_preset(preset, tmp_path):
    preset("max_iters = 5", "config/mine.py")
    for name in ("config/mine.py", "mine.py", "mine", str(tmp_path / "config" / "mine.py")):
        assert read(name).config.max_iters == 5, name


def test_preset_beside_the_parser(tmp_path, monkeypatch):
    """From another working directory `small` is still the shipped one."""
    monkeypatch.chdir(tmp_path)
    shipped = _shipped()
    if not shipped:
        pytest.skip("no presets are shipped yet")
    for name in (shipped[0].stem, f"config/{shipped[0].name}"):
        with pytest.raises(ValueError, match="is not an option"):  # found, and made for another schema
            read(name, schema=Lonely)


def test_missing_preset(preset, tmp_path):
    (tmp_path / "folder.py").mkdir()
    shipped = [path.stem for path in _shipped()]
    message = error("config/smal.py")
    assert message.startswith("preset 'config/smal.py' is no file")
    assert all(name in message for name in shipped)
    if "small" in shipped:
        assert "did you mean config/small.py?" in message
    assert "'folder.py' is a folder" in error("folder.py")
    assert "options begin with two dashes" in error("max_iters=3")
    for name in ("a\0b", "x" * 5000, "a\nb", "é" * 300):
        assert "is no file" in error(name)


def test_unreadable_preset(preset):
    name = preset("max_iters = 3")
    Path(name).chmod(0)
    if os.access(name, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(PermissionError):
        read(name)


def _shipped():
    return sorted(path for path in (ROOT / "config").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", _shipped(), ids=lambda path: path.stem)
def test_every_shipped_preset(path):
    train = pytest.importorskip("train")
    found = parse([str(path)], train.TrainConfig, prog="train.py", description="")
    assert found.presets == [path] and isinstance(found.config, train.TrainConfig)


# The dataclass


@dataclass
class Lonely:
    name: str


@dataclass
class Rates:
    learning_rate: float = 1e-3
    min_lr: float = 1e-4


def test_cfg_4_initials():
    """`lr` is closer to min_lr by its letters, but people mean the other."""
    with pytest.raises(ValueError, match="did you mean learning_rate"):
        read("--lr=1", schema=Rates)


def test_option_without_default():
    assert read("--name=x", schema=Lonely).config == Lonely("x")
    with pytest.raises(ValueError, match="--name is missing"):
        read(schema=Lonely)


def test_two_options_with_one_name():
    @dataclass
    class Twice:
        n_head: int = 3
        model: Net = field(default_factory=Net)

    # Annotations of a local class, real objects here, so that the parser can look them up.
    with pytest.raises(AssertionError, match="n_head"):
        read(schema=Twice)


def test_flatten():
    flat = flatten(read("--n_head=8", "--top_p=0.5").config)
    assert flat["n_head"] == 8 and flat["top_p"] == 0.5 and flat["kv_heads"] == 8 and "model" not in flat
    assert len(flat) == 9 + 5


# Help


def test_cfg_6_help_lists_every_option(capsys):
    for flag in ("--help", "-h"):
        with pytest.raises(SystemExit) as caught:
            read(flag)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        for name in flatten(Job()).keys() - {"kv_heads"}:
            assert f"--{name.replace('_', '-')}" in out.replace("_", "-"), name
        words = " ".join(out.replace("│", " ").split())
        for text in ("Does a job.", "job.py [PRESET ...] [--key=value ...]", "text [to] go 100% on", "FLOAT"):
            assert text in words
        for text in ("optimizer steps (default: 100)", "KV heads, for gqa.", "kind of heads (default: mha)"):
            assert text in words
        assert "\x1b" not in out  # no colours when the reader is not a terminal


def test_help_shows_the_values_of_a_preset(preset, capsys):
    with pytest.raises(SystemExit):
        read(preset("max_iters = 77\nn_head = 2"), "--help")
    out = capsys.readouterr().out
    assert "(default: 77)" in out and "(default: 2)" in out
    with pytest.raises(SystemExit) as caught:
        read(preset("n_head = 5"), "--help")  # does not fit by itself: help all the same
    assert caught.value.code == 0


# run_main, as a program


PROGRAM = """
import os, sys
from config import run_main
def main(argv):
    {body}
if __name__ == "__main__":
    run_main(main, "job.py")
"""


def run(body, *argv, stdout=subprocess.PIPE, **env):
    return subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", PROGRAM.format(body=body), *argv],
        cwd=ROOT,
        env=os.environ | env,
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def test_run_main_passes_the_arguments():
    done = run("print(argv)", "a", "--b=1")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "['a', '--b=1']", "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('n_head is\\n bad')", "n_head is bad"),
        ("raise ValueError", "ValueError"),
        ("open('absent.txt', encoding='utf-8')", "No such file or directory: absent.txt"),
        (
            f"raise OSError({errno.ENOSPC}, 'No space left on device', 'out/x')",
            "No space left on device: out/x",
        ),
        ("raise OSError('offline\\nhub')", "offline hub"),
    ],
)
def test_run_main_turns_a_mistake_into_one_line(body, message):
    done = run(body, HEADCOUNT_TRACEBACK="")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"job.py: error: {message}\n")


def test_run_main_leaves_a_bug_its_traceback():
    done = run("{}['x']")
    assert done.returncode == 1 and "Traceback" in done.stderr and "KeyError" in done.stderr
    done = run("raise ValueError('x')", HEADCOUNT_TRACEBACK="1")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_run_main_and_ctrl_c():
    done = run("raise KeyboardInterrupt")
    assert done.returncode == 130 and "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="pipes break differently on Windows")
@pytest.mark.parametrize("count", [1, 100_000])
def test_run_main_and_a_reader_that_leaves(count):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as pipe:
        done = run(f"[print('x') for _ in range({count})]", stdout=pipe)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_as_a_program_in_a_poor_terminal():
    """CFG-6: nothing but the options' own module is needed, and characters outside ASCII do no harm."""
    done = run(
        "from tests.test_config import read; read(*argv)", "--help", PYTHONIOENCODING="ascii", COLUMNS="60"
    )
    assert done.returncode == 0, done.stderr
    assert "max" in done.stdout and done.stderr == ""


def test_importing_is_cheap():
    done = run("print([name for name in ('torch', 'numpy', 'tyro', 'tiktoken') if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


# Any input at all


text = st.text(max_size=12)
known = st.sampled_from([*flatten(Job()), "no_compile", "base", "lr", "kv-cache"])
token = st.one_of(
    text,
    st.builds("--{}={}".format, known, text),
    st.builds("--{}".format, known),
    st.sampled_from(["True", "None", "1e3", "-1", "mqa", "nan", "config", "4"]),
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(token, max_size=5))
@example(["--compile", "none"])
def test_any_argv_gives_a_config_or_one_line(argv):
    try:
        assert isinstance(read(*argv).config, Job)
    except SystemExit as leaving:
        assert leaving.code == 0 and ("--help" in argv or "-h" in argv)
    except ValueError as mistake:
        assert "\n" not in str(mistake)


number = st.one_of(
    st.integers(), st.floats().map(repr), st.sampled_from(["True", "None", "'a'", "max_iters"])
)
sign = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "<<", "and"])
expression = st.recursive(
    number.map(str), lambda inner: st.builds("({} {} {})".format, inner, sign, inner), max_leaves=6
)
line = st.one_of(
    text, st.builds("{} = {}".format, known, expression), st.builds("{} = {!r}".format, known, text)
)


@settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.one_of(st.lists(line, max_size=4).map("\n".join).map(str.encode), st.binary(max_size=30)))
def test_any_preset_gives_a_config_or_one_line(preset, data):
    name = preset(data)
    try:
        assert isinstance(read(name).config, Job)
    except ValueError as mistake:
        assert "\n" not in str(mistake)


@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.booleans(),
)
def test_values_come_back(preset, number, real, words, flag):
    argv = [f"--max_iters={number}", f"--learning_rate={real!r}", f"--prompt={words}", f"--compile={flag}"]
    name = preset(f"max_iters = {number}\nlearning_rate = {real!r}\nprompt = {words!r}\ncompile = {flag}")
    for config in (read(*argv).config, read(name).config):
        assert (config.max_iters, config.learning_rate) == (number, real)
        assert (config.prompt, config.compile) == (words, flag)
