"""Small hosts and interpreters for the tests of how the plugin gets in. No torch.

A host here is a package `jev` with the names the plugin relies on and a model that needs no weights, in the
flavours `pinned`, `later` (its own `--backend`; `later-everywhere`: also of `jev.predict`) and `changed`
(`load_predictor` as no version has it).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]

MODEL = """
import json
from pathlib import Path

class DecisionModel:
    def __init__(self, model_id, revision, device="cuda:0", lora_rank=8, max_length=384):
        self.model_id, self.revision, self.max_length = model_id, revision, max_length
        self.last_input_tokens, self.training = 0, False

    def __call__(self, records):
        return self.forward(records)

    def forward(self, records):
        self.last_input_tokens = 10 * len(records)
        return [[0.0, float(len(record))] for record in records]

    def score_cached(self, records, *, batch_size=32):
        raise RuntimeError("the original score_cached")

    @classmethod
    def load(cls, output, device="cuda:0"):
        config = json.loads((Path(output) / "model.json").read_text())
        return cls(config["model_id"], config["revision"], device=device, max_length=config["max_length"])
"""

SERVING = """
CHOICES = ["torch", "triton-tail", "fast-cuda"]

class Scorer:
    def __init__(self, model):
        self.model = model

    def score(self, records):
        return self.model(records), self.model.last_input_tokens

    def score_request(self, records, *, batch_size):
        return self.model.score_cached(records, batch_size=batch_size)

class Predictor:
    def __init__(self, scorer, batch_size, prefix_cache, provenance):
        self.scorer, self.batch_size, self.max_candidates = scorer, batch_size, 65536
        self.prefix_cache, self.provenance = prefix_cache, provenance
        self.model_name, self.method = scorer.model.model_id, "host"

    def predict(self, request):
        records, rows, tokens, cache = request["records"], [], 0, {"enabled": False}
        if self.prefix_cache:
            rows, cache = self.scorer.score_request(records, batch_size=self.batch_size)
            tokens = cache["logical_input_tokens"]
        else:
            for start in range(0, len(records), self.batch_size):
                some, count = self.scorer.score(records[start:start + self.batch_size])
                rows, tokens = rows + some, tokens + count
        return {"answers": rows, "usage": {"input_tokens": tokens},
                "metadata": {"prefix_cache": cache, **self.provenance}}

def load_predictor(SIGNATURE):
    from .model import DecisionModel
    if checkpoint:
        model = DecisionModel.load(checkpoint, device=device)
    else:
        model = DecisionModel(model_id, revision, device=device, lora_rank=0)
    provenance = {"loaded_by": type(model.forward).__name__ + ":" + model.forward.__name__}
    PROVENANCE
    return Predictor(Scorer(model), batch_size, prefix_cache, provenance)
"""

PINNED = (
    '*, checkpoint=None, model_id=None, revision=None, device="cuda:0", max_length=None, batch_size=32, '
    "prefix_cache=False"
)
SIGNATURES = {
    "pinned": PINNED,
    "later": PINNED + ', backend="torch", fused_final_head=True',
    "changed": PINNED.removeprefix("*, ").replace("max_length=None, ", ""),
}

SERVER = '''
"""A host for tests."""
import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .serving import load_predictor

def make_server(predictor, host="127.0.0.1", port=8791, *, static_root=None, max_body_bytes=2**22):
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def send(self, status, data):
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path == "/v1/models":
                return self.send(200, {"models": [{"name": predictor.model_name}]})
            if self.path != "/health":
                return self.send(404, {"error": "not found"})
            self.send(200, {"status": "ready", "model": predictor.model_name, "method": predictor.method})

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                self.send(200, predictor.predict(request))

    return ThreadingHTTPServer((host, port), Handler)

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--checkpoint")
    group.add_argument("--model", dest="model_id")
    parser.add_argument("--revision")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8791)
    FLAG
    args = vars(parser.parse_args())
    host, port = args.pop("host"), args.pop("port")
    predictor = load_predictor(**args)
    server = make_server(predictor, host, port)
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}), flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()

if __name__ == "__main__":
    main()
'''

LATER_FLAG = (
    'parser.add_argument("--backend", choices=("torch", "triton-tail", "fast-cuda"), default="torch")'
)

PREDICT = """
import argparse
import json

