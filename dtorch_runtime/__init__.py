"""What runs a DTorch program: controller, node agents, workers, and the plain data between them.

Importing this package, or anything below it except ``dtorch_runtime.worker``, never imports torch.
"""
