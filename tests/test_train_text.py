"""Tests examples/train_text.py: a killed and resumed run ends like an unbroken one, and our ops train like torch's."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples import train_text
from tests.forked import python

SIZES = {"width": 32, "layers": 2, "heads": 2, "context": 32, "batch": 4, "accumulate": 2, "learning_rate": 2e-3}
# Runs the program with a smaller model.
SMALL = f"""
import sys
import torch
torch.set_num_threads(1)  # the model is too small for more
sys.path.insert(0, {str(Path(train_text.__file__).parent.parent)!r})
from examples import train_text
train_text.SIZES["cpu"] = {json.dumps(SIZES)}
train_text.CHECKPOINT_EVERY, train_text.WRITTEN = 4, 40
sys.exit(train_text.main(sys.argv[1:]))
"""
STEPS = 32


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(train_text.SIZES, "cpu", SIZES)
    monkeypatch.setattr(train_text, "WRITTEN", 40)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small for more threads
    yield
    torch.set_num_threads(threads)


def options_of(folder: Path) -> list[str]:
    return ["--device", "cpu", "--no-compile", "--steps", str(STEPS), "--out", str(folder)]


def start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_killed_and_resumed_is_as_never_killed(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    program = start([sys.executable, "-c", SMALL, *options_of(killed)])
    deadline = time.monotonic() + 120
    while not (killed / "ours.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    program.kill()
    printed, _ = program.communicate()
    assert program.returncode == -signal.SIGKILL, printed
    assert 0 < len(train_text.read_checkpoint(killed / "ours.pt")["losses"]) < STEPS
    for folder in (killed, whole):
        program = python("-c", SMALL, *options_of(folder))
        printed = program.stdout + program.stderr
        assert program.returncode == 0 and ("Going on from step" in printed) == (folder == killed), printed
        assert "what the model writes" in printed and (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    resumed, expected = (train_text.read_checkpoint(folder / "ours.pt") for folder in (killed, whole))
    assert resumed["losses"] == expected["losses"] and resumed["validation"] == expected["validation"]
    assert expected["losses"][-1] < 0.95 * expected["losses"][0]
    for name, parameter in expected["model"].items():
        assert torch.equal(resumed["model"][name], parameter), name


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def two_processes_options(folder: Path) -> list[str]:
    return ["--device", "cpu", "--no-compile", "--steps", "8", "--out", str(folder), "--parallel", "fsdp"]


def assert_one_process_resumes(folder: Path) -> None:
    text = train_text.Text.of(train_text.read_text(None), SIZES["context"])
    alone = train_text.Training("ours", text, train_text.Settings("cpu", 8, text.digest, **SIZES), compiled=False)
    alone.resume(folder / "ours.pt")
    assert len(alone.losses) == 8


# Runs SMALL in two forked processes with the ranks that torchrun would give them. The parent waits for the child.
FORKED = f"""
import os
import signal
import sys
import torch.distributed.fsdp  # once for both
other = os.fork()
signal.alarm(300)  # ends a process that waits for one that is gone
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(other == 0))
try:
    exec({SMALL!r})
except SystemExit as stop:
    status = stop.code
