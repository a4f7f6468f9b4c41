"""Code that all drivers share: sockets, batches and messages, ``getsockopt`` calls, kernel module files, and ``KernelError``."""
