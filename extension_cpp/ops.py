"""Registers the fake implementation and the autograd formula of every operator.

This is the table of the operators, with a section for each module of functional/, which has the functions. The kernels
and the checks of their inputs are in csrc/<op>/. reference.py has the functions in plain PyTorch.
registration/entries.py says what an entry is.

Every op takes float64, float32, bfloat16 and float16 on CPU and CUDA. It computes in float32, for float64 in float64.
NaN propagates. Inputs may have any strides, any storage offset and any number of elements. Results are deterministic:
every run gives the same bits, with any number of threads (except linear_cross_entropy). Jagged nested tensors work with
every op except reduce_sum, softmax, the scans, the losses and rotary_embedding: the op runs on the tensors' values(). A
wrong argument raises RuntimeError with a sentence that names the op, the argument, what was expected and what it got. A
result like ``torch.empty_like(x)`` has ``x``'s strides if ``x`` is dense, else dense strides in ``x``'s order of
dimensions. An op that reads rows of unit stride without a copy makes a copy of an input with other strides.
A function that PyTorch also has names its first argument ``input``, as PyTorch does. Formulas, operators and messages
call this argument ``x``, for cross_entropy ``logits``.
"""

import torch
from torch.nn import functional as F

from . import reference
from .functional import dropout as drop
from .functional import gates, linear_loss, losses, norms, pointwise, scans
from .functional import reduce_sum as sums
from .functional import rotary_embedding as rotary
from .functional import sharding_rules as rules
from .functional import softmax as softmaxes
from .functional.dropout import dropout
from .functional.gates import geglu, swiglu
from .functional.linear_loss import linear_cross_entropy
from .functional.losses import cross_entropy, token_log_probs
from .functional.norms import add_layer_norm, add_rms_norm, layer_norm, layer_norm_dropout, rms_norm
from .functional.pointwise import bias_gelu, gelu, mish, muladd, relu, scale_bias_relu, silu
from .functional.reduce_sum import reduce_sum
from .functional.rotary_embedding import rotary_embedding
from .functional.scans import cumsum, linear_recurrence, logcumsumexp
from .functional.softmax import log_softmax, softmax
from .registration.entries import (
    BY_ROWS,
    FLOAT32_ON_CUDA,
    NO_SECOND,
    NO_THIRD,
    NONE,
    NOT_DIFFERENTIABLE,
    PADDED,
    WRITES,
    register,
)

__all__ = [  # noqa: RUF022  # in the order of docs/ops.md
    "muladd",
    "scale_bias_relu",
    "relu",
    "mish",
    "silu",
    "gelu",
    "bias_gelu",
    "swiglu",
    "geglu",
    "reduce_sum",
    "dropout",
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm_dropout",
    "softmax",
    "log_softmax",
    "cumsum",
    "logcumsumexp",
    "linear_recurrence",
    "cross_entropy",
    "token_log_probs",
    "linear_cross_entropy",
    "rotary_embedding",
]

# fmt: off

# ---- pointwise ----

register("muladd", fake=pointwise.muladd_fake, setup_context=pointwise.muladd_setup_context,
         backward=pointwise.muladd_backward, plain=reference.muladd, nested=BY_ROWS, sharding=rules.pointwise)
register("muladd.out", fake=pointwise.muladd_out_fake, backward=WRITES, sharding=NONE)
register("muladd_backward", fake=pointwise.muladd_backward_fake, backward=pointwise.muladd_second,
         plain=pointwise.muladd_backward_plain, sharding=rules.pointwise)
register("scale_bias_relu", fake=pointwise.SCALE_BIAS_RELU.fake, backward=pointwise.SCALE_BIAS_RELU.backward,
         plain=reference.scale_bias_relu, nested=BY_ROWS, sharding=rules.with_bias)
register("scale_bias_relu_backward", fake=pointwise.SCALE_BIAS_RELU.backward_fake,
         setup_context=pointwise.scale_bias_relu_backward_setup_context, backward=pointwise.scale_bias_relu_second,
         plain=pointwise.scale_bias_relu_backward_plain, sharding=rules.with_bias_backward)
register("relu", fake=pointwise.relu_fake, setup_context=pointwise.relu_setup_context,
         backward=pointwise.relu_backward, plain=torch.relu, nested=BY_ROWS, sharding=rules.pointwise)
register("relu_backward", fake=pointwise.relu_backward_fake, setup_context=pointwise.relu_backward_setup_context,
         backward=pointwise.relu_second, plain=pointwise.relu_backward_plain, sharding=rules.pointwise)
register("mish", fake=pointwise.MISH.fake, backward=pointwise.MISH.backward, plain=F.mish, nested=BY_ROWS,
         sharding=rules.pointwise)
register("mish_backward", fake=pointwise.MISH.backward_fake, backward=pointwise.MISH.second,
         plain=pointwise.mish_backward_plain, sharding=rules.pointwise)
