#!/usr/bin/env bash
# Run the tests of the Megatron integration with another version of megatron-core. CI does not: PyTorch takes gigabytes.
#
#   tests/megatron_versions.sh VERSION [PYTHON [arguments of pytest]]
#
# VERSION  as in 0.19.2, or a folder with a checkout of Megatron-LM, which need not be installed
# PYTHON   that of a virtual environment, which gets what it lacks; of another Python, one is made in build/.
#          Default python3.12: Megatron 0.17 and newer want it
#
# Of tests/test_megatron_*.py, unless arguments name other tests; without arguments a case of each path, as `make test`.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/ s/^# \?//p' "$0"; exit 2; }
version=$1 python=${2:-python3.12}
shift $(($# < 2 ? $# : 2))
megatron="megatron-core==$version" checkout=
if [ -d "$version" ]; then
    checkout=$(cd "$version" && pwd)
    [ -d "$checkout/megatron/core" ] || { echo "VERSION: given $version, allowed: a folder with megatron/core"; exit 1; }
    megatron=
fi
command -v "$python" > /dev/null || { echo "PYTHON: given $python, allowed: an interpreter that exists"; exit 1; }
python=$(command -v "$python")
case $python in /*) ;; *) python=$PWD/$python ;; esac
cd "$(dirname "$0")/.."

if ! "$python" -c 'import sys; assert sys.prefix != sys.base_prefix' 2> /dev/null; then
    venv=build/megatron-$(basename "${checkout:-$version}")
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    python=$PWD/$venv/bin/python
fi
pip=("$python" -m pip install -q --disable-pip-version-check)
# shellcheck disable=SC2086  # no Megatron from the index beside a checkout
"${pip[@]}" torch numpy packaging pytest hypothesis 'setuptools>=77' 'pybind11>=2.12' wheel $megatron
EP_DISPATCHER_CUDA=0 "${pip[@]}" --no-build-isolation --no-deps -e .

export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
"$python" -W ignore -c 'import sys, megatron.core as m, torch
print("Python", sys.version.split()[0], "PyTorch", torch.__version__, "megatron-core", m.__version__, *m.__path__)'
[ $# -gt 0 ] || set -- -m 'not exhaustive'
case " $*" in *' tests/'*) ;; *) set -- "$@" tests/test_megatron_*.py ;; esac
exec "$python" -m pytest -q "$@"
