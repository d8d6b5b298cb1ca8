"""Runs Python code in a fork of a process that has already imported torch, in milliseconds instead of seconds.

A server imports torch and torch._dynamo, which PyTorch's optimizers also import, and forks for each call of `python`.
The environment variables that torch and its libraries read at import therefore have the values with which the server
started. The server does not import the package. Tests of how Python or torch starts, or of imports, must use a real
interpreter.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from typing import NoReturn

LOCK = threading.Lock()


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    atexit.register(server.stdin.close)  # ends the server
    return server


def python(
    *words: object, cwd: str | Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` in a fork of the server. WORDS are `-c CODE`, `-m MODULE` or a file, and then arguments."""
    command = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder, LOCK:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"words": command, "cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ)}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request | {"out": str(out), "err": str(err)}) + "\n")
        server.stdin.flush()
        returned = int(server.stdout.readline())
        return subprocess.CompletedProcess([sys.executable, *command], returned, out.read_text(), err.read_text())


def _become(request: dict) -> None:
    """Runs the requested command in this process as the interpreter would, with the standard streams redirected."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for stream, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
    sys.orig_argv = [sys.executable, *request["words"]]
    first, *rest = request["words"]
    importlib.invalidate_caches()
    if first == "-c":
        sys.path[0], sys.argv = "", [first, *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.path[0], sys.argv = request["cwd"], [first, *rest[1:]]  # runpy replaces sys.argv[0] by the module's path
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(first), [first, *rest]
        runpy.run_path(first, run_name="__main__")


def _end(request: dict) -> NoReturn:
    """Runs the requested command and exits as the interpreter would, but without the slow destruction of modules."""
    returned = 0
    try:
        _become(request)
    except SystemExit as stop:
        returned = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        returned = 1
    # The interpreter, too, waits for threads before it calls the functions of atexit. mypy does not know _shutdown.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(returned)


def _serve() -> None:
    import torch._dynamo  # noqa: F401  # every fork inherits this import

    gc.freeze()  # otherwise a fork's garbage collector would visit all objects of torch, and so copy their pages
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _end(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)  # skips the cleanup, in which Triton's binding would report the frozen objects as "leaked"


if __name__ == "__main__":
    _serve()