register("mish_double_backward", fake=pointwise.MISH.double_backward_fake, backward=NO_THIRD, sharding=rules.pointwise)
register("silu", fake=pointwise.SILU.fake, backward=pointwise.SILU.backward, plain=F.silu, nested=BY_ROWS,
         sharding=rules.pointwise)
register("silu_backward", fake=pointwise.SILU.backward_fake, backward=pointwise.SILU.second,
         plain=pointwise.silu_backward_plain, sharding=rules.pointwise)
register("silu_double_backward", fake=pointwise.SILU.double_backward_fake, backward=NO_THIRD, sharding=rules.pointwise)
register("gelu", fake=pointwise.GELU.fake, backward=pointwise.GELU.backward, plain=pointwise.gelu_plain,
         nested=BY_ROWS, sharding=rules.pointwise)
register("gelu_backward", fake=pointwise.GELU.backward_fake, backward=pointwise.GELU.second,
         plain=pointwise.gelu_backward_plain, sharding=rules.pointwise)
register("gelu_double_backward", fake=pointwise.GELU.double_backward_fake, backward=NO_THIRD, sharding=rules.pointwise)
register("bias_gelu", fake=pointwise.BIAS_GELU.fake, backward=pointwise.BIAS_GELU.backward,
         plain=pointwise.bias_gelu_plain, nested=BY_ROWS, sharding=rules.with_bias)
register("bias_gelu_backward", fake=pointwise.BIAS_GELU.backward_fake, backward=pointwise.bias_gelu_second,
         plain=pointwise.bias_gelu_backward_plain, sharding=rules.with_bias_backward)

# ---- gates ----

register("swiglu", fake=gates.SWIGLU.fake, backward=gates.SWIGLU.backward, plain=gates.SWIGLU.plain, nested=BY_ROWS,
         sharding=rules.pointwise)
register("swiglu_backward", fake=gates.SWIGLU.backward_fake, backward=gates.SWIGLU.second,
         plain=gates.SWIGLU.backward_plain, sharding=rules.pointwise)
register("geglu", fake=gates.GEGLU.fake, backward=gates.GEGLU.backward, plain=gates.GEGLU.plain, nested=BY_ROWS,
         sharding=rules.pointwise)
register("geglu_backward", fake=gates.GEGLU.backward_fake, backward=gates.GEGLU.second,
         plain=gates.GEGLU.backward_plain, sharding=rules.pointwise)

# ---- reduce_sum ----

register("reduce_sum", fake=sums.reduce_sum_fake, setup_context=sums.reduce_sum_setup_context,
         backward=sums.reduce_sum_backward, plain=reference.reduce_sum, nested=NONE, sharding=rules.reduce_sum)

# ---- dropout ----

register("dropout", fake=drop.dropout_fake, setup_context=drop.dropout_setup_context, backward=drop.dropout_backward,
         plain=drop.dropout_plain, nested=BY_ROWS, sharding=rules.replicated)

# ---- norms ----

register("layer_norm", fake=norms.LAYER_NORM.fake, setup_context=norms.LAYER_NORM.setup_context,
         backward=norms.LAYER_NORM.backward, plain=norms.LAYER_NORM.plain, autocast=FLOAT32_ON_CUDA, nested=BY_ROWS,
         sharding=rules.norm)
register("rms_norm", fake=norms.RMS_NORM.fake, setup_context=norms.RMS_NORM.setup_context,
         backward=norms.RMS_NORM.backward, plain=norms.RMS_NORM.plain,
         autocast=FLOAT32_ON_CUDA if norms.CASTS_RMS_NORM else None, nested=BY_ROWS, sharding=rules.norm)
register("add_layer_norm", fake=norms.ADD_LAYER_NORM.fake, setup_context=norms.ADD_LAYER_NORM.setup_context,
         backward=norms.ADD_LAYER_NORM.backward, plain=norms.ADD_LAYER_NORM.plain, nested=BY_ROWS, sharding=rules.norm)
register("add_rms_norm", fake=norms.ADD_RMS_NORM.fake, setup_context=norms.ADD_RMS_NORM.setup_context,
         backward=norms.ADD_RMS_NORM.backward, plain=norms.ADD_RMS_NORM.plain, nested=BY_ROWS, sharding=rules.norm)
register("layer_norm_dropout", fake=norms.LAYER_NORM_DROPOUT.fake,
         setup_context=norms.LAYER_NORM_DROPOUT.setup_context, backward=norms.LAYER_NORM_DROPOUT.backward,
         plain=norms.LAYER_NORM_DROPOUT.plain, autocast=FLOAT32_ON_CUDA, nested=BY_ROWS, sharding=rules.norm)
for _norm in (norms.LAYER_NORM, norms.RMS_NORM, norms.ADD_LAYER_NORM, norms.ADD_RMS_NORM, norms.LAYER_NORM_DROPOUT):
    register(f"{_norm.op}_backward", fake=_norm.backward_fake, setup_context=_norm.backward_setup_context,
             backward=_norm.second, plain=_norm.backward_plain, sharding=rules.norm_backward)

