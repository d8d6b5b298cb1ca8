"""Replaces the losses of Hugging Face's causal language models, as a part of nn.convert.

The forward of such a model computes logits with its output layer, and calls ``self.loss_function`` with them. convert
replaces that function on the instance. With loss="linear" it also changes the classes of the model and of its output
layer: if labels are given, the layer only keeps its input, and the loss function computes the loss from that input.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..functional import linear_loss, losses
from .formulas import GeneratedModule, Unfit, generated_class, obstacle_of


def causal_lm_loss(logits: Tensor, labels: Tensor, vocab_size: int, *args: Any, **options: Any) -> Tensor:
    """Computes transformers' ForCausalLMLoss, without its float32 copy of the logits."""

    def compute(targets: Tensor, reduction: str, ignore_index: int) -> Tensor:
        rows, options = logits.reshape(-1, vocab_size), losses.LossOptions(ignore_index)
        return losses.call_cross_entropy(rows, targets, None, reduction, options, float_loss=True)

    return _token_loss(compute, logits.device, labels, *args, **options)


def _token_loss(
    compute: Callable[[Tensor, str, int], Tensor],
    device: torch.device,
    /,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Computes ForCausalLMLoss by compute(targets, reduction, ignore_index). Each token's target is the next token.
    Shifting labels is cheap, while shifting logits would copy them."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(device)
    loss = compute(targets, "mean" if num_items_in_batch is None else "sum", ignore_index)
    loss = loss.float()  # also for float64 logits, as ForCausalLMLoss does
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


# ---- which models ----


def is_causal_lm(module: torch.nn.Module) -> bool:
    """Returns whether a module is a transformers model whose loss is ForCausalLMLoss, set directly or by loss_type."""
    utilities = sys.modules.get("transformers.loss.loss_utils")
    if utilities is None or not is_model(module) or isinstance(module, LinearLossModel):
        return False
    if "_loss_function" in vars(module):
        return vars(module)["_loss_function"] in (utilities.ForCausalLMLoss, causal_lm_loss)
    default = utilities.ForCausalLMLoss if _calls_loss_function(module) else None  # for GPT2LMHeadModel, for example
    return utilities.LOSS_MAPPING.get(module.loss_type, default) is utilities.ForCausalLMLoss


def _calls_loss_function(module: torch.nn.Module) -> bool:
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def is_model(module: torch.nn.Module) -> bool:
    """Returns whether a module is a model of transformers."""
    return isinstance(module, _model_class() or ())


def _model_class() -> Any:
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


def obstacle(module: torch.nn.Module) -> str | None:
    """Returns why the loss function of a causal language model cannot be replaced, or None if it can."""
    if not _calls_loss_function(module):
        return "its forward does not call loss_function, but computes the loss itself"
    if inspect.getattr_static(type(module), "loss_function", None) is not _model_class().loss_function:
        return "its class has a loss_function of its own"
    devices = {parameter.device.type for parameter in module.parameters()} - {"cpu", "cuda", "meta"}
    return f"it has parameters on {min(devices)}, and the ops run on CPU and CUDA" if devices else None


def decide(module: torch.nn.Module, is_linear: bool) -> tuple[bool, "Plan | None", str | None]:
    """Returns whether to replace the loss function of a causal language model, the plan of its linear loss, and the
    reason if one of them is missing."""
    if (reason := obstacle(module)) is not None:
        return False, None, reason
    if is_linear:
        try:
            return True, linear_plan(module), None
        except Unfit as unfit:
            reason = f"its loss cannot be linear: {unfit}"
    return vars(module).get("_loss_function") is not causal_lm_loss, None, reason


def apply(module: torch.nn.Module, plan: "Plan | None") -> None:
    vars(module)["_loss_function"] = causal_lm_loss  # as the setter of transformers does
    if plan is not None:
        original: Any = type(module)
        getattr(module, plan.head).__class__ = Head
        module.__class__ = linear_class(original, plan)


def restore(module: torch.nn.Module) -> bool:
    """Removes the loss function that convert set on a model of the original class. Returns whether there was one."""
    if isinstance(module, LinearLossModel) or vars(module).get("_loss_function") is not causal_lm_loss:
        return False
    del vars(module)["_loss_function"]
    utilities = sys.modules["transformers.loss.loss_utils"]
    if utilities.LOSS_MAPPING.get(module.loss_type, utilities.ForCausalLMLoss) is not utilities.ForCausalLMLoss:
        vars(module)["_loss_function"] = utilities.ForCausalLMLoss  # this function was set explicitly before convert
    return True


# ---- loss="linear" ----


class Plan(NamedTuple):
    """Describes how the forward of a model computes the logits that its loss function takes."""

    head: str  # the output layer's name
    labels: int  # position among the arguments
    return_dict: int | None
    scale: float  # factor of the logits
    softcap: float | None  # the softcap of the scaled logits


class Head(torch.nn.Linear):
    """An output layer that stores its input while ``received`` is a list."""

    received: list[Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.received is None:
            return super().forward(input)
        self.received.append(input)
        return input.new_zeros(*input.shape[:-1], 1)  # replaces the logits, which nothing reads

    def _get_name(self) -> str:
        return "Linear"


class LinearLossModel(GeneratedModule):
    """The base class of models that compute the loss from the output layer's input."""

    plan: ClassVar[Plan]

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        received = getattr(getattr(self, self.plan.head), "received", None)
        return self.linear_loss if received else super().loss_function  # type: ignore[misc]  # the model's

    @loss_function.setter
    def loss_function(self, value: Callable[..., Tensor]) -> None:
        self._loss_function = value

    def linear_loss(self, logits: Tensor, labels: Tensor, vocab_size: int, *args: Any, **options: Any) -> Tensor:
        head = getattr(self, self.plan.head)
        (x,) = head.received
        if self.plan.scale != 1:
            x = x * self.plan.scale

        def compute(targets: Tensor, reduction: str, ignore_index: int) -> Tensor:
            given = x.reshape(-1, x.shape[-1]), head.weight, targets, head.bias, None, reduction
            options = losses.LossOptions(ignore_index, softcap=self.plan.softcap)
            return linear_loss.call_linear_cross_entropy(*given, options, float_loss=True)

        return _token_loss(compute, x.device, labels, *args, **options)


@functools.cache
def linear_class(original: type, plan: Plan) -> type:
    """Makes a subclass of LinearLossModel and the original, with the signature of the original's forward, which
    transformers reads."""

    @functools.wraps(original.forward)  # type: ignore[attr-defined]  # `type` has no forward, a model's class has
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        head = getattr(self, plan.head)
        if not _makes_linear_loss(self, head, args, kwargs):
            return original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]  # as above
        head.received = []
        try:
            output = original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]  # as above
        finally:
            head.received = None  # and not `del`, which torch.compile cannot replay
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    names = {"plan": plan, "forward": forward, "made_by": (linear_class, original, plan)}
    return generated_class(LinearLossModel, original, names)