sys.exit(status or (other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])))
"""


def test_two_processes_in_the_environment_of_torchrun(small: None, tmp_path: Path) -> None:
    """Two processes train in torchrun's environment, one of them prints, and one process resumes from their checkpoint.
    Unlike test_two_nodes this test needs no slow torchrun. tests/test_sharding.py compares the losses."""
    variables = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = os.environ | variables | {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    done = python("-c", FORKED, *two_processes_options(tmp_path), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 processes (fsdp)") == done.stdout.count("what the model writes") == 1
    assert_one_process_resumes(tmp_path)


@pytest.mark.slow
def test_two_nodes(small: None, tmp_path: Path) -> None:
    """Two torchruns meet on the loopback, as they would on two machines. Runs without --slow have the test above
    instead, which makes the same environment."""
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, *rendezvous]
    programs = [start([*torchrun, str(script), *two_processes_options(tmp_path)]) for _ in range(2)]
    printed = [program.communicate(timeout=300)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], "\n".join(printed)
    assert sorted("2 processes (fsdp)" in text and "what the model writes" in text for text in printed) == [False, True]
    assert sorted("loss" in text for text in printed) == [False, True], "the first process alone prints"
    assert_one_process_resumes(tmp_path)


def test_processes_that_cannot_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    text = train_text.Text.of(train_text.read_text(None), SIZES["context"])
    settings = train_text.Settings("cpu", 2, text.digest, **SIZES)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with pytest.raises(train_text.CannotMake, match="3 processes cannot share the 4 sequences of a batch evenly"):
        train_text.Training("ours", text, settings, compiled=False, parallel="ddp")


def test_a_checkpoint_is_never_half_written(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = train_text.Text.of(train_text.read_text(None), SIZES["context"])
    training = train_text.Training("ours", text, train_text.Settings("cpu", 2, text.digest, **SIZES), compiled=False)
    path = tmp_path / "ours.pt"
    training.step()
    training.save(path)

    def break_off(state: object, file: object) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", break_off)
    training.step()
    with pytest.raises(OSError):
        training.save(path)
    assert len(train_text.read_checkpoint(path)["losses"]) == 1


def test_both_ops_train_alike(small: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Our compiled ops and PyTorch's eager ops give losses that differ by at most one eps of bfloat16, to which
    products are rounded. One layer compiles faster than two. Without --slow, forward and backward are compiled without
    Inductor. With Inductor tests/battery/test_graphs.py compiles every op."""
    if not request.config.getoption("--slow"):
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    text = train_text.Text.of(train_text.read_text(None), SIZES["context"])
    settings = train_text.Settings("cpu", 12, text.digest, **SIZES | {"layers": 1})
    ours, stock = (train_text.Training(ops, text, settings, compiled=ops == "ours") for ops in ("ours", "torch"))
    for name, parameter in stock.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], parameter)
    for _ in range(settings.steps):
        ours.step()
        stock.step()
    losses = torch.tensor([ours.losses, stock.losses])
    assert (losses[0] - losses[1]).abs().max() <= torch.finfo(torch.bfloat16).eps * losses[0, 0]
    assert losses[0, -1] < losses[0, 0] - 0.1


