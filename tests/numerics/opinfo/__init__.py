"""PyTorch's own operator database run on DTorch: what it gives, beside what plain PyTorch gives.

What is measured:

* **Entries**: those of ``torch.testing._internal.common_methods_invocations.op_db`` that take the dtype (float32) on
  CPU. Their size constants become L=24 M=12 S=4 XS=2, so that two devices divide every dim (the even run), or stay
  as they are (the uneven run).
* **Samples**: the first 12 (uneven: 8) that an entry makes. One counts when plain torch runs it and it has a strided
  tensor among its arguments; an entry without such a sample is not testable.
* **Combinations**: each tensor argument independently is replicated or sharded on one of its dims of size > 1 that the
  mesh divides (uneven: any of size > 1); bool and 0-dim tensors are replicated. At most 32 (uneven: 16) a sample, the
  one where all are replicated first, the others a seeded draw.
* **A check** is one combination. It passes when the call gives as many leaves as plain torch, each with the same
  shape, dtype and ``requires_grad``, and the values of *every* replica equal plain torch's (``assert_close``, its
  default tolerances, nan equal to nan); and when the gradients of ``sum(out_i * w_i)`` do (rtol 1e-4, atol 1e-5).
  Contents of ``empty`` are not compared.
* **Rounding**: sums over what is cut are added in another order, so values may differ in their last digits. A check
  whose values or gradients are not close to plain torch's, but as near to what the op gives in float64 as plain
  torch's own are, counts in a column of its own and does not fail (``rounding.is_rounding`` has the criterion).
* **Random entries**, those whose plain result depends on the seed, are compared with DTorch's own run on a mesh of one
  device instead.
* In **strict** mode a check may also end in ``PlacementError``, in the call or in its backward pass, unless every
  argument is replicated. In **auto** mode, under ``dtorch.auto_redistribute()``, it may not.

``python -m tests.numerics.opinfo --help`` says how to run it.
"""
