"""Shows forward, backward, training and timing: `python -m examples.basic_usage` in the root of a checkout."""

import torch
from torch.utils.benchmark import Timer

import extension_cpp

ROWS, FEATURES, SCALE = 1024, 2048, 0.5


def show_gradients(device: str) -> None:
    """Shows that each gradient has the shape of its tensor. The gradient of bias is summed over the rows."""
    x = torch.randn(ROWS, FEATURES, device=device, requires_grad=True)
    bias = torch.randn(FEATURES, device=device, requires_grad=True)
    y = extension_cpp.scale_bias_relu(x, bias, SCALE)
    y.sum().backward()
    print(f"y        {tuple(y.shape)}")
    for name, tensor in (("x", x), ("bias", bias)):
        assert tensor.grad is not None
        print(f"{name + '.grad':8} {tuple(tensor.grad.shape)}")


def train(device: str, steps: int = 200) -> list[float]:
    """Fits a function of 16 numbers, and returns the loss of every step."""
    torch.manual_seed(0)
    x = torch.randn(512, 16, device=device)
    target = torch.sin(x).sum(dim=1, keepdim=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), extension_cpp.nn.ScaleBiasReLU(64, scale=SCALE), torch.nn.Linear(64, 1)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def show_times(device: str) -> None:
    """Shows the microseconds of a forward call, for our op and for PyTorch."""
    x, bias = torch.randn(ROWS, FEATURES, device=device), torch.randn(FEATURES, device=device)
    calls = {
        "extension_cpp.scale_bias_relu": lambda: extension_cpp.scale_bias_relu(x, bias, SCALE),
        "relu(x * scale + bias)": lambda: torch.relu(x * SCALE + bias),
    }
    torch.testing.assert_close(*(call() for call in calls.values()))
    for name, call in calls.items():
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        print(f"{timer.blocked_autorange(min_run_time=0.5).median * 1e6:7.0f} us  {name}")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"On {device}, {ROWS} x {FEATURES}:")
    show_gradients(device)
    losses = train(device)
    print(f"loss     {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps of Adam")
    show_times(device)


if __name__ == "__main__":
    main()
