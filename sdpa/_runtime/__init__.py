"""What the machine offers: the kernels that run on it, and the threads that a call may use."""
