"""How large is it? Lines of code (no blanks, comments, docstrings), files, options: python bench/size.py"""

import ast
import io
import re
import subprocess
import sys
from pathlib import Path
from tokenize import tok_name, tokenize

ROOT = Path(__file__).resolve().parents[1]
MODULES = "config|task|files|errors|model_folder"
CORE = f"train_grpo|train_sft|evaluate|mtsql/({MODULES}|(data|sql|agent|recipes|learn|report)/.*)"
SKIP = "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER ENCODING".split()
LOADED = "import sys, train_grpo, mtsql.recipes.mtsql_r1; print(*map(str, sys.modules.values()), sep='\\n')"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> int:
    """Lines of a Python file that hold more than layout, comments and docstrings."""
    read = tokenize(io.BytesIO(path.read_bytes()).readline)
    nodes = [n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, DOCUMENTED)]
    texts = [n.body[0] for n in nodes if ast.get_docstring(n) is not None]
    lines = {i for t in read if tok_name[t.type] not in SKIP for i in range(t.start[0], t.end[0] + 1)}
    return len(lines.difference(*(range(text.lineno, text.end_lineno + 1) for text in texts)))


def most_parameters(path: Path) -> int:
    """Of any function in it."""
    given = [n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, ast.arguments)]
    return max((len([*n.posonlyargs, *n.args, *n.kwonlyargs]) for n in given), default=0)


def said(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print the table."""
    files = {name: code_lines(ROOT / name) for name in said("git", "ls-files", "*.py").split()}
    code = {name: size for name, size in files.items() if not name.startswith(("tests/", "bench/"))}
    loaded = code.keys() & re.findall(f"from '{ROOT}/(.*)'>", said(sys.executable, "-c", LOADED))
    helps = [said(sys.executable, f"train_{name}.py", "--help") for name in ("grpo", "sft")]
    print("| lines of code, or number |  |\n|---|---|\n| all but tests and bench |", sum(code.values()), "|")
    print("| the core |", sum(code[name] for name in code if re.fullmatch(rf"({CORE})\.py", name)), "|")
    print("| train_grpo.py imports |", sum(code[name] for name in loaded), "in", len(loaded), "files |")
    print("| files of mtsql/ |", sum(name.startswith("mtsql/") for name in code), "|")
    print("| options of GRPO, SFT |", *(text.split("options:")[1].count("\n  --") - 1 for text in helps), "|")
    print("| most parameters |", *max((most_parameters(ROOT / name), name) for name in code), "|")
    print("| longest file |", *max((size, name) for name, size in code.items()), "|")
    both = (sum(files[name] for name in files if name.startswith(part)) for part in ("tests/", "bench/"))
    print("| tests, bench |", *both, "|")


if __name__ == "__main__":
    main()