def _makes_linear_loss(self: Any, head: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether this call computes the linear loss. The call must have labels and return a named result
    (return_dict). The output layer must have no hooks and no forward of its own. Neither the output layer nor the loss
    function may have been replaced."""
    plan: Plan = self.plan
    labels = args[plan.labels] if len(args) > plan.labels else kwargs.get("labels")
    if labels is None or getattr(self, "_loss_function", None) is not causal_lm_loss:
        return False
    if type(head) is not Head or must_run(head) is not None:
        return False
    at = plan.return_dict
    return_dict = args[at] if at is not None and len(args) > at else kwargs.get("return_dict")
    return bool(self.config.return_dict if return_dict is None else return_dict)


def must_run(head: torch.nn.Module) -> str | None:
    """Returns why a module must be called and not replaced by an op (hooks, its own forward), or None."""
    if "forward" in vars(head):
        return "has a forward of its own"
    hooks = head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks
    return "has hooks" if any(hooks) or torch.nn.modules.module._has_any_global_hook() else None


# ---- following a model's forward ----


def linear_plan(module: torch.nn.Module) -> Plan:
    """Returns how to compute the loss from the output layer's input. Raises Unfit if that is not possible."""
    head = module.get_output_embeddings()  # type: ignore[operator]  # a model's
    name = next((name for name, each in module._modules.items() if each is head and head is not None), None)
    if name is None:
        raise Unfit("its output layer is not one of its own modules")
    if type(head) not in (Head, torch.nn.Linear):
        raise Unfit(f"its {name} is a {type(head).__name__}, not a plain torch.nn.Linear")
    if reason := must_run(head) or ("is empty, as sharding leaves it" if head.weight.dim() != 2 else None):
        raise Unfit(f"its {name} {reason}")
    if reason := obstacle_of(head):
        raise Unfit(f"of its {name}: {reason}")
    if "forward" in vars(module):
        raise Unfit("its forward was replaced on the instance")
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    if "labels" not in arguments:
        raise Unfit("its forward does not name labels among its arguments")
    scale, softcap = _logits_to_loss(module, name)
    if scale != 1 and head.bias is not None:
        raise Unfit(f"it scales the logits, and its {name} has a bias")
    return_dict = arguments.index("return_dict") if "return_dict" in arguments else None
    return Plan(name, arguments.index("labels"), return_dict, scale, softcap)


# Two elements of the probe, exact in float32 and float64. SMALL reveals the scale, and LARGE reveals the softcap.
SMALL, LARGE = 2.0**-20, 2.0**100


def _logits_to_loss(module: torch.nn.Module, name: str) -> tuple[float, float | None]:
    """Returns the scale and the softcap that forward applies to the logits, found by running forward on a probe."""
    head: Any = module._modules[name]
    unknown = Unfit("what its forward does with the logits is not known")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(1, 2, head.weight.shape[0], generator=generator, dtype=torch.float64) * 4
        probe[0, :, 0] = torch.tensor([SMALL, LARGE])
        got, of_zeros = _follow(module, name, probe.clone()), _follow(module, name, torch.zeros(1, 2, 1))
        if got is None or of_zeros is None or got.shape != probe.shape or not got.is_floating_point():
            raise unknown
        scale, large = (got[0, :, 0].double() / torch.tensor([SMALL, 1.0], dtype=torch.float64)).tolist()
        scale = 1.0 if abs(scale - 1) <= 1e-6 else scale
        softcap = None if abs(large - scale * LARGE) <= 1e-6 * abs(scale * LARGE) else large
        want = probe * scale if softcap is None else softcap * torch.tanh(probe * scale / softcap)
        # The bound allows a few roundings in float32, because some models scale in float32.
        if not bool(((got - want).abs() <= 1e-6 * want.abs()).all()) or (softcap or 1) <= 0:
            raise unknown
    return scale, softcap


def _follow(module: torch.nn.Module, name: str, logits: Tensor) -> Tensor | None:
    """Returns the logits that loss_function gets if the output layer returns `logits`, or None if the model does not
    call loss_function exactly once, or returns another loss."""
    head: Any = module._modules[name]
    received: list[Tensor] = []
    calls: list[tuple[Tensor, Tensor, int]] = []
    loss = torch.zeros(())

    def output_layer(input: Tensor) -> Tensor:
        received.append(input)
        return logits

    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, *_: Any, **__: Any) -> Tensor:
        calls.append((logits, labels, vocab_size))
        return loss

    twin, stand_in = copy.copy(module), _StandIn(torch.zeros(1, 2, head.in_features))
    twin._modules = dict.fromkeys(module._modules, stand_in)
    twin._modules[name] = _StandIn(output_layer)
    vars(twin._modules[name])["weight"] = torch.empty(head.weight.shape, device="meta")  # Mamba reads its dtype
    vars(twin)["_loss_function"] = loss_function
    labels = torch.tensor([[0, 1]])
    try:
        output: Any = type(module).forward(twin, input_ids=torch.zeros_like(labels), labels=labels, return_dict=True)
    except Exception:  # unknown code may raise anything when it runs on stand-ins
        return None
    if not isinstance(output, dict) or "logits" not in output or getattr(output, "loss", None) is not loss:
        return None
    match received, calls:
        case [Tensor() as x], [(got, targets, vocab_size)] if x.shape[-1] == head.in_features:
            return got if targets is labels and vocab_size == head.weight.shape[0] else None
    return None


class _StandIn(torch.nn.Module):
    """Replaces the modules of a model. It returns hidden states or, for the output layer, logits."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = [result]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (result,) = self.result
        return _Outputs(result) if isinstance(result, Tensor) else result(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self  # for OPT, which calls `self.model.decoder(...)`


class _Outputs:
    """The result of a base model, in which everything but the hidden states is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()
