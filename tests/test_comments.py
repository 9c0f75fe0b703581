"""The check of the English in csrc's comments: it reads comments alone, counts right, and fails above its limits."""

import runpy
import subprocess
import sys

import pytest
from commands import ROOT

SCRIPT = ROOT / ".ci" / "comments.py"
CHECK = runpy.run_path(str(SCRIPT))
comments_of, figures_of = CHECK["comments_of"], CHECK["figures_of"]

COUNTED = """\
// Return the row that a token goes to.
// Wait for nobody; a second short sentence.
int row_of(int token);

struct Ring {
  int size;   // bytes, known to whoever asks
  int parity; /* of the round
               * that runs */
  void drain();  // Until all loads have landed.
};
"""  # 15 + 5 + 5 + 5 words; "that", "whoever", "that"; two functions, one opens with "Until"

PLAIN = "// Return the first row of an expert.\nint first_row(int expert);\n"
CLAUSE = "// [warp] Whether all rows fit.\nbool rows_fit(int num_rows);\n"
PRONOUNS = "// Store a flag which a rank reads that waits.\nvoid store(int flag);\n"


def texts(source: str) -> list[str]:
    return [comment.text for comment in comments_of(source)]


def check(folder) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True)


def test_a_text_counted_by_hand():
    comments = comments_of(COUNTED)
    assert [comment.line for comment in comments] == [1, 6, 7, 9]
    assert [comment.num_words() for comment in comments] == [15, 5, 5, 5]
    assert [comment.num_pronouns() for comment in comments] == [1, 1, 1, 0]
    assert [comment.of_function for comment in comments] == [True, False, False, True]
    assert figures_of(comments)[:4] == (10.0, 50.0, 30, 2)


def test_strings_numbers_and_code_are_no_comments():
    source = """\
const char* path = "http://host/which/that";  // the path of a file
const char quote = '"';  // a quote, not a string
const int that = 1'000'000;  // a number with marks
const char* raw = R"(// what is this)";
"""
    assert texts(source) == ["the path of a file", "a quote, not a string", "a number with marks"]


def test_comments_of_fewer_than_three_words_do_not_count():
    assert texts("int size;  // bytes\n}  // namespace ep\nint end;  // the last byte\n") == ["the last byte"]


def test_lines_in_one_column_are_one_comment():
    source = "// one two three\n// four\n\n// five six seven\nint a;  // eight nine ten\n// eleven twelve more\n"
    assert texts(source) == ["one two three four", "five six seven", "eight nine ten", "eleven twelve more"]


@pytest.mark.parametrize(
    "code, of_function",
    [
        ("int f(int x);", True),
        ("template <class T, class = std::enable_if_t<(sizeof(T) > 4)>>\n__device__ T* f(T* x) {\n}", True),
        ("explicit S(int x) : x_(x) {}", True),
        ("struct alignas(64) Flag {\n};", False),
        ("static_assert(sizeof(int) == 4);", False),
        ("int x = f(1);", False),
        ("using F = void (*)(int);", False),
    ],
)
def test_a_function_is_told_from_other_code(code, of_function):
    assert comments_of(f"namespace ep {{\n// one two three\n{code}\n}}\n")[0].of_function == of_function


def test_a_label_inside_a_body_is_of_no_function():
    source = "void f() {\n  // Until all rows\n  g(1);\n  struct Local {\n    // Of this one\n    void h();\n  };\n}\n"
    assert [comment.of_function for comment in comments_of(source)] == [False, False]


@pytest.mark.parametrize("bad, said", [(CLAUSE, "100.0 % of 1 function"), (PRONOUNS, "22.22 relative pronouns")])
def test_a_bad_comment_fails_and_is_shown(tmp_path, bad, said):
    (tmp_path / "good.h").write_text(PLAIN)
    assert check(tmp_path).returncode == 0
    (tmp_path / "good.h").unlink()
    (tmp_path / "bad.cuh").write_text(bad)
    result = check(tmp_path)
    assert result.returncode == 1 and said in result.stdout
    assert "bad.cuh" in result.stdout and "line 1: " + texts(bad)[0] in result.stdout


def test_the_limits_hold_for_the_sum_of_all_files(tmp_path):
    (tmp_path / "bad.cu").write_text(PRONOUNS)  # 9 words
    (tmp_path / "good.cpp").write_text(PLAIN * 30)  # 7 words each: 2 of 219 is below 1.2 in 100
    assert check(tmp_path).returncode == 0


def test_a_folder_is_needed(tmp_path):
    assert check(tmp_path / "missing").returncode == 2


def test_csrc_keeps_the_limits():
    result = check(ROOT / "csrc")
    assert result.returncode == 0, result.stdout
