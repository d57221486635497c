"""Triton's interpreter, mended in two places where it silently computes something else.

Here alone: what it gets wrong, compiled kernels get right. Where there is a GPU, the tests of this
folder run compiled on that.
"""

import os

import numpy as np
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime import interpreter

    _create_dot = interpreter.InterpreterBuilder.create_dot
    _cast_impl = interpreter.InterpreterBuilder.cast_impl

    def _widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        """A bf16 tensor, kept as its bits in uint16, as the fp32 tensor of the same values."""
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def _dot(
        self: interpreter.InterpreterBuilder,
        a: interpreter.TensorHandle,
        b: interpreter.TensorHandle,
        d: interpreter.TensorHandle,
        input_precision: object,
        max_num_imprecise_acc: object,
    ) -> interpreter.TensorHandle:
        """Multiply bf16 as numbers, not as the integers that hold their bits."""
        wide_a, wide_b = _widened(a), _widened(b)
        return _create_dot(self, wide_a, wide_b, d, input_precision, max_num_imprecise_acc)

    def _cast(
        self: interpreter.InterpreterBuilder, src: interpreter.TensorHandle, dst_type: tl.dtype
    ) -> interpreter.TensorHandle:
        """Round to the nearest bf16 instead of towards zero."""
        if dst_type.scalar != tl.bfloat16 or src.dtype.scalar == tl.bfloat16:
            src = _widened(src)
            is_done = src.dtype.scalar == dst_type.scalar
            return src if is_done else _cast_impl(self, src, dst_type)
        values = torch.from_numpy(np.ascontiguousarray(src.data).astype(np.float32))
        bits = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.cast_impl = _cast
