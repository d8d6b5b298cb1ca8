"""Contains the ops in Python, one module for each family, which ops.py registers.

A module has for each op, in this order: the public function; the checks of csrc/<op>/<op>.cpp, in the same order and
words; the fakes; setup_context and backward; setup_context and backward of the backward operator, which compute the
second derivative; the plain form; the autocast rule. A function is named after its operator, followed by _fake,
_setup_context, _backward, _plain or _autocast; _second stands for _backward_backward.

A fake returns tensors with the shape, strides and dtype that csrc/<op>/<op>.cpp allocates. A backward returns gradients
by the names of arguments. In second derivatives grad_grad_x stands for the gradient with respect to the backward
operator's result grad_x. If a backward calls differentiable operators or plain tensor operations, autograd
differentiates it to any order.

A plain form computes an operator in plain tensor operations, for forward-mode differentiation, which a kernel cannot
do. It takes the operator's arguments, defaults included, and returns the operator's results, which differ from the
kernel's only by rounding. PyTorch can differentiate a plain form in any mode and to any order. Where reference.py has
the same formula, the plain form is or calls its function.

An autocast rule takes the device type and an operator's arguments by position, defaults included, and returns the
arguments with which the operator is called.
"""
