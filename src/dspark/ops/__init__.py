"""Operations with more than one implementation: one folder each, a torch form that is always there and Triton kernels.

A folder's `__init__.py` is the door: it states the contract, checks the arguments and picks the implementation with
`dispatch.choose`. Kernels know tensors only; nothing here imports the rest of the package.
"""
