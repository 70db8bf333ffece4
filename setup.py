"""Compiles the operators with the digest of their sources; everything else is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path(__file__).parent / "kernels"
spec = importlib.util.spec_from_file_location("sources", KERNELS / "sources.py")
assert spec is not None
assert spec.loader is not None
sources = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sources)


class BuildWithDigest(build_ext):
    """Defines SOURCES_DIGEST for every extension."""

    def build_extension(self, ext: Extension) -> None:
        ext.define_macros.append(("SOURCES_DIGEST", f'"{sources.digest_of_sources(KERNELS)}"'))
        super().build_extension(ext)


setup(cmdclass={"build_ext": BuildWithDigest})
