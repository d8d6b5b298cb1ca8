"""Times every op's forward and backward beside eager PyTorch, torch.compile, other libraries and a copy of memory.

The ops and their inputs come from the tests' specs, so that a new op is measured without further code. An op's floor is
the bytes of every input, read once, and of every output, written once. A figure is the floor divided by the time, in
percent of the copy's bandwidth. Streaming stores, and ops that write less than they read, can exceed 100.
"""

import argparse
import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import norm_plans, peers, results
from benchmarks.judging import Judge
from benchmarks.table import figures, heading
from benchmarks.timing import BenchmarkParser, Call, judged_seconds, seconds_of, take_turns
from extension_cpp.__main__ import positive
from extension_cpp.command import info
from extension_cpp.command.demo_table import keep_memory
from tests.opspec import OpSpec, Sample, timed_specs

WIDTHS = (768, 1024, 4096, 8192, 16384, 65536, 1025)
SMALL = ((32, 512), (128, 1024), (512, 2048), (2048, 4096))
# The dtypes of x and of the weights, by the names of --dtype. The weights are the inputs of one dimension.
DTYPES = {name: (getattr(torch, name),) * 2 for name in ("float32", "bfloat16", "float16")}
DTYPES |= {f"{name}+float32": (getattr(torch, name), torch.float32) for name in ("bfloat16", "float16")}
SLOW = 100  # a call slower than 100 copies is timed once, and not in every round


