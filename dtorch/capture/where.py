"""Which line of the model's code is running: for messages, and for every node of a captured graph.

In: the Python stack. Out: `"file:line in function: source text"` and the qualified name of the running module.
"""

from __future__ import annotations

import linecache
import os
import sys
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from dtorch import torch_private

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@lru_cache(maxsize=65536)
def _is_users(code: CodeType) -> bool:
    name = code.co_filename
    return not (name.startswith((_TORCH, _OURS)) or name.startswith("<frozen"))


@lru_cache(maxsize=65536)
def _describe(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": {text.rstrip(':')}" if text else "")


def here(modules: dict[int, str]) -> tuple[str, str]:
    """The innermost line outside torch and dtorch, and the path in `modules` (by id) of the innermost running
    module.
    """
    frame: Any = sys._getframe(1)
    path: str | None = None
    while frame is not None:
        code = frame.f_code
        if path is None and code is torch_private.MODULE_CALL_CODE:
            path = modules.get(id(frame.f_locals["self"]))
        if _is_users(code):
            where = _describe(code, frame.f_lineno)
            break
        frame = frame.f_back
    else:
        return "", path or ""
    while path is None and frame is not None:
        if frame.f_code is torch_private.MODULE_CALL_CODE:
            path = modules.get(id(frame.f_locals["self"]), "")
        frame = frame.f_back
    return where, path or ""
