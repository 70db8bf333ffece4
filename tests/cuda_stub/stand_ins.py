"""Writes stand-ins for the functions of CUDA's libraries that an onnxruntime-gpu wheel needs.

Every function gets a weak definition; one of the same name in `libraries/` replaces it. A stand-in that would
have to compute logs an error and fails, hence a test notices a graph that needs more of the stub.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

RUNTIME = "libcudart.so.13"  # `libraries/` follows its ABI
_CUDNN = "libcudnn.so.9"  # the wheel opens it at run time
_HEAD = """#include "stub.h"
#include <cstdlib>
#define WEAK extern "C" __attribute__((weak))
"""
_SETS_UP = re.compile("Set|Get|Destroy|Derive|Find|Init|Finalize|Config")


@dataclass(frozen=True)
class Library:
    """A library that the CUDA provider links to, or opens.

    Attributes:
        soname: The file name under which the provider asks for it.
        functions: Names of all functions that the provider needs of it.
    """

    soname: str
    functions: frozenset[str]

    @property
    def name(self) -> str:
        """The short name, for example `cudart`; its source in `libraries/` has the same."""
        return self.soname.removeprefix("lib").split(".so.")[0]

    @property
    def source(self) -> str:
        """C++ with a stand-in for every function."""
        return _HEAD + "".join(f"{_stand_in(name)}\n" for name in sorted(self.functions))

    @property
    def version_script(self) -> str:
        """The linker's input that gives every symbol the version that the provider asks for."""
        return f"{self.soname} {{ global: *; }};\n"


def libraries_of(provider: Path) -> list[Library]:
    """Read the libraries that a wheel's CUDA provider needs, the runtime first.

    Raises:
        ValueError: The provider is for another major version of CUDA.
    """
    sonames = re.findall(r"\[(libcu\w+\.so\.\d+)\]", _readelf("--dynamic", provider))
    if RUNTIME not in sonames:
        raise ValueError(f"the stub stands in for {RUNTIME}, and this wheel links to {', '.join(sonames)}")
    functions: dict[str, set[str]] = {soname: set() for soname in sorted(sonames, key=lambda s: s != RUNTIME)}
    for name, soname in re.findall(r" UND (\w+)@(libcu\S+)", _readelf("--dyn-syms", provider)):
        functions[soname].add(name)
    # The provider looks its functions of cuDNN up by name, and the names are among its strings.
    names = re.findall(rb"\0(cudnn[A-Z]\w*)(?=\0)", provider.read_bytes())
    functions[_CUDNN] = {name.decode() for name in names}
    return [Library(soname, frozenset(names)) for soname, names in functions.items()]


def _readelf(option: str, library: Path) -> str:
    command = ["readelf", "-W", option, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _stand_in(name: str) -> str:
    if name.startswith(("cuda", "__cuda")):
        return _failing(name, 801)  # cudaErrorNotSupported
    if "Create" in name:
        return f"WEAK int {name}(void** made) {{ *made = calloc(1, 512); return 0; }}"
    if _SETS_UP.search(name):
        return f"WEAK int {name}() {{ return 0; }}"
    return _failing(name, 15)  # CUBLAS_STATUS_NOT_SUPPORTED


def _failing(name: str, error: int) -> str:
    text = f"ERROR {error} in {name} (not in the stub)"
    return f'WEAK int {name}() {{ cuda_stub_log("{text}"); return {error}; }}'
