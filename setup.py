"""Finds the packages, and compiles the operators with a digest of their sources; see also pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
KERNELS = ROOT / "kernels"
NAME = "seq2seq_serve"
# The folders of the root are installed as parts of the package.
PARTS = find_packages(ROOT, exclude=[f"{NAME}*", "benchmarks*"])
spec = importlib.util.spec_from_file_location("sources", KERNELS / "sources.py")
assert spec is not None
assert spec.loader is not None
sources = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sources)


class BuildWithDigest(build_ext):
    """Defines SOURCES_DIGEST for every extension, and compiles each anew if any source has changed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        for extension in self.extensions:
            extension.define_macros = [("SOURCES_DIGEST", f'"{sources.digest_of_sources(KERNELS)}"')]
            extension.depends = [f"kernels/{path.name}" for path in sources.source_files(KERNELS)]


setup(
    packages=[NAME, *(f"{NAME}.{part}" for part in PARTS)],
    package_dir={f"{NAME}.{part}": part for part in PARTS if "." not in part},
    cmdclass={"build_ext": BuildWithDigest},
)
