"""Tests what is special to dropout: the bits and statistics of its mask, how it draws seeds, and its module."""

import math

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import extension_cpp
from extension_cpp.nn import Dropout
from tests.opspec import DTYPES
from tests.specs.dropout import seed_of

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def philox_bits(seed: int, first: int, count: int) -> numpy.ndarray:
    """Returns random words number `first` to `first + count - 1` for a seed, computed in numpy by the definition in the
    Philox paper. The words are those of Philox 4x32-7, each followed by itself with its 16-bit halves exchanged."""
    groups = numpy.arange(first // 8, (first + count + 7) // 8, dtype=numpy.uint64)
    low, half = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    words = [groups & low, groups >> half, numpy.zeros_like(groups), numpy.zeros_like(groups)]
    for i in range(7):
        key = [
            numpy.uint64(seed + i * 0x9E3779B9 & 0xFFFFFFFF),
            numpy.uint64((seed >> 32) + i * 0xBB67AE85 & 0xFFFFFFFF),
        ]
        a, b = words[0] * numpy.uint64(0xD2511F53), words[2] * numpy.uint64(0xCD9E8D57)
        words = [b >> half ^ words[1] ^ key[0], b & low, a >> half ^ words[3] ^ key[1], a & low]
    word = numpy.stack(words, -1)
    exchanged = word << numpy.uint64(16) & low | word >> numpy.uint64(16)
    return numpy.stack([word, exchanged], -1).reshape(-1)[first % 8 :][:count]


def mask(seed: int, p: float, first: int, count: int) -> Tensor:
    return torch.from_numpy(philox_bits(seed, first, count) >= round(p * 2**32))


def op(x: Tensor, p: float, seed: int) -> Tensor:
    return torch.ops.extension_cpp.dropout(x, p, seed_of(x.device, seed))


def test_philox_known_answers() -> None:
    """philox_bits gives a test vector of Philox's authors, and reference.py gives the bits of philox_bits."""
    zeros = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox_bits(0, 0, 8)[::2].tolist() == zeros
    assert philox_bits(0, 0, 8)[1::2].tolist() == [0xB7095F6F, 0x3F640D89, 0x1F814F12, 0x0A484F73]
    assert extension_cpp.reference.philox(torch.tensor([0]), 8).tolist() == philox_bits(0, 0, 8).tolist()
    seed = 0x299F_31D0_A409_3822
    ours = extension_cpp.reference.philox(torch.tensor([seed]), 1027)
    assert ours.tolist() == philox_bits(seed, 0, 1027).tolist()


@every_dtype
@pytest.mark.parametrize("seed", [0, 1, 0x299F_31D0_A409_3822, 2**63 - 2])
@pytest.mark.parametrize("p", [2.0**-20, 0.1, 0.5, 0.999])
def test_mask_is_philox_bit_for_bit(dtype: torch.dtype, seed: int, p: float, device: str) -> None:
    for numel in (1, 3, 33, 4097, 100_003):
        x = torch.randn(numel, device=device).to(dtype) + 10
        kept = mask(seed, p, 0, numel).to(device)
        y = op(x, p, seed)
        assert torch.equal(y != 0, kept)
        scale = 1 / (1 - p) if dtype is torch.float64 else torch.tensor(1 / (1 - p), dtype=torch.float32).item()
        wide = x.double() if dtype is torch.float64 else x.float()
        assert torch.equal(y[kept], (wide * scale).to(dtype)[kept])


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_statistics_of_the_mask(p: float, device: str) -> None:
    """The mask has the mean, variance and autocorrelation of independent random bits, within 6 standard errors. A right
    generator exceeds this bound with a probability of 2e-9. The seeds are fixed, so that every run has the same result.
    """
    n = 1 << 22
    for seed in range(3):
        y = op(torch.ones(n, device=device, dtype=torch.float64), p, seed)
        # An element of y is 1/(1-p) with probability 1-p, and otherwise 0. Its mean is 1 and its variance p/(1-p).
        deviation = math.sqrt(p / (1 - p))
        assert abs(y.mean().item() - 1) < 6 * deviation / math.sqrt(n)
        z = (y - 1) / deviation  # mean 0, variance 1
        # The variance of z^2 is the fourth moment minus 1. At p = 0.5, z^2 is 1, and this variance is 0 up to rounding.
        fourth = (p**3 + (1 - p) ** 3) / (p * (1 - p))
        assert abs(z.square().mean().item() - 1) <= 6 * math.sqrt((fourth - 1) / n) + 1e-12
        for k in (1, 2, 3, 4, 5, 8, 32, 128, 1024, 4096):
            assert abs((z[k:] * z[:-k]).mean().item()) < 6 / math.sqrt(n - k)
        other = (op(torch.ones(n, device=device, dtype=torch.float64), p, seed + 1) - 1) / deviation
        assert abs((z * other).mean().item()) < 6 / math.sqrt(n)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares CPU with CUDA")
@every_dtype
def test_cpu_and_cuda_give_the_same_bits(dtype: torch.dtype) -> None:
    for numel in (1, 7, 1025, 1_000_003):
        x = torch.randn(numel + 1).to(dtype)
        for part in (x[:-1], x[1:]):
            cpu, cuda = op(part, 0.3, 99), op(part.cuda()[:], 0.3, 99)
            assert torch.equal(cpu, cuda.cpu())
        assert torch.equal(op(x.cuda()[1:], 0.3, 99).cpu(), op(x[1:], 0.3, 99))  # not aligned


@every_dtype
def test_same_mask_for_every_layout_and_number_of_threads(dtype: torch.dtype, device: str) -> None:
    """Whether an element is dropped depends on its index in the tensor, and not on its memory address or the number of
    threads. The same values as a slice, at an offset or transposed therefore give the same result."""
    values = torch.randn(37, 6, 65, device=device).to(dtype)
    expected = op(values, 0.4, 5)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            wide = torch.empty(37, 6, 131, device=device, dtype=dtype)
            wide[..., 1::2] = values
            offset = torch.cat([values.new_zeros(1), values.flatten()])[1:].view(values.shape)
            for x in (values, wide[..., 1::2], offset, values.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
                y = op(x, 0.4, 5)
                assert torch.equal(y, expected) and y.is_contiguous()
    finally:
        torch.set_num_threads(threads)


def test_ends(device: str) -> None:
    """With p = 0 or in evaluation, dropout returns x itself. With p = 1, it returns zeros and has zero gradients, even
    where x is NaN. In none of these cases does it draw a seed."""
    x = torch.tensor([1.0, -2.0, float("nan"), float("inf")], device=device, requires_grad=True)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert extension_cpp.dropout(x, 0.0) is x
    assert extension_cpp.dropout(x, 0.7, training=False) is x
    zeros = extension_cpp.dropout(x, 1.0)
    (grad,) = torch.autograd.grad(zeros, x, torch.full_like(x, float("inf")))
    assert torch.equal(zeros, torch.zeros_like(x)) and torch.equal(grad, torch.zeros_like(x))
    assert torch.equal(op(x, 0.0, 3).nan_to_num(), x.detach().nan_to_num())
    after = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, after)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_probability_out_of_range(p: float, device: str) -> None:
    x = torch.ones(3, device=device)
    for training in (True, False):
        with pytest.raises(RuntimeError) as error:
            extension_cpp.dropout(x, p, training)
        assert str(error.value) == f"extension_cpp::dropout: expected p to be between 0 and 1, but got {p}"


def test_manual_seed_rules(device: str) -> None:
    x = torch.ones(1000, device=device)
    torch.manual_seed(3)
    a, b = extension_cpp.dropout(x), extension_cpp.dropout(x)
    torch.manual_seed(3)
    assert torch.equal(extension_cpp.dropout(x), a)
    assert not torch.equal(a, b)
    torch.manual_seed(3)
    assert torch.equal(extension_cpp.reference.dropout(x), a)


def test_one_draw_serves_forward_and_backward(device: str) -> None:
    x = torch.randn(5000, device=device, requires_grad=True)
    y = extension_cpp.dropout(x, 0.3)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(grad != 0, y != 0)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        extension_cpp.dropout(x, 0.3)
    assert [t.numel() for t in saved] == [1]  # backward saves one number, the seed, and no mask


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_makes_the_same_mask(use_reentrant: bool, device: str) -> None:
    x = torch.randn(5000, device=device, requires_grad=True)
    masks = []

    def block(x: Tensor) -> Tensor:
        y = extension_cpp.dropout(x, 0.5)
        masks.append(y != 0)
        return y.square()

    checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    assert len(masks) == 2 and torch.equal(masks[0], masks[1])
    assert x.grad is not None and torch.equal(x.grad != 0, masks[0])


def test_compiled_masks_are_eagers_with_fallback_random(device: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(3000, device=device, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        return extension_cpp.dropout(x * 2, 0.4) + 1

    results = []
    with torch._inductor.config.patch(fallback_random=True):
        for function in (model, torch.compile(model, fullgraph=True)):
            torch.manual_seed(11)
            y = function(x)
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
            results.append((y, grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_compiled_masks_without_fallback_random(device: str) -> None:
    """Code compiled by torch.compile draws other masks than eager mode does, but drops elements with the same
    probability. Each call draws a new mask, and its forward and backward use the same mask."""
    torch._dynamo.reset()
    x = torch.ones(100_000, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: extension_cpp.dropout(x, 0.4), fullgraph=True)
    a, b = compiled(x), compiled(x)
    assert not torch.equal(a, b)
    (grad,) = torch.autograd.grad(a, x, torch.ones_like(a))
    assert torch.equal(grad != 0, a != 0)
    # Each of 1e5 elements is kept with probability 0.6. The count is within 6 standard deviations of its mean.
    assert abs((a != 0).sum().item() - 60_000) < 6 * math.sqrt(100_000 * 0.6 * 0.4)


def test_cuda_graph_replays_fresh_masks(device: str) -> None:
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    x = torch.ones(100_000, device=device)
    extension_cpp.dropout(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = extension_cpp.dropout(x)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(y.clone())
    assert not torch.equal(*results)


def test_module_is_torchs(device: str) -> None:
    module = Dropout(0.3)
    assert isinstance(module, torch.nn.Dropout) and repr(module) == repr(torch.nn.Dropout(0.3))
    x = torch.randn(1000, device=device)
    torch.manual_seed(5)
    y = module(x)
    torch.manual_seed(5)
    assert torch.equal(y, extension_cpp.dropout(x, 0.3))
    assert module.eval()(x) is x


def test_module_in_place(device: str) -> None:
    """nn.Dropout with inplace=True writes its result into its input's memory. The leaf gets the right gradient."""
    leaf = torch.randn(1000, device=device, requires_grad=True)
    x = leaf * 1
    y = Dropout(0.3, inplace=True)(x)
    assert y.data_ptr() == x.data_ptr() and (y == 0).any()
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.equal(grad != 0, y != 0)
    assert Dropout(0.3, inplace=True).eval()(x) is x


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(device: str) -> None:
    """The last of 2^31 + 5 elements have the mask of their 64-bit indices, not of indices that wrap around."""
    x = torch.ones(2**31 + 5, dtype=torch.bfloat16, device=device)
    y = op(x, 0.5, 8)[-4099:]
    assert torch.equal(y.cpu() != 0, mask(8, 0.5, 2**31 + 5 - 4099, 4099))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thresholds_are_hit_exactly(dtype: torch.dtype, device: str) -> None:
    """An element is dropped if its 32 random bits are below p * 2^32, and kept if the bits equal p * 2^32."""
    seed = seed_of(device)
    x = torch.ones(4099, dtype=dtype, device=device)
    bits = extension_cpp.reference.philox(seed, x.numel()).tolist()
    for index in (0, 1, 31, 32, 1000, 4095, 4096, 4098):
        at, above = (extension_cpp._ops.dropout(x, word / 2**32, seed) for word in (bits[index], bits[index] + 1))
        assert at[index] != 0 and above[index] == 0
        for kept, word in ((at != 0, bits[index]), (above != 0, bits[index] + 1)):
            assert kept.tolist() == [other >= word for other in bits]


@pytest.mark.parametrize("name", ["dropout", "add_layer_norm", "add_rms_norm", "layer_norm_dropout"])
def test_no_tensor_to_draw_a_seed_for(name: str) -> None:
    """If x is not a tensor, a function with dropout raises an error before it draws a seed, on x's device."""
    function, more = getattr(extension_cpp, name), {} if name == "dropout" else {"normalized_shape": (6,)}
    x = {"residual": torch.ones(4, 6)} if name.startswith("add") else {}
    for other, got in ((None, "None"), ([1.0], "list")):
        with pytest.raises(RuntimeError, match=f"^extension_cpp::{name}: expected x to be a tensor, but got {got}$"):
            function(other, **x, **more, p=0.5)
