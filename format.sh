#!/usr/bin/env bash
# Formats Python by ruff and C++ by clang-format; fails on lint (ruff, .ci/lint.py), on types (mypy; basedpyright for what
# users write), on a PyTorch include in csrc/, and on pages that disagree with the tree (.ci/docs.py).
#   ./format.sh            rewrite files
#   ./format.sh --check    change nothing, fail when a file would change
#   ./format.sh --tools    print what to pip install for this
# PYTHON names the interpreter whose environment has the tools (default .venv/bin/python); `make format` installs them.
set -euo pipefail
cd "$(dirname "$0")"

# All change their style or rules between minor versions; a compatible release keeps clean files clean.
# basedpyright is pyright with its Node.js in the wheel: the package pyright downloads one when it first runs.
tools=('ruff~=0.17.0' 'clang-format~=23.1.0' 'mypy~=2.4.0' 'basedpyright~=1.40.0')
python=${PYTHON:-.venv/bin/python}
mode=${1:-write}

case $mode in
--tools) echo "${tools[@]}" && exit ;;
--check) ruff_format=(format --diff) ruff_check=(check --output-format concise) ;;
write) ruff_format=(format) ruff_check=(check --fix --output-format concise) ;;
*) sed -n '2,7s/^# //p' "$0" && exit 2 ;;
esac

bin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
for tool in ruff clang-format mypy basedpyright; do
    [ -x "$bin/$tool" ] || { echo "no $tool in $bin: $python -m pip install ${tools[*]}" && exit 1; }
done

failed=0
"$bin/ruff" "${ruff_check[@]}" . || failed=1
"$bin/ruff" "${ruff_format[@]}" . || failed=1
"$python" .ci/lint.py ep_dispatcher || failed=1
"$python" .ci/docs.py || failed=1
"$python" -m mypy --no-error-summary || failed=1  # with the types of the PyTorch there
"$bin/basedpyright" --pythonpath "$python" --level error || failed=1
mapfile -t sources < <(find csrc tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sort)
if [ ${#sources[@]} -gt 0 ]; then
    if [ "$mode" = write ]; then
        "$bin/clang-format" -i "${sources[@]}" || failed=1
    else
        for source in "${sources[@]}"; do
            "$bin/clang-format" "$source" | diff -u --label "$source" --label formatted "$source" - || failed=1
        done
    fi
    # csrc takes raw pointers, so that one build serves every PyTorch and needs none.
    if grep -nE '#\s*include\s*[<"](torch|ATen|c10)/' "${sources[@]}"; then
        echo 'csrc/ must not include PyTorch' && failed=1
    fi
fi
exit $failed