from .model import DecisionModel

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    FLAG
    args = parser.parse_args()
    model = DecisionModel.load(args.checkpoint)
    rows = model([{"id": "a"}, {"id": "b"}])
    backend = getattr(args, "backend", None)
    print(json.dumps({"rows": rows, "stats": getattr(model, "last_stats", None), "backend": backend}))

if __name__ == "__main__":
    main()
"""


def write_host(folder: Path, flavour: str = "pinned") -> Path:
    """The folder for PYTHONPATH."""
    package = folder / "jev"
    package.mkdir(parents=True)
    later = flavour.startswith("later")
    serving = SERVING.replace("SIGNATURE", SIGNATURES["later" if later else flavour]).replace(
        "PROVENANCE",
        'provenance["host_backend"] = CHOICES[CHOICES.index(backend)]' if later else "pass",
    )
    server = SERVER.replace("FLAG", LATER_FLAG if later else "pass")
    predict = PREDICT.replace("FLAG", LATER_FLAG if flavour == "later-everywhere" else "pass")
    texts = {"__init__": "", "model": MODEL, "serving": serving, "server": server, "predict": predict}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    return folder


def write_checkpoint(folder: Path, backend: object = None) -> Path:
    folder.mkdir(parents=True)
    config = {"model_id": "toy", "revision": "r", "max_length": 384, "lora_rank": 8}
    if backend is not None:
        config["backend"] = backend
    (folder / "model.json").write_text(json.dumps(config))
    return folder


def pip(interpreter: Path, *arguments: object, folder: Path | None = None) -> None:
    """This interpreter's pip, working on another one's environment."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        interpreter,
        *arguments,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr


def make_python(folder: Path, plugin: bool = True) -> Path:
    """A virtual environment's interpreter that sees this one's packages, with or without the plugin.

    The plugin is laid out there as its wheel would be. Startup files of this interpreter do not run in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "aaa_packages_of_the_tests.pth").write_text("\n".join(SITE_PACKAGES) + "\n")
    if plugin:
        lay_out_plugin(site)
    return folder / "bin" / "python"


def lay_out_plugin(site: Path) -> None:
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "openjev_fast_plugin", site / "openjev_fast_plugin", ignore=no_caches)
    for mapped in ("csrc", "patches"):
        shutil.copytree(ROOT / mapped, site / "openjev_fast_plugin" / mapped, ignore=no_caches)
    for name in ("openjev_fast_plugin.pth", "openjev_fast_plugin.start"):
        shutil.copy(ROOT / name, site)


def add_backend(site: Path, *names: str) -> None:
    """The third-party backend of tests/third_party_backend, as its wheel would be laid out."""
    source = ROOT / "tests" / "third_party_backend" / "openjev_one_by_one.py"
    shutil.copy(source, site)
    info = site / "openjev_one_by_one-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: openjev-one-by-one\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[openjev_fast]\none_by_one = openjev_one_by_one\n")


def site_of(python: Path) -> Path:
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    return site


def environment(*path: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENJEV_", "PYTHON"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "100", **variables}


def run(
    python: Path, *arguments: object, path: tuple[Path, ...] = (), **variables: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, *map(str, arguments)],
        env=environment(*path, **variables),
        # Not the checkout, whose folders are not the package.
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


@contextlib.contextmanager
def serving(
    python: Path, *arguments: object, path: tuple[Path, ...] = (), seconds: float = 60, **variables: str
) -> Iterator[str]:
    """A server process, given by the URL it prints; stopped as a user would stop it."""
    process = subprocess.Popen(
        [python, *map(str, arguments)],
        env=environment(*path, **variables),
        # Not the checkout, whose folders are not the package.
        cwd=python.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        if not line:
            raise AssertionError(f"the server did not start: {process.communicate(timeout=seconds)[1]}")
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        process.communicate(timeout=seconds)


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def post(url: str, content: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