def test_which_operators_each_ops_calls(small: None) -> None:
    """The model calls its fused norms, rotary embedding, gates and linear loss with --ops ours. With --ops torch it
    calls none of our ops."""
    text = train_text.Text.of(train_text.read_text(None), SIZES["context"])
    settings = train_text.Settings("cpu", 1, text.digest, **SIZES)
    called = {}
    for ops in train_text.OPS:
        training = train_text.Training(ops, text, settings, compiled=False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, training.autocast():
            training.model(*train_text.batch(text.training, settings, 0))
        counts = {row.key.removeprefix("extension_cpp::"): row.count for row in profiler.key_averages()}
        names = ("add_layer_norm", "rotary_embedding", "swiglu", "linear_cross_entropy", "layer_norm", "cross_entropy")
        called[ops] = {name: counts.get(name, 0) for name in names}
    layers = settings.layers
    ours = {"add_layer_norm": 2 * layers + 1, "rotary_embedding": layers, "swiglu": layers, "linear_cross_entropy": 1}
    assert called["ours"] == ours | {"layer_norm": 0, "cross_entropy": 0}
    assert not any(called["torch"].values())


def refused(capsys: pytest.CaptureFixture, *options: object) -> str:
    assert train_text.main(["--device", "cpu", "--no-compile", "--steps", "1", *map(str, options)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_text_that_cannot_be_used(small: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "text"
    options = ("--text", file, "--out", tmp_path / "out")
    assert f"--text {file}: No such file or directory" in refused(capsys, *options)
    assert "Is a directory" in refused(capsys, "--text", tmp_path)
    for content, sentence in [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"abc\xff", "byte 3 is not UTF-8, so this is no text file"),
        (b"abc\0", "it has a zero byte, so this is no text file"),
        (b"abc", "the text has 3 bytes, and at least 330 are needed"),
    ]:
        file.write_bytes(content)
        assert sentence in refused(capsys, *options)
    assert not (tmp_path / "out").exists()


def test_checkpoint_that_cannot_be_used(small: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not to be. " * 40)
    options = ["--device", "cpu", "--no-compile", "--text", str(text), "--out", str(tmp_path)]
    assert train_text.main([*options, "--steps", "2"]) == 0
    capsys.readouterr()
    checkpoint = tmp_path / "ours.pt"
    assert f"{checkpoint} was trained with another steps: add --restart" in refused(capsys, *options)
    assert train_text.main([*options, "--steps", "1", "--restart"]) == 0
    capsys.readouterr()
    state = train_text.read_checkpoint(checkpoint)
    state["model"]["another"] = state["model"].pop("head.weight")
    torch.save(state, checkpoint)
    assert f"{checkpoint} has the parameters of another version's model: add --restart" in refused(capsys, *options)
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert f"{checkpoint} cannot be read" in refused(capsys, *options)
    torch.save({"weights": 1}, checkpoint)
    assert f"{checkpoint} is not a checkpoint of this program" in refused(capsys, *options)
    assert "File exists" in refused(capsys, "--text", text, "--out", text)
    assert "--graphs needs a GPU, torch.compile and a single process" in refused(capsys, *options, "--graphs")


def test_a_damaged_checkpoint_of_the_other_ops_does_no_harm(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not to be. " * 40)
    (tmp_path / "torch.pt").write_bytes(b"half")
    options = ["--device", "cpu", "--no-compile", "--text", str(text), "--out", str(tmp_path), "--steps", "1"]
    assert train_text.main(options) == 0
    assert "The loss curves: " in capsys.readouterr().out and (tmp_path / "loss.png").exists()


def test_gradients_accumulate(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a step with two parts is that of all its sequences at once, up to roundings of bfloat16 products:
    two in either gradient, and one more where a loss is divided by the number of parts."""
    text = train_text.Text.of(train_text.read_text(None), SIZES["context"])
    settings = train_text.Settings("cpu", 2, text.digest, **SIZES)
    training = train_text.Training("ours", text, settings, compiled=False)
    parts = [train_text.batch(text.training, settings, number) for number in range(settings.accumulate)]
    with training.autocast():
        loss = training.model(*(torch.cat(each) for each in zip(*parts, strict=True)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), train_text.demo_model.CLIP)
    whole = torch.cat([parameter.grad.flatten() for parameter in training.model.parameters()])
    training.model.zero_grad()
    monkeypatch.setattr(training.optimizer, "zero_grad", lambda **_: None)
    training.step()
    added = torch.cat([parameter.grad.flatten() for parameter in training.model.parameters()])
    assert (added - whole).norm() <= 5 * torch.finfo(torch.bfloat16).eps * whole.norm()


def test_kept_gradients_give_the_same_losses(small: None) -> None:
    """With --graphs the gradients stay in the same memory, are zeroed before each step, and give the same losses."""
    text = train_text.Text.of(train_text.read_text(None), SIZES["context"])
    settings = train_text.Settings("cpu", 3, text.digest, **SIZES)
    both = [train_text.Training("ours", text, settings, compiled=False, graphs=graphs) for graphs in (False, True)]
    addresses = [parameter.grad.data_ptr() for parameter in both[1].model.parameters()]
    for training in both:
        for _ in range(3):
            training.step()
    assert both[0].losses == both[1].losses
    assert [parameter.grad.data_ptr() for parameter in both[1].model.parameters()] == addresses


def test_what_is_said_of_a_stop(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not to be. " * 40)
    options = ["--device", "cpu", "--no-compile", "--text", str(text), "--out", str(tmp_path), "--steps", "9"]
    step = train_text.Training.step

    def stop_at_the_second(training: train_text.Training) -> None:
        if training.losses:
            raise KeyboardInterrupt
        step(training)

    monkeypatch.setattr(train_text.Training, "step", stop_at_the_second)
    assert train_text.main(options) == 130
    assert capsys.readouterr().err == "Stopped before the first checkpoint, of step 25.\n"
    monkeypatch.setattr(train_text, "CHECKPOINT_EVERY", 1)
    assert train_text.main(options) == 130
    assert capsys.readouterr().err == "Stopped; the same command goes on from the last checkpoint.\n"
    assert train_text.main([*options, "--restart"]) == 130
    assert "same command, without --restart, goes on" in capsys.readouterr().err
    monkeypatch.setattr(train_text, "CHECKPOINT_EVERY", 25)
    assert train_text.main([*options, "--restart"]) == 130
    assert not (tmp_path / "ours.pt").exists(), "a run begun anew would go on from the old checkpoint"


@pytest.mark.parametrize("options", [["--steps", "0"], ["--ops", "others"], ["--device", "tpu"], ["--no-such"]])
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_text.main(options)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