@dataclass(frozen=True)
class Case:
    spec: OpSpec
    dtype: str
    rows: int
    cols: int
    step: str  # forward or backward
    threads: int | None  # number of CPU threads; None on a GPU
    sizes: str

    def eager(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of PyTorch as users call it. For half inputs with float32 weights, which PyTorch's
        layer_norm does not take on a GPU, it runs in float32."""
        return peers.in_float32(function) if "+" in self.dtype and self.threads is None else function

    def floor_bytes(self) -> float:
        return getattr(self.spec.bench, self.step) * self.rows * self.cols * DTYPES[self.dtype][0].itemsize

    def copied_bytes(self) -> float:
        """Returns the bytes that the copy reads and writes: those of one large tensor, or for other sizes the floor."""
        one = 2 * self.rows * self.cols * DTYPES[self.dtype][0].itemsize
        return one if self.sizes == "large" else self.floor_bytes()

    def head(self) -> results.Row:
        """Returns the entries of a row that say what is measured, without its figures."""
        row = {"op": self.spec.name, "pass": self.step, "dtype": self.dtype, "rows": self.rows, "cols": self.cols}
        return row | ({} if self.threads is None else {"threads": self.threads}) | {"sizes": self.sizes}

    def __str__(self) -> str:
        return f"{self.spec.name} {self.step} {self.dtype} {self.rows} x {self.cols}"


def op_at(names: Sequence[str], text: str) -> tuple[str, int | None]:
    """Parses OP or OP:WIDTH. Returns the op, and the only width at which it is timed, or None for all widths."""
    name, _, width = text.partition(":")
    if name not in names:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r}")
    return name, positive(width) if width else None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = BenchmarkParser("benchmarks", (__doc__ or "").split("\n\n")[0], "out/bench-DEVICE.json", 15)
    parser.epilog = (
        "A --json file that is there is continued. python -m benchmarks compare and plot look at the results; "
        "host times what a call costs, processes several GPUs, python -m benchmarks.models whole models. "
        "Each has a --help."
    )
    names, dtypes = [spec.name for spec in timed_specs()], list(DTYPES)
    several = functools.partial(parser.add_argument, nargs="+")
    every = [(name, None) for name in names]
    told = f"of {', '.join(names)}; OP:WIDTH at this width alone"
    several("--op", type=functools.partial(op_at, names), default=every, metavar="OP", help=told)
    told = f"of {', '.join(dtypes)}; behind the + that of a norm's weights (default: float32 bfloat16)"
    several("--dtype", choices=dtypes, default=["float32", "bfloat16"], metavar="DTYPE", help=told)
    widths, steps = list(WIDTHS), ["forward", "backward"]
    several("--width", type=positive, default=widths, help=f"columns (default: {widths})")
    several("--pass", dest="passes", choices=steps, default=steps)
    parser.add_argument("--mib", type=positive, help="size of one tensor in MiB (default: 512)", default=512)
    told = "large: tensors of --mib at each width; small: 32 x 512 to 2048 x 4096 (default: large)"
    several("--sizes", choices=["large", "small"], default=["large"], help=told)
    parser.add_argument("--threads", type=positive, help="CPU threads (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes most of the time)")
    parser.add_argument("--plain-malloc", action="store_true", help="CPU: with the page faults of glibc's defaults")
    told = "GPU: the norms alone, with each kernel of csrc/rows/plan.h"
    parser.add_argument("--plans", action="store_true", help=told)
    parser.add_argument("--again", action="store_true", help="measure anew what the results file has already")
    options = parser.parse(arguments)
    if options.threads and options.device == "cuda":
        parser.error("argument --threads: of the CPU, and the device is cuda")
    if options.plans and options.device == "cpu":
        parser.error("argument --plans: of a GPU's kernels, and the device is cpu")
    options.threads = options.threads or torch.get_num_threads()
    return options


def cases(options: argparse.Namespace) -> Iterator[Case]:
    threads = options.threads if options.device == "cpu" else None
    for spec in timed_specs():
        if spec.name not in dict(options.op) or (options.plans and spec.name not in info.NORMS):
            continue
        given = [width for name, width in options.op if name == spec.name and width is not None]
        widths = given or ([1024] if spec.bench.flat else options.width)
        for dtype in options.dtype:
            if "+" in dtype and not spec.float_weights:
                continue
            largest = options.mib * 2**20 // DTYPES[dtype][0].itemsize
            shapes = [("large", max(largest // cols, 1), cols) for cols in widths]
            shapes += [("small", rows, cols) for rows, cols in SMALL]
            for (sizes, rows, cols), step in itertools.product(shapes, options.passes):
                if sizes in options.sizes and getattr(spec.bench, step):
                    yield Case(spec, dtype, rows, cols, step, threads, sizes)


def make_sample(case: Case, device: str) -> Sample:
    def make(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPES[case.dtype][len(shape) == 1], device=device, requires_grad=True)

    return case.spec.bench.sample(make, (case.rows, case.cols))


def contenders(case: Case, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    stock = case.eager(case.spec.bench.stock or case.spec.reference)
    functions = {"ours": case.spec.function, "eager": stock}
    torch._dynamo.reset()  # otherwise code compiled for other shapes would become dynamic
    is_loop = case.spec.by_hand is not None and case.spec.bench.stock is None  # torch.compile would unroll the loop
    if not options.no_compile and not is_loop:
        functions["compile"] = torch.compile(stock, dynamic=False)  # compiles the timed shape alone
    versions, known = peers.versions(options.device), dict(peers.PEERS.get(case.spec.name, {}))
    if case.step == "backward":
        known.pop("c_loop", None)  # which has no gradients
    return functions | {name: peer for name, peer in known.items() if versions.get(name) is not None}


def prepare(case: Case, options: argparse.Namespace) -> tuple[dict[str, Call], Judge]:
    """Returns the calls to time, with the copy first, and their judge, which has the errors of contenders left out.

    Contenders that draw their own masks cannot be judged in the calls that are timed. They are judged without dropout.
    """
    torch.manual_seed(options.seed)
    sample, other = (make_sample(case, options.device) for _ in range(2))
    own_masks = case.spec.positional and case.spec.bench.stock is not None
    eager = case.eager(case.spec.reference if own_masks else case.spec.bench.stock or case.spec.reference)
    judge = Judge(case.spec, sample, other, options.seed, eager)
    unmasked = judge
    if own_masks:
        bare = [Sample((*each.args[:-2], 0.0, None), each.kwargs) for each in (sample, other)]  # with p = 0, no seed
        unmasked = Judge(case.spec, bare[0], bare[1], options.seed, eager)
    dtype = DTYPES[case.dtype][0]
    source = torch.randn(max(int(case.copied_bytes() / 2 / dtype.itemsize), 1), dtype=dtype, device=options.device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    plans = norm_plans.contenders(case) if options.plans else {}
    functions = dict.fromkeys(("ours", *plans), case.spec.function) if options.plans else contenders(case, options)
    for name, function in functions.items():
        try:
            if own_masks and name != "ours":
                unmasked.judge(name, call_of(case, unmasked, name, function)())
                judge.skipped.add(name)
                judge.wrong |= unmasked.wrong
                if name in judge.wrong:
                    continue
            call = call_of(case, judge, name, function)
            call = norm_plans.allowed(plans[name])(call) if name in plans else call
            call()
            calls[name] = call
        except Exception as error:  # an error in a library's code is the result of its row, and does not end the run
            judge.wrong[name] = f"{type(error).__name__}: {error}"[:300]
    return calls, judge


def call_of(case: Case, judge: Judge, name: str, function: Callable[..., Any]) -> Call:
    if case.step == "backward":
        return judge.backward(name, function)
    args, kwargs = judge.sample.args, judge.sample.kwargs

    def call() -> object:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def measure(case: Case, options: argparse.Namespace) -> results.Row:
    calls, judge = prepare(case, options)
    spent = {name: seconds_of(call, options.device) for name, call in calls.items()}
    slow = {name: calls.pop(name) for name in spent if spent[name] > SLOW * spent["copy"] and name != "copy"}
    times = take_turns(calls, options.device, options.rounds, judge=judge)
    for name, call in slow.items():
        times[name] = dict.fromkeys(("median", "low", "high"), judged_seconds(name, call, options.device, judge))
    times = {name: time for name, time in times.items() if name not in judge.wrong}
    calls = {name: call for name, call in calls.items() if name not in judge.wrong}
    bandwidth, floor = case.copied_bytes() / times["copy"]["median"], case.floor_bytes()
    percents = {name: 100 * floor / time["median"] / bandwidth for name, time in times.items() if name != "copy"}
    row = case.head() | {"copy_gb_s": 1e-9 * bandwidth, "percent_of_copy": percents, "floor_bytes": floor}
    row |= {"seconds": times} | ({"failed": judge.wrong} if judge.wrong else {})
    if options.device == "cuda":
        row["kernel_seconds"] = kernel_seconds(calls, options.rounds)
        row["call_seconds"] = take_turns(calls, "cuda", options.rounds, ahead=False)
    return row


def kernel_seconds(calls: dict[str, Call], rounds: int) -> dict[str, Any]:
    """Returns times of the kernels alone, replayed as a CUDA graph. Contenders that cannot be captured are left out.

    The current stream must not be the default one. For a backward, the forward must have run on the same stream.
    """
    graphs: dict[str, Call] = {}
    for name, call in calls.items():
        with contextlib.suppress(RuntimeError):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                call()
            graphs[name] = graph.replay
    return take_turns(graphs, "cuda", rounds)


def show(console: Console, found: dict[str, Any], rows: list[results.Row]) -> None:
    """Prints medians, one table for each op and dtype, at most 80 columns wide: percent of copy for large tensors, else
    microseconds."""
    if rows:
        console.print(heading(found | {"rows": rows}), highlight=False)
    large = [row for row in rows if row["sizes"] == "large"]
    groups = {"percent of the bandwidth of a copy": large, "microseconds": [row for row in rows if row not in large]}
    groups |= {f"microseconds, {what}": results.other(rows, key) for key, what in results.OTHERS}
    for title, group in groups.items():
        percents, names = group is large, results.names(group)
        heads = ["copy\nGB/s", "ours\nus", *(f"{name}\n%" for name in names)]
        for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in group):
            table = Table("\npass", "\nshape", box=None, padding=(0, 1, 0, 0))
            for head in heads if percents else [f"{name}\nus" for name in ("copy", *names)]:
                table.add_column(head, justify="right", no_wrap=True)
            for row in (row for row in group if (row["op"], row["dtype"]) == (op, dtype)):
                cells = figures(row, ["copy", *names], percents)
                if percents:
                    cells[1:1] = figures(row, ["ours"], percents=False)
                table.add_row(row["pass"], f"{row['rows']} x {row['cols']}", *cells)
            console.print(f"\n{op}, {dtype}: {title}", table, highlight=False, sep="\n")
    for row in rows:
        for name, reason in row.get("failed", {}).items():
            case = f"{row['op']} {row['pass']} {row['dtype']} {row['rows']} x {row['cols']}"
            console.print(f"{case}: {name}: {reason}", markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cpu" and not options.plain_malloc:
        keep_memory()
    torch.set_num_threads(options.threads)
    torch._inductor.config.cpp.threads = options.threads  # else code cached for other threads would run
    torch._functorch.config.donated_buffer = False  # allows many backward calls after one forward
    console = Console(width=None if sys.stdout.isatty() else 160)
    libraries = peers.versions(options.device)
    settings = {name: getattr(options, name) for name in ("mib", "plain_malloc", "rounds", "seed")}
    found = results.continued(options.path, results.about(options.device, libraries, **settings), anew=options.is_new)
    if absent := [name for name, version in libraries.items() if version is None]:
        console.print(f"Absent here, and not measured: {', '.join(absent)}.")
    rows, origin = {results.key(row): row for row in found["rows"]}, results.run(options.device, found["rows"])
    there, done = len(rows), list[results.Row]()
    todo = [case for case in cases(options) if options.again or results.key(case.head()) not in rows]
    # Calls on the default stream cannot be captured as a CUDA graph.
    stream = torch.cuda.stream(torch.cuda.Stream()) if options.device == "cuda" else contextlib.nullcontext()
    with contextlib.suppress(KeyboardInterrupt), Progress(console=console) as progress, stream:
        task = progress.add_task("benchmarks", total=len(todo))
        for case in todo:
            progress.update(task, description=str(case))
            row = measure(case, options) | origin(case.spec.name)
            rows[results.key(row)] = row
            results.write(options.path, found | {"rows": list(rows.values())})
            done.append(row)
            progress.advance(task)
    show(console, found, done)
    if len(done) < len(todo):
        again = f"with --json {options.path} it goes on from there"
        console.print(f"Stopped: {len(done)} of {len(todo)} were measured; {again}.")
        return 130
    console.print(f"The figures are in {options.path}.{f' {there} rows were there before.' if there else ''}")
    return 0