# ---- softmax ----

register("softmax", fake=softmaxes.SOFTMAX.fake, setup_context=softmaxes.SOFTMAX.setup_context,
         backward=softmaxes.SOFTMAX.backward, plain=torch.softmax, autocast=FLOAT32_ON_CUDA, nested=NONE,
         sharding=rules.lines)
register("softmax_backward", fake=softmaxes.SOFTMAX.backward_fake, backward=softmaxes.softmax_second,
         plain=softmaxes.softmax_backward_plain, sharding=rules.lines)
register("log_softmax", fake=softmaxes.LOG_SOFTMAX.fake, setup_context=softmaxes.LOG_SOFTMAX.setup_context,
         backward=softmaxes.LOG_SOFTMAX.backward, plain=torch.log_softmax, autocast=FLOAT32_ON_CUDA, nested=NONE,
         sharding=rules.lines)
register("log_softmax_backward", fake=softmaxes.LOG_SOFTMAX.backward_fake, backward=softmaxes.log_softmax_second,
         plain=softmaxes.log_softmax_backward_plain, sharding=rules.lines)

# ---- scans ----

register("cumsum", fake=scans.cumsum_fake, setup_context=scans.cumsum_setup_context, backward=scans.cumsum_backward,
         plain=scans.cumsum_plain, autocast=FLOAT32_ON_CUDA, nested=PADDED, sharding=rules.lines)
register("logcumsumexp", fake=scans.logcumsumexp_fake, setup_context=scans.logcumsumexp_setup_context,
         backward=scans.logcumsumexp_backward, plain=scans.logcumsumexp_plain, nested=PADDED, sharding=rules.lines)
register("logcumsumexp_backward", fake=scans.logcumsumexp_backward_fake, backward=NO_SECOND, sharding=rules.lines)
register("linear_recurrence", fake=scans.linear_recurrence_fake, setup_context=scans.linear_recurrence_setup_context,
         backward=scans.linear_recurrence_backward, plain=scans.linear_recurrence_plain,
         autocast=scans.linear_recurrence_autocast, nested=PADDED, sharding=rules.linear_recurrence)
register("linear_recurrence_backward", fake=scans.linear_recurrence_backward_fake,
         setup_context=scans.linear_recurrence_backward_setup_context, backward=scans.linear_recurrence_second,
         plain=scans.linear_recurrence_backward_plain, sharding=rules.linear_recurrence)

# ---- losses ----

register("cross_entropy", fake=losses.cross_entropy_fake, setup_context=losses.cross_entropy_setup_context,
         backward=losses.cross_entropy_backward, plain=losses.cross_entropy_plain,
         autocast=losses.cross_entropy_autocast, nested=NONE, sharding=rules.cross_entropy)
register("cross_entropy_backward", fake=losses.cross_entropy_backward_fake, backward=NO_SECOND,
         sharding=rules.cross_entropy_backward)
register("cross_entropy_chunk", fake=losses.cross_entropy_chunk_fake, backward=WRITES, sharding=NONE)
register("cross_entropy_scale", fake=losses.cross_entropy_scale_fake, backward=NOT_DIFFERENTIABLE, sharding=NONE)
register("token_log_probs", fake=losses.token_log_probs_fake, setup_context=losses.token_log_probs_setup_context,
         backward=losses.token_log_probs_backward, plain=losses.token_log_probs_plain, nested=NONE,
         sharding=rules.token_log_probs)
register("token_log_probs_backward", fake=losses.token_log_probs_backward_fake, backward=NO_SECOND,
         sharding=rules.token_log_probs)

# ---- linear_loss ----

register("linear_cross_entropy", fake=linear_loss.linear_cross_entropy_fake,
         setup_context=linear_loss.linear_cross_entropy_setup_context,
         backward=linear_loss.linear_cross_entropy_backward, plain=linear_loss.linear_cross_entropy_plain,
         autocast=linear_loss.linear_cross_entropy_autocast, nested=NONE, sharding=rules.linear_cross_entropy,
         kernel=linear_loss.forward_kernel, no_grad_kernel=linear_loss.no_grad_kernel)
register("linear_cross_entropy_backward", fake=linear_loss.linear_cross_entropy_backward_fake, backward=NO_SECOND,
         sharding=rules.linear_cross_entropy_backward, kernel=linear_loss.backward_kernel)

# ---- rotary_embedding ----

register("rotary_embedding", fake=rotary.rotary_embedding_fake, setup_context=rotary.rotary_embedding_setup_context,
         backward=rotary.rotary_embedding_backward, plain=rotary.rotary_embedding_plain,
         autocast=rotary.rotary_embedding_autocast, nested=NONE, sharding=rules.rotary_embedding)
register("rotary_embedding_backward", fake=rotary.rotary_embedding_backward_fake,
         setup_context=rotary.rotary_embedding_setup_context, backward=rotary.rotary_embedding_second,
         plain=rotary.rotary_embedding_backward_plain, sharding=rules.rotary_embedding)

# fmt: on
