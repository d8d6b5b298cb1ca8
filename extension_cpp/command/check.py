"""`check` tests an operator that another package registered. docs/check.md lists the checks."""

import functools
import importlib
import runpy
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .check_battery import CHECKS
from .check_case import Checked, NotRun, Refused, checks, opspec, sentence, telling
from .errors import CannotMake, require

SHAPES = ((33, 257), (2, 3, 64))  # shapes of the samples that an OpSpec makes


def outcome(check: Callable[[Checked], str], cases: Sequence[Checked]) -> tuple[str, str]:
    """Runs a check with all samples. Returns its verdict ("passed", "refused" or "not run") and a text to print."""
    notes, reasons = [], []
    for case in cases:
        try:
            notes.append(check(case))
        except NotRun as reason:
            reasons.append(str(reason))
        except (Refused, AssertionError) as reason:
            return "refused", str(reason)
        except Exception as error:
            return "refused", f"{case.words(case.draw())}: raised {sentence(error)}"
    said = list(dict.fromkeys(filter(None, notes or reasons)))
    more = f"; and {len(said) - 2} more" if len(said) > 2 else ""
    return ("passed" if notes else "not run"), "; ".join(said[:2]) + more


def load(text: str, what: str) -> Any:
    """Imports the module that `text` names. For "MODULE:FUNCTION" it returns this attribute of the module."""
    module, _, name = text.partition(":")
    with telling(f"{what} {text} cannot be imported:"):
        found = importlib.import_module(module)
        return functools.reduce(getattr, name.split("."), found) if name else found


def find(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op, None) if namespace and op else None
    if packet is None:
        raise CannotMake(f"expected an operator as ns::op, but nothing registered {name}")
    known = [each for each in packet.overloads() if torch._C._dispatch_has_kernel(getattr(packet, each).name())]
    if not overload and len(known) > 1 and "default" not in known:
        raise CannotMake(f"expected one of {', '.join(f'{namespace}::{op}.{each}' for each in known)}, but got {name}")
    overload = overload or ("default" if "default" in known else known[0])
    if overload not in known:
        raise CannotMake(f"expected an overload of {namespace}::{op} among {', '.join(known)}, but got {overload}")
    return getattr(packet, overload)


def evaluated(text: str, seed: int) -> Any:
    with telling(f"--sample {text} cannot be evaluated:"):
        return eval(text, {"torch": torch})


def of_file(path: str) -> Any:
    """Returns what the file of --spec defines: an OpSpec, or a function that makes samples for a device and a dtype."""
    with telling(f"--spec {path} cannot be run:"):
        space = runpy.run_path(path)
    for name in ("spec", "SPEC", "samples"):
        if space.get(name) is not None:
            return space[name]
    raise CannotMake(f"expected {path} to define spec, an OpSpec, or samples(device, dtype), but it has neither")


def sources(texts: Sequence[str], spec: Any, device: str) -> Iterator[Callable[[int], Any]]:
    """Yields functions that draw a sample for a seed: one for each --sample, and one for each sample of the file."""
    for text in texts:
        yield functools.partial(evaluated, text)

    def every(seed: int, dtype: torch.dtype) -> list[Any]:
        if callable(spec):
            return list(spec(device, dtype))
        make = checks.maker(device, dtype, seed=seed)
        return [sample for shape in SHAPES for sample in spec.sample_inputs(make, shape)]

    def one(dtype: torch.dtype, number: int, seed: int) -> Any:
        return every(seed, dtype)[number]

    for dtype in () if spec is None else getattr(spec, "dtypes", opspec.DTYPES):
        for number in range(len(every(0, dtype))):
            yield functools.partial(one, dtype, number)


def devices(op: torch._ops.OpOverload, only: str | None) -> list[str]:
    """Returns the devices of this machine on which the operator has a kernel, or `only` that one."""
    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    found = [each for each in there if only in (None, each) and has(op.name(), each.upper())]
    require(found, f"{op.name()} has no kernel for {only or 'a device of this machine'}, or it is not here")
    return found


def run_checks(cases: Sequence[Checked]) -> list[str]:
    """Prints a line for each check, and returns the names of the checks that the operator fails."""
    refused = []
    for name, check in CHECKS.items():
        if name == "statistics" and not cases[0].random:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict, text = outcome(check, cases)
        refused += [name] if verdict == "refused" else []
        print(f"  {name:<14}{verdict}{text and ': '}{text}", flush=True)
    return refused


def run(options: Namespace) -> int:
    load(options.module, "MODULE")
    op, spec = find(options.operator), of_file(options.spec) if options.spec else None
    reference = load(options.reference, "--reference") if options.reference else getattr(spec, "reference", None)
    if torch.Tag.nondeterministic_seeded in op.tags and not options.random:
        raise CannotMake(f"{op.name()} draws random numbers: expected --random")
    print(op._schema)
    refused = []
    for device in devices(op, options.device):
        draws = sources(options.sample, spec, device)
        with telling(f"a sample of {options.spec or '--sample'} cannot be made:"):
            cases = [Checked(op, draw, reference, device, options.random) for draw in draws]
        require(cases, "expected a sample, by --sample or --spec, but got none")
        for case in cases:
            print(f"{device}: {case.words(case.draw())}")
        refused += run_checks(cases)
    if refused:
        print(f"Refused by {', '.join(dict.fromkeys(refused))}.")
        return 1
    print("Passed." if reference else "Passed, but no value was judged: there is no --reference.")
    return 0
