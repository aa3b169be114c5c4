"""What kernels say, as lines of an execution's stream. Fields that have no value are left out."""

import datetime
from typing import Any, Dict, Optional

FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}


def error(name: str, value: str, traceback: str = "") -> Dict[str, Any]:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def result(data: Dict[str, Any], is_main: bool) -> Dict[str, Any]:
    line: Dict[str, Any] = {"type": "result", "is_main_result": is_main}
    for kind, value in data.items():
        if isinstance(value, list) and kind != "application/json":
            value = "".join(value)
        if kind == "text/plain":
            value = unquoted(value)
        if kind in FIELDS:
            line[FIELDS[kind]] = value
        else:
            line.setdefault("extra", {})[kind] = value
    return line


def unquoted(text: str) -> str:
    """Without the quotes that Python puts around a string's representation."""
    is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text


def line_of(message: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """The line for a kernel's message, if there is one."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        timestamp = datetime.datetime.now(datetime.timezone.utc).isoformat()
        return {"type": content["name"], "text": content["text"], "timestamp": timestamp}
    if kind in ("display_data", "execute_result"):
        return result(content["data"], kind == "execute_result")
    if kind == "error":
        return error(content["ename"], content["evalue"], "\n".join(content["traceback"]))
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None
