"""What every driver uses: sockets, batches and messages, questions by ``getsockopt``, the files of modules, the one error."""
