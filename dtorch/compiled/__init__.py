"""What `dtorch.compile` returns, and its parts: calls and their guards, programs, the weights it owns."""

from dtorch.compiled.module import Build, CompiledModule

__all__ = ["Build", "CompiledModule"]
