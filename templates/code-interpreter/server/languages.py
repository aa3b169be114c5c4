"""The languages that contexts have: which kernel runs them, and how they are told their environment."""

import json
import shlex
from typing import Dict, Optional

# Kernel specifications by language; the kernels themselves are in ../kernels or from PyPI. To Jupyter, `python` alone is
# whatever runs it.
KERNELS = {language: f"code-{language}" for language in ("python", "javascript", "typescript", "bash")}

ALIASES = {"": "python", "js": "javascript", "ts": "typescript"}


def normalized(language: Optional[str]) -> str:
    """The name under which a language is known here, whatever the caller calls it."""
    name = (language or "").strip().lower()
    return ALIASES.get(name, name)


def environment_code(language: str, variables: Dict[str, Optional[str]]) -> str:
    """Code that sets variables, and takes away those that are None."""
    if language == "python":
        # A call, so that no name of ours is left behind.
        return f"(lambda e, v: [e.pop(k, None) if x is None else e.update({{k: x}}) for k, x in v.items()])" \
               f"(__import__('os').environ, {variables!r}) and None"
    if language in ("javascript", "typescript"):
        lines = [
            f"delete process.env[{json.dumps(name)}]" if value is None else f"process.env[{json.dumps(name)}] = {json.dumps(value)}"
            for name, value in variables.items()
        ]
        return "; ".join([*lines, "void 0"])
    lines = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in variables.items()
        # Others cannot be named in a shell.
        if name.isidentifier()
    ]
    return "\n".join(lines)


# Sandboxes of a template go on from one and the same memory: what was drawn from it would be the same in all of them.
FRESH_RANDOMNESS = {
    "python": "__import__('random').seed();"
    "'numpy' in __import__('sys').modules and __import__('numpy').random.seed()",
    "bash": "RANDOM=$(od -An -N2 -tu2 /dev/urandom)",
}

# Done before the machine is captured, so that nobody waits for it afterwards.
WARM_UP = {
    "python": "for _name in ('numpy', 'pandas', 'matplotlib.pyplot', 'e2b_charts', 'PIL.Image'): __import__(_name)\n"
    "del _name",
}
