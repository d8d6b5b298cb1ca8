"""Contains the ops in Python, one module for each family, which ops.py registers.

A module has for each op, in this order: the public function; checks of csrc/<op>/<op>.cpp, in the same order and words;
the fakes; setup_context and backward; those of the backward operator, which are the second derivative; the plain form;
the autocast rule. Their names are the operator's, followed by _fake, _setup_context, _backward, _plain or _autocast;
_second stands for _backward_backward.

A fake promises the shape, strides and dtype that csrc/<op>/<op>.cpp allocates. A backward returns gradients by the
names of arguments. In second derivatives grad_grad_x stands for the gradient with respect to the backward operator's
result grad_x. If a backward calls differentiable operators or plain tensor operations, autograd differentiates it to
any order.

A plain form is an operator in plain tensor operations, for forward-mode differentiation, which a kernel cannot do. It
takes the operator's arguments, defaults included, and returns its results. PyTorch can differentiate it in any mode and
to any order. It differs from the kernel's results only by rounding.

An autocast rule takes the device type and an operator's arguments by position, defaults included, and returns the
arguments with which the operator is called.
"""
