"""docs/known_failures.md is what its rows and the tests' marks say, and contradictions are errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = '[areas]\nstart = "Start"\n'
FIELDS = 'area = "start"\ntitle = "It hung"\nrequirement = "It does not hang."\n'
REASON = 'reason = "there is none"\n'
ROW = f"[1]\n{FIELDS}"
MARKED = "import pytest\n\n@pytest.mark.pain(1)\ndef test_it():\n    pass\n"
PLAIN = "def test_it():\n    pass\n"


@pytest.fixture
def script(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "gen_known_failures", ROOT / "scripts" / "gen_known_failures.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OUT", tmp_path / "page.md")
    return module


@pytest.fixture
def page(script, tmp_path):
    """`page(rows, code)`: the page of these rows and a single file of tests."""

    def make(rows: str, code: str) -> str:
        (tmp_path / "rows.toml").write_text(HEAD + rows)
        (tmp_path / "test" / "afd").mkdir(parents=True)
        (tmp_path / "test" / "afd" / "test_x.py").write_text(code)
        return script.text(tmp_path / "rows.toml", tmp_path / "test")

    return make


def test_page_is_generated_from_rows_and_marks(script):
    assert (ROOT / "docs" / "known_failures.md").read_text() == script.text()
    assert [row.number for row in sorted(script.rows(), key=lambda row: row.number)] == list(
        range(1, 79)
    )


def test_a_mark_covers_its_row(page):
    text = page(ROW, MARKED)
    assert "| 1 | It hung | It does not hang. | covered by:<br>`test_x.py::test_it` |" in text
    assert "| covered by tests that need no GPU | 1 |" in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def test_it", "@pytest.mark.gpu\ndef test_it"),
        ("\n@pytest.mark.pain", "pytestmark = pytest.mark.gpu\n@pytest.mark.pain"),
        ("\n@pytest", "pytestmark = [pytest.mark.timeout(9), pytest.mark.gpu]\n@pytest"),
    ],
)
def test_a_test_on_gpus_says_so(page, before, after):
    text = page(ROW, MARKED.replace(before, after))
    assert "`test_x.py::test_it` (on GPUs)" in text
    assert "| covered, in part or only by tests that need GPUs | 1 |" in text


def test_marks_of_classes_count_for_their_methods(page):
    code = MARKED.replace("def test_it():\n", "class TestAll:\n    def test_a(self):\n    ")
    assert "`test_x.py::TestAll::test_a`" in page(ROW, code)


def test_an_open_row_names_what_is_tested_of_it(page):
    text = page(f'{ROW}status = "open"\n{REASON}', MARKED)
    assert "open: there is none<br>What is tested of it:<br>`test_x.py::test_it`" in text
    assert "| open: something is missing | 1 |" in text


WRONG = [
    (ROW, PLAIN, "row 1: has neither a status nor a test with @pytest.mark.pain(1)"),
    (
        f'{ROW}status = "not applicable"\n{REASON}',
        MARKED,
        "row 1: is not applicable, and test_x.py::test_it covers it",
    ),
    (ROW, MARKED.replace("(1)", "(1, 2)"), "test_x.py::test_it: row 2 does not exist"),
    (ROW, MARKED.replace("(1)", "(0)"), "test_x.py::test_it: row 0 does not exist"),
    (ROW, MARKED.replace("(1)", "('1')"), "test_x.py::test_it: pain takes numbers of rows"),
    (ROW, MARKED.replace("(1)", "()"), "test_x.py::test_it: pain takes numbers of rows"),
    (ROW, MARKED.replace("(1)", ""), "test_x.py::test_it: pain takes numbers of rows"),
    (ROW, f"{MARKED}\npytestmark = pytest.mark.pain(1)\n", "test_x.py:7: pain does not decorate"),
    (ROW, MARKED.replace("test_it", "it"), "test_x.py:3: pain does not decorate a test"),
    (f'{ROW}status = "open"\n', MARKED, "row 1: status and reason go together"),
    (f"{ROW}{REASON}", MARKED, "row 1: status and reason go together"),
    (f'{ROW}status = "done"\n{REASON}', MARKED, "row 1: status 'done' must be"),
    (ROW.replace('"start"', '"end"'), MARKED, "row 1: area 'end' is not in [areas]"),
    (ROW.replace("It hung", ""), MARKED, "row 1: needs a title and a requirement"),
    (f'{ROW}note = "x"\n', MARKED, "row 1: unknown key note"),
    (ROW.replace("[1]", "[2]"), MARKED.replace("1", "2"), "numbered from 1 in order"),
]


@pytest.mark.parametrize(("rows", "code", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_contradictions_are_errors(script, page, monkeypatch, capsys, rows, code, text):
    with pytest.raises(script.Contradiction) as caught:
        page(rows, code)
    assert text in str(caught.value)

    def fail():
        raise caught.value

    monkeypatch.setattr(script, "text", fail)
    assert script.main() == 1
    assert text in capsys.readouterr().err
    assert not script.OUT.exists()
