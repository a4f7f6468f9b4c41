"""What every driver uses: sockets, batches and messages, ``getsockopt`` calls, the files of modules, and ``KernelError``."""
